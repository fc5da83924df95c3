//! `consort bench`: measures prefill and decode speed on this machine, and compares them with the machine's limits; or how exact a
//! model's arithmetic is.

mod accuracy;
mod chain_result;
mod limits;

use std::fmt;
use std::io::{Write, stdout};
use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::{Executor, RankReport, measure};
use model::Checkpoint;
use serde::Serialize;
use types::TokenId;

use crate::executors::cluster::ChainMonitor;
use crate::executors::{LoadObserver, LoadedModel};
use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{ModelName, ModelOptions, ThreadOption, thread_count};
use crate::store::Store;
use crate::terminal;
use crate::usage::UsageError;
use chain_result::ChainResult;
use limits::{Limit, Machine, TokenCost, build_fault};

/// Measure how fast a model runs on this machine, or how exact it is
///
/// Speeds are compared with the limits of the machine.
#[derive(Args, Debug)]
pub struct BenchArgs {
    #[command(flatten)]
    model: ModelName,
    /// Prompt lengths for prefill tests; 0 for none
    #[arg(short, long, value_name = "TOKENS", value_delimiter = ',', default_value = "512")]
    prompt: Vec<usize>,
    /// Numbers of tokens to generate; 0 for none
    #[arg(short = 'n', long, value_name = "TOKENS", value_delimiter = ',', default_value = "128")]
    generate: Vec<usize>,
    /// Batch sizes: sequences that are decoded at once
    #[arg(short, long, value_name = "COUNT", value_delimiter = ',', default_value = "1")]
    batch: Vec<NonZeroUsize>,
    /// Compute threads [default: one per CPU]
    #[arg(short, long, value_name = "COUNT", value_delimiter = ',', value_parser = thread_count)]
    threads: Vec<NonZeroUsize>,
    /// Timed runs of each test, after one warm-up run
    #[arg(short, long, value_name = "COUNT", default_value = "3")]
    rounds: NonZeroUsize,
    /// Instead of speed, compare the model's predictions of this text with those of f32 arithmetic on the same weights
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "generate", "batch", "rounds"])]
    accuracy: Option<PathBuf>,
    /// Print one JSON object for each test
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: ModelOptions,
}

impl BenchArgs {
    pub fn run(self) -> Result<()> {
        let tests = self.tests();
        if tests.is_empty() {
            return Err(UsageError::new("nothing to measure: -p and -n are both 0").into());
        }
        let config = ModelConfig::new(&self.options)?;
        let files = Store::from_environment()?.resolve(self.model.get())?;
        if let Some(text) = &self.accuracy {
            let default = || config.threads(&ThreadOption::default());
            let threads = self.threads.first().map_or_else(default, |count| count.get());
            return accuracy::run(&config, &files, text, threads, self.json);
        }
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let threads = match self.threads.is_empty() {
            true => vec![config.threads(&ThreadOption::default())],
            false => self.threads.iter().map(|count| count.get()).collect(),
        };
        for (index, threads) in threads.into_iter().enumerate() {
            // The probe runs before the model is loaded, because both need memory.
            let machine = Machine::measure(threads * config.placement.local_ranks(), config.execution.level()?);
            let mut chain = ObservedChain::default();
            let mut loaded = config.load_with(&files.path, &checkpoint, threads, capacity(&tests), &mut chain)?;
            let cost = token_cost(&config, &checkpoint, &*loaded)?;
            if !self.json {
                if index == 0 {
                    if let Some(fault) = build_fault(config.execution.level()?)? {
                        terminal::note(&fault);
                    }
                    writeln!(
                        stdout(),
                        "{}: {:.0} MB of weights are read for a token",
                        files.name,
                        cost.weight_bytes() / 1e6
                    )?;
                }
                let ranks = match config.placement.ranks() {
                    1 => String::new(),
                    ranks => format!("{ranks} ranks with "),
                };
                writeln!(
                    stdout(),
                    "\n{ranks}{threads} threads, {}: {machine}\n{TABLE_HEAD}",
                    config.execution.level()?
                )?;
            }
            let chunk = config.execution.chunk();
            let results = run_tests(&mut *loaded, &tests, chunk, self.rounds.get(), &|| chain.restart())?;
            for (test, tokens_per_s) in tests.iter().zip(results) {
                let mut limit = test.limit(&cost, &machine, chunk);
                // Other hosts are assumed to be as fast as this one.
                limit.tokens_per_s *= config.placement.ranks() as f64 / config.placement.local_ranks() as f64;
                let report = Report::new(*test, threads, tokens_per_s, limit);
                match self.json {
                    true => writeln!(stdout(), "{}", serde_json::to_string(&report)?)?,
                    false => writeln!(stdout(), "{}", report.table_row())?,
                }
            }
            for times in loaded.rank_reports()?.iter().map(RankTimes::new) {
                match self.json {
                    true => writeln!(stdout(), "{}", serde_json::to_string(&times)?)?,
                    false => writeln!(stdout(), "{times}")?,
                }
            }
            if let Some(result) = chain.result() {
                match self.json {
                    true => writeln!(stdout(), "{}", serde_json::to_string(&result)?)?,
                    false => writeln!(stdout(), "{result}")?,
                }
            }
        }
        Ok(())
    }

    fn tests(&self) -> Vec<Test> {
        let prefills = self.prompt.iter().filter(|&&prompt| prompt > 0).map(|&prompt| Test::Prefill { prompt });
        let lengths = self.generate.iter().filter(|&&generate| generate > 0);
        let decodes = lengths
            .flat_map(|&generate| self.batch.iter().map(move |batch| Test::Decode { generate, batch: batch.get() }));
        prefills.chain(decodes).collect()
    }
}

fn token_cost(config: &ModelConfig, checkpoint: &Checkpoint, loaded: &dyn LoadedModel) -> Result<TokenCost> {
    let kept = config.execution.effective_kv_type(checkpoint)?;
    Ok(TokenCost::new(checkpoint.description(), loaded.layer_bytes(), loaded.head_bytes(), kept.bytes()))
}

/// The chain of machines that runs the model, if there is one.
#[derive(Default)]
struct ObservedChain(Option<ChainMonitor>);

impl LoadObserver for ObservedChain {
    fn layers(&mut self, _done: usize) {}

    fn chain(&mut self, monitor: &ChainMonitor) {
        self.0 = Some(monitor.clone());
    }
}

impl ObservedChain {
    /// Forgets the steps so far.
    fn restart(&self) {
        if let Some(monitor) = &self.0 {
            monitor.times().restart();
        }
    }

    fn result(&self) -> Option<ChainResult> {
        let monitor = self.0.as_ref()?;
        Some(ChainResult::new(&monitor.plan()?, monitor.times()))
    }
}

/// Capacity for the largest of the tests. They run one after another.
fn capacity(tests: &[Test]) -> RequestedCapacity {
    let most = |of: fn(Test) -> usize| tests.iter().map(|test| of(*test)).max().unwrap_or(1);
    let sequences = most(Test::batch);
    RequestedCapacity::full(sequences, most(Test::positions), sequences)
}

/// One test, for one number of threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    Prefill { prompt: usize },
    Decode { generate: usize, batch: usize },
}

impl Test {
    /// The name that llama-bench gives the test.
    fn name(self) -> String {
        match self {
            Self::Prefill { prompt } => format!("pp{prompt}"),
            Self::Decode { generate, .. } => format!("tg{generate}"),
        }
    }

    fn batch(self) -> usize {
        match self {
            Self::Prefill { .. } => 1,
            Self::Decode { batch, .. } => batch,
        }
    }

    /// Tokens in each sequence at the end of the test.
    fn positions(self) -> usize {
        match self {
            Self::Prefill { prompt } => prompt,
            Self::Decode { generate, .. } => generate.saturating_add(1),
        }
    }

    fn run(self, executor: &mut dyn Executor, chunk: usize, tokens: &[TokenId]) -> Result<f64> {
        let measured = match self {
            Self::Prefill { prompt } => measure::prefill(executor, &tokens[..prompt], chunk)?,
            Self::Decode { generate, batch } => {
                measure::decode(executor, &tokens[..1], &tokens[1..][..generate], batch)?
            }
        };
        Ok(measured.tokens_per_s())
    }

    fn limit(self, cost: &TokenCost, machine: &Machine, chunk: usize) -> Limit {
        match self {
            Self::Prefill { prompt } => cost.prefill(machine, chunk.min(prompt)),
            Self::Decode { generate, batch } => cost.decode(machine, batch, 1.0 + generate as f64 / 2.0),
        }
    }
}

/// The result of a test.
#[derive(Debug, Serialize)]
struct Report {
    test: String,
    threads: usize,
    batch: usize,
    /// One value for each round.
    tokens_per_s: Vec<f64>,
    /// The median as a percentage of the limit. Above 100 where the weights fit in a cache that is faster than memory.
    percent_of_limit: f64,
    limit_tokens_per_s: f64,
    /// What sets the limit: `reads` from memory, or the arithmetic of the weights: `int8`, `bf16`, `f32`.
    limited_by: &'static str,
}

impl Report {
    fn new(test: Test, threads: usize, tokens_per_s: Vec<f64>, limit: Limit) -> Self {
        Self {
            test: test.name(),
            threads,
            batch: test.batch(),
            percent_of_limit: 100.0 * median(&tokens_per_s) / limit.tokens_per_s,
            tokens_per_s,
            limit_tokens_per_s: limit.tokens_per_s,
            limited_by: limit.bound.name(),
        }
    }

    fn table_row(&self) -> String {
        let Self { test, threads, batch, tokens_per_s, percent_of_limit, limit_tokens_per_s, limited_by } = self;
        let (low, high) = tokens_per_s.iter().fold((f64::MAX, 0f64), |(low, high), &x| (low.min(x), high.max(x)));
        let tokens = format!("{:.1}", median(tokens_per_s));
        let range = format!("{low:.1}-{high:.1}");
        format!(
            "{test:>8} {threads:>7} {batch:>5} {tokens:>10} {range:>17} {limit_tokens_per_s:>10.1} {percent_of_limit:>6.1} %  {limited_by}"
        )
    }
}

const TABLE_HEAD: &str = "    test threads batch   tokens/s           min-max      limit  reached  limited by";

/// The part of a rank's time that it waited for other ranks, over all tests.
#[derive(Debug, Serialize)]
struct RankTimes {
    rank: usize,
    step_s: f64,
    collective_percent: f64,
    weight_bytes: u64,
    resident_bytes: u64,
}

impl RankTimes {
    fn new(report: &RankReport) -> Self {
        let RankReport { rank, weight_bytes, resident_bytes, step_time, wait_time, .. } = report;
        let step_s = step_time.as_secs_f64();
        let collective_percent = if step_s > 0.0 { 100.0 * wait_time.as_secs_f64() / step_s } else { 0.0 };
        let (weight_bytes, resident_bytes) = (*weight_bytes, *resident_bytes);
        Self { rank: rank.index(), step_s, collective_percent, weight_bytes, resident_bytes }
    }
}

impl fmt::Display for RankTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, step_s, collective_percent, weight_bytes, resident_bytes } = self;
        let (weights, resident) = (*weight_bytes as f64 / 1e6, *resident_bytes as f64 / 1e6);
        write!(
            f,
            "rank {rank}: {step_s:.2} s in steps, {collective_percent:.1} % of it in collectives; \
             {weights:.0} MB of weights, {resident:.0} MB resident"
        )
    }
}

/// Runs every test once as a warm-up, then `rounds` rounds of all tests, so that a disturbance of the machine affects all
/// tests alike. Returns tokens per second, `[test][round]`.
fn run_tests(
    executor: &mut dyn Executor,
    tests: &[Test],
    chunk: usize,
    rounds: usize,
    after_warm_up: &dyn Fn(),
) -> Result<Vec<Vec<f64>>> {
    let longest = tests.iter().map(|test| test.positions()).max().unwrap_or(0);
    let tokens = noise(longest, executor.capacity().vocab);
    let mut results = vec![Vec::with_capacity(rounds); tests.len()];
    for round in 0..=rounds {
        for (test, result) in tests.iter().zip(&mut results) {
            let tokens_per_s = test.run(executor, chunk, &tokens)?;
            if round > 0 {
                result.push(tokens_per_s);
            }
        }
        if round == 0 {
            after_warm_up();
        }
    }
    Ok(results)
}

/// Pseudo-random tokens from the whole vocabulary, the same on each call.
fn noise(count: usize, vocab: usize) -> Vec<TokenId> {
    let spread = |index: u64| index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    (0..count as u64).map(|index| TokenId((spread(index) % vocab as u64) as u32)).collect()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[len / 2],
        len => (sorted[len / 2 - 1] + sorted[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_between_the_middle_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
    }

    #[test]
    fn arbitrary_tokens_stay_within_the_vocabulary_and_differ() {
        let tokens = noise(512, 1000);
        assert!(tokens.iter().all(|token| token.0 < 1000));
        let distinct: std::collections::HashSet<_> = tokens.iter().map(|token| token.0).collect();
        assert!(distinct.len() > 300, "{}", distinct.len());
    }
}
