//! `Request`: one sequence for the engine to run, and `Event`: what happens to it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use types::TokenId;

use crate::constraint::{Constraint, ConstraintError};
use crate::engine::EngineError;
use crate::executor::{Capacity, ExecutorError};
use crate::sampler::{Logprobs, SampleError, Sampled, SamplingParams, SamplingParamsError, TOP_LOGPROBS_MAX};

/// A request that the engine has accepted. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// The tenant that a request belongs to. Tenants are served equal numbers of tokens, and the prefix cache is salted
/// with the tenant, so that no tenant can find out by timing what another one has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u64);

/// One sequence to continue, or to embed.
pub struct Request {
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// Tokens to generate at most; `usize::MAX` means until the context is full.
    pub tokens_max: usize,
    /// Tokens to generate before one of `eos` may be sampled.
    pub tokens_min: usize,
    /// Each of these ends the answer and is not part of it. If empty, the answer has `tokens_max` tokens.
    pub eos: Arc<[TokenId]>,
    pub tenant: TenantId,
    pub constraint: Option<Box<dyn Constraint>>,
    /// Return the log probabilities of the prompt's tokens, each with this many of the best ones.
    pub prompt_logprobs: Option<usize>,
    pub kind: RequestKind,
}

impl Request {
    /// Greedy, without an end of sequence.
    pub fn greedy(prompt: Vec<TokenId>, tokens_max: usize) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::default(),
            tokens_max,
            tokens_min: 0,
            eos: Arc::new([]),
            tenant: TenantId::default(),
            constraint: None,
            prompt_logprobs: None,
            kind: RequestKind::Generate,
        }
    }

    /// Checks that the executor could run it, if it were alone.
    pub fn check(&self, capacity: &Capacity) -> Result<(), EngineError> {
        let (tokens, max, vocab) = (self.prompt.len(), capacity.tokens_max(), capacity.vocab);
        if tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens >= max {
            return Err(EngineError::PromptTooLong { tokens, max });
        }
        if let Some(&TokenId(token)) = self.prompt.iter().find(|token| token.0 as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { token, vocab });
        }
        if let Some(asked) = self.prompt_logprobs.filter(|&asked| asked > TOP_LOGPROBS_MAX) {
            return Err(SamplingParamsError::TooManyLogprobs { asked }.into());
        }
        Ok(self.sampling.check(vocab)?)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { prompt, sampling, tokens_max, tenant, kind, .. } = self;
        f.debug_struct("Request")
            .field("prompt_tokens", &prompt.len())
            .field("sampling", sampling)
            .field("tokens_max", tokens_max)
            .field("tenant", tenant)
            .field("kind", kind)
            .finish_non_exhaustive()
    }
}

/// What a request computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestKind {
    #[default]
    Generate,
    /// One vector for the prompt. Nothing is generated.
    Embed(Pooling),
}

/// How the hidden states of a prompt, after the final norm, become one vector. The vector is not normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    Mean,
    Last,
}

#[derive(Debug)]
pub struct Event {
    pub request: RequestId,
    pub kind: EventKind,
}

/// What happens to a request, in this order. The last event is `Finished` or `Refused`.
#[derive(Debug)]
pub enum EventKind {
    /// It will run, now or later.
    Accepted,
    /// The prompt has been computed; tokens or an embedding come next.
    Prefilled {
        /// Tokens at the beginning of the prompt that were found in the prefix cache.
        cached_tokens: usize,
        /// One for each token of the prompt, if requested; the first token has none.
        prompt_logprobs: Vec<Option<Logprobs>>,
    },
    Token(Sampled),
    Embedding(Vec<f32>),
    Finished(Finished),
    /// It never ran.
    Refused(EngineError),
}

#[derive(Clone, Debug)]
pub struct Finished {
    pub reason: FinishReason,
    pub timings: Timings,
}

#[derive(Clone, Debug)]
pub enum FinishReason {
    /// The model ended its answer with this token.
    Eos(Sampled),
    /// The answer has `tokens_max` tokens.
    Length,
    /// The model's context, or the whole KV cache, is full.
    Context,
    /// The constraint allows no further token, or the embedding was computed.
    Complete,
    Cancelled,
    Failed(Failure),
}

/// Why a request failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Failure {
    /// The model's logits were unusable, or no token was allowed.
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// It needs hidden states after the last layer, and its chain ends at a server that returns none.
    #[error(
        "the last layers run on a server that returns logits of one position instead of states: embeddings, log probabilities \
         of a prompt and draft tokens cannot be had from it"
    )]
    NoStates,
    /// A step failed, and with it every request that was running or waiting.
    #[error(transparent)]
    Executor(#[from] Arc<ExecutorError>),
}

/// How long the parts of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    pub prompt_tokens: usize,
    /// Of these: found in the prefix cache.
    pub cached_tokens: usize,
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

    /// The rate of the tokens after the first, which prefill gives; 0 before there is a second one.
    pub fn decode_tokens_per_s(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode)
    }
}

pub(crate) fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}
