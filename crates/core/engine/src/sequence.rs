//! `Sequence`: the state of a request in the engine: its tokens, which of them steps were submitted for, and its timings.
//!
//! A sequence reports what it can run next and takes the results of steps; the scheduler decides when it runs. Each
//! token is computed in its own phase, also when the sequence was requeued.

use std::sync::Arc;
use std::time::Instant;

use types::{SessionId, TokenId};

use crate::constraint::{Constraint, ConstraintError, TokenMask, catch_panic};
use crate::draft;
use crate::executor::{Capacity, OpenedSession};
use crate::plan::{Phase, RequestedOutput, StepPlan, SuppressedTokens};
use crate::prefix::{PageHash, Prefix, page_hashes};
use crate::request::{
    Event, EventKind, FinishReason, Finished, Pooling, Request, RequestId, RequestKind, TenantId, Timings,
};
use crate::sampler::{Logprobs, Sampled, SamplingParams};

pub(crate) struct Sequence {
    pub id: RequestId,
    pub tenant: TenantId,
    /// The prompt, then the answer.
    pub tokens: Vec<TokenId>,
    /// How many of `tokens`, at the beginning, are the prompt's.
    pub prompt_tokens: usize,
    /// How long `tokens` may become.
    pub length_max: usize,
    /// How many of `tokens`, and of the draft tokens after them, steps were submitted for.
    pub planned: usize,
    /// Set while the sequence runs.
    session: Option<SessionId>,
    /// The hashes of the prompt's pages; none without a prefix cache.
    pub page_hashes: Vec<PageHash>,
    /// Samples of steps in flight that are still valid: none after one that rejects a draft token.
    samples_pending: usize,
    draft: DraftTokens,
    tokens_max: usize,
    tokens_min: usize,
    sampling: SamplingParams,
    eos: Arc<[TokenId]>,
    constraint: Option<ConstraintState>,
    prompt_logprobs: Option<PromptLogprobsState>,
    kind: RequestKind,
    /// The number of the last step that was submitted with its rows.
    last_step: Option<u64>,
    /// How often its session was lost while a step with its rows was in flight, since its last token.
    losses: u32,
    /// Whether [`EventKind::Prefilled`] was sent.
    prefilled: bool,
    /// Tokens found in the prefix cache when it was first admitted.
    cached_tokens: Option<usize>,
    added: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// Draft tokens after the known ones.
#[derive(Default)]
struct DraftTokens {
    /// Those of the step in flight.
    tokens: Vec<TokenId>,
    /// How many of them samples have confirmed.
    accepted: usize,
    /// How many to draft next at most: doubles while all are accepted.
    count_max: usize,
}

/// Whether a sample confirms the draft token at its position.
pub(crate) enum DraftVerdict {
    NoDraft,
    Accepted,
    /// What was computed after the first `keep` tokens has to be discarded.
    Rejected {
        keep: usize,
    },
}

struct ConstraintState {
    constraint: Box<dyn Constraint>,
    mask: TokenMask,
    /// Whether `mask` is that of the next token.
    is_current: bool,
}

/// Log probabilities of the prompt's tokens, as far as they were computed.
struct PromptLogprobsState {
    top: usize,
    found: Vec<Option<Logprobs>>,
}

impl Sequence {
    /// The request was checked against `capacity`. `prefix_cache`: whether pages of its prompt may be reused and published.
    pub fn new(id: RequestId, request: Request, capacity: &Capacity, prefix_cache: bool, now: Instant) -> Self {
        let Request { prompt: tokens, sampling, tokens_max, tokens_min, eos, tenant, .. } = request;
        let prompt_tokens = tokens.len();
        let tokens_max = if request.kind == RequestKind::Generate { tokens_max } else { 0 };
        let length_max = prompt_tokens.saturating_add(tokens_max).min(capacity.tokens_max());
        let page_hashes = if prefix_cache { page_hashes(tenant, &tokens, capacity.page_tokens) } else { Vec::new() };
        let constraint = request.constraint.map(|constraint| ConstraintState {
            constraint,
            mask: TokenMask::new(capacity.vocab),
            is_current: false,
        });
        Self {
            id,
            tenant,
            tokens,
            prompt_tokens,
            length_max,
            planned: 0,
            session: None,
            page_hashes,
            samples_pending: 0,
            draft: DraftTokens { count_max: usize::MAX, ..DraftTokens::default() },
            tokens_max,
            tokens_min,
            sampling,
            eos,
            constraint,
            prompt_logprobs: request.prompt_logprobs.map(|top| PromptLogprobsState { top, found: vec![None] }),
            kind: request.kind,
            last_step: None,
            losses: 0,
            prefilled: false,
            cached_tokens: None,
            added: now,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Its prompt as a key of the prefix cache. Rows whose logits or hidden states are needed have to be run, and at least one
    /// token always is.
    pub fn prefix(&self) -> Prefix<'_> {
        let all_rows = self.needs_prompt_logprobs() || self.kind == RequestKind::Embed(Pooling::Mean);
        let reuse_max = if all_rows { 0 } else { self.prompt_tokens.min(self.tokens.len() - 1) };
        Prefix { tokens: &self.tokens[..self.prompt_tokens], pages: &self.page_hashes, reuse_max }
    }

    /// The session of a running sequence.
    pub fn session(&self) -> SessionId {
        self.session.expect("a running sequence has a session")
    }

    /// Starts to run in an open session. Returns true the first time.
    pub fn admit(&mut self, opened: OpenedSession, now: Instant) -> bool {
        self.session = Some(opened.session);
        self.planned = opened.computed;
        // A decode step allocates nothing. A waiting sequence holds no memory for its answer.
        self.tokens.reserve_exact(self.length_max - self.tokens.len());
        self.admitted.get_or_insert(now);
        let first = self.cached_tokens.is_none();
        self.cached_tokens.get_or_insert(opened.computed);
        first
    }

    /// Resets it to a sequence without a session, which keeps its tokens. The random numbers of the sampler depend on positions
    /// alone, so the answer continues as if it had not been requeued.
    pub fn reset(&mut self) {
        self.session = None;
        self.planned = 0;
        self.samples_pending = 0;
        self.last_step = None;
        self.draft.tokens.clear();
        if self.needs_prompt_logprobs()
            && let Some(state) = &mut self.prompt_logprobs
        {
            state.found.truncate(1);
        }
    }

    /// [`Sequence::reset`], because its session was lost while the steps from number `oldest_step` on were in flight.
    /// Returns how often that has happened, since its last token, while its own rows were in such a step.
    pub fn reset_after_loss(&mut self, oldest_step: Option<u64>) -> u32 {
        let ran = oldest_step.is_some_and(|oldest| self.last_step.is_some_and(|last| last >= oldest));
        self.losses += u32::from(ran);
        self.reset();
        self.losses
    }

    /// The phase of the next token to run.
    pub fn phase(&self) -> Phase {
        if self.planned < self.prompt_tokens { Phase::Prefill } else { Phase::Decode }
    }

    /// Known tokens that its next entry could run: those of one phase that no step was submitted for.
    pub fn rows_ready(&self) -> usize {
        match self.phase() {
            Phase::Decode => self.tokens.len().saturating_sub(self.planned),
            // The row of the prompt's last token predicts the answer, not a token of the prompt.
            Phase::Prefill if self.needs_prompt_logprobs() && self.planned + 1 < self.prompt_tokens => {
                self.prompt_tokens - 1 - self.planned
            }
            Phase::Prefill if self.needs_only_prompt_logprobs() => 0,
            Phase::Prefill => self.prompt_tokens - self.planned,
        }
    }

    /// Whether its next entry runs one token and samples the next one.
    pub fn is_decoding(&self) -> bool {
        self.phase() == Phase::Decode && self.rows_ready() == 1
    }

    /// Whether it generates tokens: its next entry samples one, or a step in flight does.
    pub fn is_generating(&self) -> bool {
        self.is_decoding() || self.phase() == Phase::Decode && self.awaits_sample()
    }

    /// Whether its rows are pooled.
    pub fn is_embedding(&self) -> bool {
        matches!(self.kind, RequestKind::Embed(_))
    }

    /// Whether each of its next rows needs logits.
    pub fn needs_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.as_ref().is_some_and(|state| state.found.len() < self.prompt_tokens)
    }

    /// Proposes at most `max` draft tokens to follow the known ones; returns how many. A constrained sequence has none.
    pub fn draft(&mut self, max: usize) -> usize {
        self.draft.tokens.clear();
        if self.constraint.is_none() {
            // The last token of the answer, or of the context, need not be run.
            let useful = (self.length_max - self.tokens.len()).saturating_sub(1);
            let count = max.min(useful).min(self.draft.count_max);
            draft::propose(&self.tokens, count, &mut self.draft.tokens);
        }
        self.draft.tokens.len()
    }

    pub fn clear_draft(&mut self) {
        self.draft.tokens.clear();
    }

    /// Rows of an entry of `rows` known tokens whose logits are needed.
    pub fn logit_rows(&self, rows: usize) -> usize {
        match self.requested(rows) {
            RequestedOutput::PromptLogprobs { .. } => rows,
            RequestedOutput::Sample { rows, .. } => rows,
            _ => 0,
        }
    }

    /// Adds the next `rows` known tokens, and the draft tokens after them, to a plan.
    pub fn push_entry(&self, rows: usize, plan: &mut StepPlan) {
        let tokens = &self.tokens[self.planned..self.planned + rows];
        let requested = self.requested(rows);
        let samples = matches!(requested, RequestedOutput::Sample { .. });
        let draft = if samples { self.draft.tokens.as_slice() } else { &[] };
        plan.push_with_draft(self.session(), self.phase(), self.planned, tokens, draft, requested);
        if let Some(constraint) = self.constraint.as_ref().filter(|_| samples) {
            debug_assert!(constraint.is_current);
            plan.mask_last(constraint.mask.words());
        }
    }

    /// The step with this number was submitted; it runs the sequence up to `end` and samples `samples` tokens.
    pub fn submitted(&mut self, step: u64, end: usize, samples: usize) {
        self.last_step = Some(step);
        self.planned = end;
        self.samples_pending += samples;
        self.draft.accepted = 0;
    }

    /// The number of the last step with its rows, since it was admitted.
    pub fn last_step(&self) -> Option<u64> {
        self.last_step
    }

    /// Whether the next sample of a step in flight is valid.
    pub fn awaits_sample(&self) -> bool {
        self.samples_pending > 0
    }

    /// Computes the constraint's mask for the next token, unless a sample is in flight.
    pub fn update_mask(&mut self) -> Result<(), ConstraintError> {
        let early = self.generated() < self.tokens_min;
        match &mut self.constraint {
            Some(ConstraintState { constraint, mask, is_current }) if !*is_current && self.samples_pending == 0 => {
                catch_panic(|| constraint.mask(mask))?;
                if early {
                    mask.forbid_unless_last(&self.eos);
                }
                *is_current = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Appends a sampled token, unless it ends the answer. Returns the reason if the sequence has ended.
    pub fn push_sampled(&mut self, sampled: &Sampled, now: Instant) -> Option<FinishReason> {
        let token = sampled.token;
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.samples_pending -= 1;
        self.losses = 0;
        if self.eos.contains(&token) {
            return Some(FinishReason::Eos(sampled.clone()));
        }
        let is_complete = match &mut self.constraint {
            None => false,
            Some(ConstraintState { constraint, is_current, .. }) => {
                *is_current = false;
                match catch_panic(|| constraint.accept(token).map(|()| constraint.is_complete())) {
                    Ok(is_complete) => is_complete,
                    Err(error) => return Some(FinishReason::Failed(error.into())),
                }
            }
        };
        self.tokens.push(token);
        if is_complete {
            return Some(FinishReason::Complete);
        }
        self.end_reason()
    }

    /// Compares the token that was appended last with the draft token at its position.
    pub fn verify_draft(&mut self) -> DraftVerdict {
        let draft = &mut self.draft;
        let Some(token) = draft.tokens.get(draft.accepted) else { return DraftVerdict::NoDraft };
        if self.tokens.last() == Some(token) {
            draft.accepted += 1;
            if draft.accepted == draft.tokens.len() {
                draft.count_max = draft.count_max.saturating_mul(2);
            }
            return DraftVerdict::Accepted;
        }
        draft.count_max = draft.accepted + 1;
        draft.tokens.clear();
        self.samples_pending = 0;
        DraftVerdict::Rejected { keep: self.tokens.len() - 1 }
    }

    /// Adds log probabilities of the prompt's next tokens. True if they are complete and nothing else was requested.
    pub fn push_prompt_logprobs(&mut self, logprobs: Vec<Logprobs>) -> bool {
        if let Some(state) = &mut self.prompt_logprobs {
            state.found.extend(logprobs.into_iter().map(Some));
        }
        !self.needs_prompt_logprobs() && self.needs_only_prompt_logprobs()
    }

    /// Why there is nothing left to do, if so.
    pub fn end_reason(&self) -> Option<FinishReason> {
        if self.is_embedding() || self.needs_prompt_logprobs() {
            None
        } else if self.generated() >= self.tokens_max {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= self.length_max {
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    /// Sends [`EventKind::Prefilled`], once.
    pub fn send_prefilled(&mut self, events: &mut Vec<Event>) {
        if !std::mem::replace(&mut self.prefilled, true) {
            let prompt_logprobs = self.prompt_logprobs.take().map(|state| state.found).unwrap_or_default();
            let cached_tokens = self.cached_tokens.unwrap_or(0);
            let kind = EventKind::Prefilled { cached_tokens, prompt_logprobs };
            events.push(Event { request: self.id, kind });
        }
    }

    pub fn finished(&self, reason: FinishReason, now: Instant) -> Finished {
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let timings = Timings {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens.unwrap_or(0),
            generated_tokens: self.generated(),
            queued: admitted - self.added,
            prefill: first - admitted,
            decode: self.last_token.unwrap_or(first) - first,
        };
        Finished { reason, timings }
    }

    /// The output of an entry of the next `rows` known tokens: a sample if these are all.
    fn requested(&self, rows: usize) -> RequestedOutput {
        let end = self.planned + rows;
        match (&self.prompt_logprobs, self.kind) {
            (_, RequestKind::Embed(pooling)) => RequestedOutput::Embed { pooling, last: end == self.prompt_tokens },
            (Some(state), _) if self.needs_prompt_logprobs() && end < self.prompt_tokens => {
                RequestedOutput::PromptLogprobs { top: state.top, next: self.tokens[end] }
            }
            _ if end < self.tokens.len() => RequestedOutput::Nothing,
            _ => RequestedOutput::Sample {
                rows: 1 + self.draft.tokens.len(),
                prompt_tokens: self.prompt_tokens,
                sampling: self.sampling.clone(),
                suppressed: self.suppressed(),
            },
        }
    }

    /// The end-of-sequence tokens, until `tokens_min` is reached. The mask of a constraint suppresses them itself.
    fn suppressed(&self) -> Option<SuppressedTokens> {
        let applies = self.generated() < self.tokens_min && !self.eos.is_empty() && self.constraint.is_none();
        applies.then(|| SuppressedTokens { until: self.prompt_tokens + self.tokens_min, tokens: self.eos.clone() })
    }

    /// Whether no token is generated: then the prompt's last token is not run.
    fn needs_only_prompt_logprobs(&self) -> bool {
        self.tokens_max == 0 && !self.is_embedding()
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }
}
