//! `Sampler`: from a row of logits to a token.
//!
//! Tokens that are not allowed are masked first. The order then is that of Hugging Face transformers: repetition penalty,
//! presence and frequency penalties, logit bias, temperature, top-k, top-p (of what top-k left), min-p. llama.cpp applies
//! the temperature last; at temperature 1 both are the same. At temperature 0 the largest logit wins, and among equals the
//! lowest id.
//!
//! Each of the three filters keeps the best tokens down to some rank. So each is a *cut*, the highest cut wins, and no row
//! is ever sorted: selection finds a cut, then the draw goes through the tokens above it in the order of ids. That order
//! keeps the choice the same when a filter is computed in another way.

use std::sync::Arc;

use types::TokenId;

use crate::logit_row::{self, Softmax};
use crate::random;

/// Limit of [`SamplingParams::logprobs`].
pub const TOP_LOGPROBS_MAX: usize = 20;

/// How a token is sampled. The default is greedy, with everything off.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Only the `k` best; 0 is off.
    pub top_k: usize,
    /// Only the best that together have at least this probability; 1 is off.
    pub top_p: f32,
    /// Only tokens with at least this part of the best one's probability; 0 is off.
    pub min_p: f32,
    /// Same seed, same request: same answer.
    pub seed: u64,
    /// Divides (multiplies, where negative) the logits of tokens in the prompt or the answer; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once for each occurrence in the answer; 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Option<Arc<[(TokenId, f32)]>>,
    /// The log probability of the chosen token and of this many best ones.
    pub logprobs: Option<usize>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: None,
            logprobs: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SamplingParamsError {
    #[error("{name} is {value}, it must be {range}")]
    OutOfRange { name: &'static str, value: f32, range: &'static str },
    #[error("logit bias for token {token}, which is outside the vocabulary of {vocab}")]
    BiasOutOfVocabulary { token: u32, vocab: usize },
    #[error("{asked} top log probabilities were asked for, at most {TOP_LOGPROBS_MAX} are given")]
    TooManyLogprobs { asked: usize },
}

impl SamplingParams {
    /// Checks that every number is in its range. [`Sampler::sample`] relies on it.
    pub fn check(&self, vocab: usize) -> Result<(), SamplingParamsError> {
        // Beyond 1,000 nothing changes any more, and logits stay finite.
        let ranges = [
            ("temperature", self.temperature, 0.0..=1000.0, "from 0 to 1000"),
            ("top_p", self.top_p, f32::MIN_POSITIVE..=1.0, "above 0 and at most 1"),
            ("min_p", self.min_p, 0.0..=1.0, "from 0 to 1"),
            ("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE..=1000.0, "above 0 and at most 1000"),
            ("presence_penalty", self.presence_penalty, -1000.0..=1000.0, "from -1000 to 1000"),
            ("frequency_penalty", self.frequency_penalty, -1000.0..=1000.0, "from -1000 to 1000"),
        ];
        for (name, value, range, words) in ranges {
            if !range.contains(&value) {
                return Err(SamplingParamsError::OutOfRange { name, value, range: words });
            }
        }
        for &(token, bias) in self.logit_bias.iter().flat_map(|biases| biases.iter()) {
            if token.0 as usize >= vocab {
                return Err(SamplingParamsError::BiasOutOfVocabulary { token: token.0, vocab });
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(SamplingParamsError::OutOfRange {
                    name: "logit_bias",
                    value: bias,
                    range: "finite, or -inf",
                });
            }
        }
        match self.logprobs {
            Some(asked) if asked > TOP_LOGPROBS_MAX => Err(SamplingParamsError::TooManyLogprobs { asked }),
            _ => Ok(()),
        }
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    pub token: TokenId,
    pub logprobs: Option<Logprobs>,
}

/// Log probabilities of the model itself: before masks, penalties, bias, temperature and filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    pub chosen: f32,
    /// The best tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    #[error("the model gave a logit that is not a number, or infinite")]
    NotFinite,
    #[error("no token is allowed: every logit is minus infinity")]
    NothingAllowed,
}

/// All tokens before the one to sample.
#[derive(Clone, Copy, Debug)]
pub struct History<'a> {
    pub tokens: &'a [TokenId],
    /// How many of them, at the beginning, are the prompt's.
    pub prompt_tokens: usize,
}

/// Which tokens may be sampled. The default is all.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllowedTokens<'a> {
    /// One bit for each token, as in [`TokenMask::words`](crate::TokenMask::words).
    pub mask: Option<&'a [u32]>,
    /// Tokens that are not allowed, whatever the mask.
    pub suppressed: &'a [TokenId],
}

impl AllowedTokens<'_> {
    /// Sets the logits of all other tokens to minus infinity.
    fn apply(&self, logits: &mut [f32]) {
        if let Some(words) = self.mask {
            for (block, &word) in logits.chunks_mut(32).zip(words).filter(|(_, word)| **word != u32::MAX) {
                for (bit, logit) in block.iter_mut().enumerate() {
                    *logit = if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                }
            }
            for block in logits.chunks_mut(32).skip(words.len()) {
                block.fill(f32::NEG_INFINITY);
            }
        }
        for token in self.suppressed {
            if let Some(logit) = logits.get_mut(token.0 as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// Samples tokens. Holds working memory, which stops growing after the first rows, and no state.
#[derive(Debug, Default)]
pub struct Sampler {
    keys: Vec<u64>,
    masses: Vec<f64>,
    /// For each token twice its count in the answer, plus one if it occurs at all. Zero between calls.
    counts: Vec<u32>,
    /// Logits before penalties and bias changed them; the first entry of a token is the model's.
    changed: Vec<(u32, f32)>,
}

impl Sampler {
    pub fn new() -> Self {
        Self::default()
    }

    /// Samples the token that follows `history`. Changes `logits`.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        sampling: &SamplingParams,
        history: History<'_>,
        allowed: AllowedTokens<'_>,
    ) -> Result<Sampled, SampleError> {
        let logprobs = sampling.logprobs.map(|count| self.top_logprobs(logits, count)).transpose()?;
        allowed.apply(logits);
        self.changed.clear();
        if sampling.penalises() {
            self.penalise(logits, sampling, history);
        }
        for &(token, bias) in sampling.logit_bias.iter().flat_map(|biases| biases.iter()) {
            let logit = &mut logits[token.0 as usize];
            self.changed.push((token.0, *logit));
            *logit += bias;
        }
        let best = logit_row::maximum(logits)?;
        let token = if sampling.temperature == 0.0 {
            logit_row::first_index(logits, best) as u32
        } else {
            let softmax = Softmax { logits, best, temperature: sampling.temperature };
            let cut = self.cut(softmax, sampling);
            softmax.draw(cut, random::uniform(sampling.seed, history.tokens.len() as u64), &mut self.masses)
        };
        let logprobs = logprobs.map(|(normaliser, top)| {
            let before = self.changed.iter().find(|(changed, _)| *changed == token);
            let raw = before.map_or(logits[token as usize], |&(_, logit)| logit);
            Logprobs { chosen: (f64::from(raw) - normaliser) as f32, top }
        });
        Ok(Sampled { token: TokenId(token), logprobs })
    }

    /// The log probability of a given token, and of the `top` best ones.
    pub fn logprobs_of(&mut self, logits: &[f32], token: TokenId, top: usize) -> Result<Logprobs, SampleError> {
        let (normaliser, top) = self.top_logprobs(logits, top)?;
        // A token beyond the head's rows can be embedded, but not predicted.
        let logit = logits.get(token.0 as usize).copied().unwrap_or(f32::NEG_INFINITY);
        Ok(Logprobs { chosen: (f64::from(logit) - normaliser) as f32, top })
    }

    /// The logarithm of the sum of exponentials, and the best `count` log probabilities.
    fn top_logprobs(&mut self, logits: &[f32], count: usize) -> Result<(f64, Vec<(TokenId, f32)>), SampleError> {
        let best = logit_row::maximum(logits)?;
        let normaliser = f64::from(best) + Softmax { logits, best, temperature: 1.0 }.mass().ln();
        logit_row::select_best(&mut self.keys, logits, count);
        self.keys.sort_unstable_by(|a, b| b.cmp(a));
        let logprob = |key| (f64::from(logit_row::logit_of(key)) - normaliser) as f32;
        let top = self.keys.iter().map(|&key| (TokenId(logit_row::id_of(key)), logprob(key)));
        Ok((normaliser, top.collect()))
    }

    fn penalise(&mut self, logits: &mut [f32], sampling: &SamplingParams, history: History<'_>) {
        if self.counts.len() < logits.len() {
            self.counts.resize(logits.len(), 0);
            self.changed.reserve(logits.len());
        }
        for (position, token) in history.tokens.iter().enumerate() {
            // Tokens outside the head's rows have no logit to penalise.
            let Some(count) = self.counts.get_mut(token.0 as usize).filter(|_| (token.0 as usize) < logits.len())
            else {
                continue;
            };
            if *count == 0 {
                self.changed.push((token.0, logits[token.0 as usize]));
            }
            *count = (*count | 1) + if position < history.prompt_tokens { 0 } else { 2 };
        }
        for &(token, _) in &self.changed {
            let occurrences = std::mem::take(&mut self.counts[token as usize]) / 2;
            let logit = &mut logits[token as usize];
            *logit =
                if *logit > 0.0 { *logit / sampling.repetition_penalty } else { *logit * sampling.repetition_penalty };
            if occurrences > 0 {
                *logit -= sampling.presence_penalty + sampling.frequency_penalty * occurrences as f32;
            }
        }
    }

    /// The key of the worst token that all filters keep.
    fn cut(&mut self, softmax: Softmax<'_>, sampling: &SamplingParams) -> u64 {
        let &SamplingParams { temperature, top_k, top_p, min_p, .. } = sampling;
        let Softmax { logits, best, .. } = softmax;
        let mut cut = logit_row::lowest_key(f32::NEG_INFINITY);
        if min_p > 0.0 {
            cut = cut.max(logit_row::lowest_key(best + temperature * min_p.ln()));
        }
        let filters_k = top_k > 0 && top_k < logits.len();
        if filters_k {
            logit_row::select_best(&mut self.keys, logits, top_k);
            cut = cut.max(*self.keys.iter().min().expect("top_k is at least one"));
        }
        if top_p < 1.0 {
            let all = if filters_k { softmax.mass_of(&self.keys) } else { softmax.mass() };
            let wanted = f64::from(top_p) * all;
            if !filters_k {
                self.select_mass(softmax, wanted);
            }
            cut = cut.max(softmax.top_p_cut(&mut self.keys, wanted));
        }
        cut
    }

    /// Fills `keys` with so many of the best that they have at least the mass `wanted`: usually a few dozen will do.
    fn select_mass(&mut self, softmax: Softmax<'_>, wanted: f64) {
        let mut count = 64;
        loop {
            logit_row::select_best(&mut self.keys, softmax.logits, count);
            if count >= softmax.logits.len() || softmax.mass_of(&self.keys) >= wanted {
                return;
            }
            count *= 8;
        }
    }
}
