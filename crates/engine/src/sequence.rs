//! `Sequence`: a request on its way through the loop: what it knows, what is planned, and when things happened.

use std::sync::Arc;
use std::time::Instant;

use types::{SessionId, TokenId};

use crate::plan::Want;
use crate::request::{FinishReason, Finished, Request, RequestId, Timings};
use crate::sampler::SamplingParams;

pub(crate) struct Sequence {
    pub id: RequestId,
    /// The prompt, then the answer.
    pub tokens: Vec<TokenId>,
    /// How long `tokens` may become.
    pub length_max: usize,
    /// Of `tokens`: those that steps have been submitted for.
    pub planned: usize,
    /// While it runs.
    pub session: Option<SessionId>,
    prompt: usize,
    tokens_max: usize,
    sampling: SamplingParams,
    eos: Arc<[TokenId]>,
    added: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Sequence {
    /// `context` is the longest sequence that the executor can hold; the prompt is shorter.
    pub fn new(id: RequestId, request: Request, context: usize, now: Instant) -> Self {
        let Request { prompt: mut tokens, sampling, tokens_max, eos } = request;
        let prompt = tokens.len();
        let length_max = prompt.saturating_add(tokens_max).min(context);
        tokens.reserve_exact(length_max - prompt);
        Self {
            id,
            tokens,
            length_max,
            planned: 0,
            session: None,
            prompt,
            tokens_max,
            sampling,
            eos,
            added: now,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    pub fn admit(&mut self, session: SessionId, now: Instant) {
        self.session = Some(session);
        self.admitted.get_or_insert(now);
    }

    /// Forgets its session, so that it can begin again with what it knows. Draws depend on positions alone, so the
    /// answer goes on as if nothing had happened.
    pub fn retreat(&mut self) -> Option<SessionId> {
        self.planned = 0;
        self.session.take()
    }

    /// Known tokens that no step has been submitted for.
    pub fn ready(&self) -> usize {
        self.tokens.len() - self.planned
    }

    /// What a step wants that runs the next `rows` tokens: a token once all known ones are run.
    pub fn want(&self, rows: usize) -> Want {
        if rows < self.ready() {
            return Want::Nothing;
        }
        Want::Sample { rows: 1, prompt: self.prompt, sampling: self.sampling.clone() }
    }

    /// Adds a token, unless it ends the answer; says whether the sequence has ended, and why.
    pub fn extend(&mut self, token: TokenId, now: Instant) -> Option<FinishReason> {
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        if self.eos.contains(&token) {
            return Some(FinishReason::Eos(token));
        }
        self.tokens.push(token);
        self.is_complete()
    }

    /// Whether there is no room for another token.
    pub fn is_complete(&self) -> Option<FinishReason> {
        if self.generated() >= self.tokens_max {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= self.length_max {
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    pub fn finished(&self, reason: FinishReason, now: Instant) -> Finished {
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let timings = Timings {
            prompt_tokens: self.prompt,
            generated_tokens: self.generated(),
            queued: admitted - self.added,
            prefill: first - admitted,
            decode: self.last_token.unwrap_or(first) - first,
        };
        Finished { reason, timings }
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }
}
