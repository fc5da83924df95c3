//! `consort bench --accuracy`: how far the logits of a text are from those of f32 arithmetic on the same weights, for tokens of
//! prompts and for generated tokens.

use std::io::{Write, stdout};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use engine::{Executor, Phase, inspect};
use model::Checkpoint;
use serde::Serialize;
use types::TokenId;

use crate::bounded_file;
use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::progress;
use crate::store::ModelFiles;
use crate::text_assets::TextAssets;

/// The longest text: more would take days.
const TEXT_BYTES_MAX: u64 = 16 << 20;
/// Tokens of each sequence that the text is cut into.
const SEQUENCE_TOKENS: usize = 512;
/// Tokens of a step. The logits of all of them are kept twice.
const CHUNK: usize = 64;

/// Compares the model as `config` runs it with f32 arithmetic, and prints a table or JSON.
pub fn run(config: &ModelConfig, files: &ModelFiles, text: &Path, threads: usize, json: bool) -> Result<()> {
    let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
    let tokens = tokens(&files.path, &checkpoint, text)?;
    let longest = config.execution.context(&checkpoint, SEQUENCE_TOKENS)?.min(tokens.len());
    let capacity = RequestedCapacity::full(1, longest, CHUNK.min(longest));
    let mut loaded = config.load_with(&files.path, &checkpoint, threads, capacity, &mut |_| {})?;
    let mut reference = config.load_reference(&checkpoint, threads, capacity)?;
    if !json {
        let compared = format!("{} tokens of {}, compared with f32 arithmetic", tokens.len(), text.display());
        writeln!(stdout(), "{}, {}: {compared}\n{TABLE_HEAD}", files.name, config.execution.level()?)?;
    }
    for (role, phase) in [("prompt", Phase::Prefill), ("generated", Phase::Decode)] {
        let bar = progress::steps(tokens.len() as u64, role);
        let mut tally = Tally::default();
        for sequence in tokens.chunks(longest) {
            let executors = (&mut *loaded as &mut dyn Executor, &mut reference as &mut dyn Executor);
            let mut next = sequence.iter().skip(1);
            inspect::compare::<_, _, anyhow::Error>(executors, sequence, phase, CHUNK, |found, expected| {
                tally.add(found, expected, next.next().copied());
                bar.inc(1);
                Ok(())
            })?;
        }
        bar.finish_and_clear();
        let report = tally.report(role);
        match json {
            true => writeln!(stdout(), "{}", serde_json::to_string(&report)?)?,
            false => writeln!(stdout(), "{}", report.table_row())?,
        }
    }
    Ok(())
}

fn tokens(model: &Path, checkpoint: &Checkpoint, text: &Path) -> Result<Vec<TokenId>> {
    let bytes = bounded_file::read(text, TEXT_BYTES_MAX).with_context(|| format!("read {}", text.display()))?;
    let text_of_file = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8", text.display()))?;
    let tokens = TextAssets::open(model, checkpoint)?.raw(&text_of_file)?;
    ensure!(tokens.len() >= 2, "{} has fewer than two tokens: there is nothing to compare", text.display());
    Ok(tokens)
}

/// Sums over the positions of a text.
#[derive(Debug, Default)]
struct Tally {
    positions: usize,
    divergence: f64,
    agreeing: usize,
    /// Positions that another token of the text follows, and the sums of minus its log probability.
    followed: usize,
    surprise: f64,
    surprise_f32: f64,
}

impl Tally {
    fn add(&mut self, found: &[f32], expected: &[f32], next: Option<TokenId>) {
        let (found_total, expected_total) = (log_sum_exp(found), log_sum_exp(expected));
        let log_probabilities = found.iter().zip(expected);
        let divergence = log_probabilities.map(|(found, expected)| {
            let expected = f64::from(*expected) - expected_total;
            expected.exp() * (expected - (f64::from(*found) - found_total))
        });
        self.positions += 1;
        self.divergence += divergence.sum::<f64>();
        self.agreeing += usize::from(best(found) == best(expected));
        if let Some(next) = next {
            self.followed += 1;
            self.surprise += found_total - f64::from(found[next.0 as usize]);
            self.surprise_f32 += expected_total - f64::from(expected[next.0 as usize]);
        }
    }

    fn report(&self, role: &'static str) -> Report {
        let (positions, followed) = (self.positions.max(1) as f64, self.followed.max(1) as f64);
        Report {
            role,
            positions: self.positions,
            kl_divergence: self.divergence / positions,
            best_token_agreement: self.agreeing as f64 / positions,
            perplexity: (self.surprise / followed).exp(),
            perplexity_f32: (self.surprise_f32 / followed).exp(),
        }
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let most = logits.iter().fold(f32::NEG_INFINITY, |most, logit| most.max(*logit));
    f64::from(most) + logits.iter().map(|logit| f64::from(logit - most).exp()).sum::<f64>().ln()
}

/// The first of the largest logits, as greedy sampling takes it.
fn best(logits: &[f32]) -> usize {
    let larger = |best, (index, logit): (usize, &f32)| if *logit > logits[best] { index } else { best };
    logits.iter().enumerate().fold(0, larger)
}

/// The result for one role.
#[derive(Debug, Serialize)]
struct Report {
    /// `prompt` or `generated`.
    role: &'static str,
    positions: usize,
    /// The mean over all positions of the Kullback-Leibler divergence from f32 arithmetic, in nats.
    kl_divergence: f64,
    /// The part of the positions whose most probable token is that of f32 arithmetic.
    best_token_agreement: f64,
    perplexity: f64,
    perplexity_f32: f64,
}

const TABLE_HEAD: &str = "tokens are  positions  KL divergence  same best token  perplexity  f32 perplexity";

impl Report {
    fn table_row(&self) -> String {
        let Self { role, positions, kl_divergence, best_token_agreement, perplexity, perplexity_f32 } = self;
        let agreement = 100.0 * best_token_agreement;
        format!(
            "{role:<10}  {positions:>9}  {kl_divergence:>13.2e}  {agreement:>13.1} %  {perplexity:>10.4}  {perplexity_f32:>14.4}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_logits_do_not_diverge_and_a_constant_changes_nothing() {
        let mut tally = Tally::default();
        let (logits, shifted) = ([0.5, 2.0, -1.0], [10.5, 12.0, 9.0]);
        tally.add(&logits, &logits, Some(TokenId(1)));
        tally.add(&shifted, &logits, None);
        let report = tally.report("prompt");
        assert!(report.kl_divergence.abs() < 1e-12 && report.best_token_agreement == 1.0);
        assert!((report.perplexity - report.perplexity_f32).abs() < 1e-12);
    }

    /// The logits of the probabilities 1/2, 1/2 and 1/4, 3/4.
    #[test]
    fn a_divergence_is_that_of_the_definition() {
        let mut tally = Tally::default();
        let logits = |probabilities: [f32; 2]| probabilities.map(f32::ln);
        tally.add(&logits([0.25, 0.75]), &logits([0.5, 0.5]), Some(TokenId(0)));
        let report = tally.report("generated");
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((report.kl_divergence - expected).abs() < 1e-6, "{}", report.kl_divergence);
        assert_eq!(report.best_token_agreement, 0.0);
        assert!((report.perplexity - 4.0).abs() < 1e-5 && (report.perplexity_f32 - 2.0).abs() < 1e-5);
    }
}
