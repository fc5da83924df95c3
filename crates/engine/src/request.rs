//! What is asked of the engine, and what it answers.

use std::sync::Arc;
use std::time::Duration;

use types::TokenId;

use crate::sampler::{SampleError, Sampled, SamplingParams};

/// A request that the engine has accepted. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// Tokens to generate at most; `usize::MAX` goes on until the context is full.
    pub tokens_max: usize,
    /// Each of these ends the answer and is not part of it. None: goes on to `tokens_max`.
    pub eos: Arc<[TokenId]>,
}

impl Request {
    /// Greedy, without an end of sequence.
    pub fn greedy(prompt: Vec<TokenId>, tokens_max: usize) -> Self {
        Self { prompt, sampling: SamplingParams::default(), tokens_max, eos: Arc::new([]) }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub request: RequestId,
    pub kind: EventKind,
}

/// A request gives tokens, then ends exactly once.
#[derive(Clone, Debug, PartialEq)]
pub enum EventKind {
    Token(Sampled),
    Finished(Finished),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    pub reason: FinishReason,
    pub timings: Timings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its answer with this token.
    Eos(TokenId),
    /// All tokens that were asked for are there.
    Length,
    /// The model's context, or the whole K/V cache, is full.
    Context,
    Cancelled,
    /// The model's logits were unusable.
    Failed(SampleError),
}

/// Where a request's time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    pub prompt_tokens: usize,
    /// Tokens of the answer; the one that ended it does not count.
    pub generated_tokens: usize,
    /// Until its session was opened.
    pub queued: Duration,
    /// From there to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

impl Timings {
    /// 0 before there is a token.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        rate(self.prompt_tokens, self.prefill)
    }

    /// Of the tokens after the first, which prefill gave; 0 before there is a second one.
    pub fn decode_tokens_per_s(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

pub(crate) fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}
