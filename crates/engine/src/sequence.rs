//! `Sequence`: a request on its way through the loop: what it knows, what is planned, and when things happened.
//!
//! It says what to run next and takes in what a step gave; when, and beside whom, is the scheduler's business. Each token
//! is run in its own role, also when the sequence has to begin again.

use std::sync::Arc;
use std::time::Instant;

use types::{SessionId, TokenId};

use crate::constraint::{Constraint, ConstraintError, TokenMask, ask};
use crate::executor::{Capacity, Opened};
use crate::guess;
use crate::plan::{NotBefore, Role, StepPlan, Want};
use crate::prefix::{PageHash, Prefix, page_hashes};
use crate::request::{Event, EventKind, FinishReason, Finished, Goal, Pooling, Request, RequestId, Tenant, Timings};
use crate::sampler::{Logprobs, Sampled, SamplingParams};

pub(crate) struct Sequence {
    pub id: RequestId,
    pub tenant: Tenant,
    /// The prompt, then the answer.
    pub tokens: Vec<TokenId>,
    /// Of `tokens`: those that were given.
    pub prompt: usize,
    /// How long `tokens` may become.
    pub length_max: usize,
    /// Of `tokens`, and of what is guessed to follow: those that steps have been submitted for.
    pub planned: usize,
    /// While it runs.
    session: Option<SessionId>,
    /// The names of the prompt's pages; none without a prefix cache.
    pub pages: Vec<PageHash>,
    /// Samples of steps in flight that count: none after the first one that contradicts a guess.
    awaited: usize,
    guesses: Guesses,
    tokens_max: usize,
    tokens_min: usize,
    sampling: SamplingParams,
    eos: Arc<[TokenId]>,
    constrained: Option<Constrained>,
    scoring: Option<Scoring>,
    goal: Goal,
    replays: u32,
    /// Whether the event of that name was given.
    prefilled: bool,
    /// Tokens found in the prefix cache when it first ran.
    cached: Option<usize>,
    added: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// What is guessed to follow the known tokens.
#[derive(Default)]
struct Guesses {
    /// In flight: the sample before each of them decides whether it was right.
    tokens: Vec<TokenId>,
    /// How many of them the samples have confirmed.
    right: usize,
    /// How many to guess next: grows while guesses are right.
    reach: usize,
}

/// What a sample said of a guess.
pub(crate) enum Guessed {
    Nothing,
    Right,
    /// What was run after the first `keep` tokens is worth nothing.
    Wrong {
        keep: usize,
    },
}

struct Constrained {
    constraint: Box<dyn Constraint>,
    mask: TokenMask,
    /// The mask is that of the next token.
    is_current: bool,
}

/// Log probabilities of the prompt's tokens.
struct Scoring {
    top: usize,
    found: Vec<Option<Logprobs>>,
}

impl Sequence {
    /// `capacity` is what the executor has for a sequence that is alone; the request was checked against it.
    pub fn new(id: RequestId, request: Request, capacity: &Capacity, cache: bool, now: Instant) -> Self {
        let Request { prompt: tokens, sampling, tokens_max, tokens_min, eos, tenant, .. } = request;
        let prompt = tokens.len();
        let tokens_max = if request.goal == Goal::Generate { tokens_max } else { 0 };
        let length_max = prompt.saturating_add(tokens_max).min(capacity.tokens_max());
        let pages = if cache { page_hashes(tenant, &tokens, capacity.page_tokens) } else { Vec::new() };
        let constrained = request.constraint.map(|constraint| Constrained {
            constraint,
            mask: TokenMask::new(capacity.vocab),
            is_current: false,
        });
        Self {
            id,
            tenant,
            tokens,
            prompt,
            length_max,
            planned: 0,
            session: None,
            pages,
            awaited: 0,
            guesses: Guesses { reach: usize::MAX, ..Guesses::default() },
            tokens_max,
            tokens_min,
            sampling,
            eos,
            constrained,
            scoring: request.prompt_logprobs.map(|top| Scoring { top, found: vec![None] }),
            goal: request.goal,
            replays: 0,
            prefilled: false,
            cached: None,
            added: now,
            admitted: None,
            first_token: None,
            last_token: None,
        }
    }

    /// Its beginning, as far as that may be taken from the prefix cache: what is scored or averaged has to be run, and at
    /// least one token always is.
    pub fn prefix(&self) -> Prefix<'_> {
        let all_rows = self.is_scoring() || self.goal == Goal::Embed(Pooling::Mean);
        let reuse_max = if all_rows { 0 } else { self.prompt.min(self.tokens.len() - 1) };
        Prefix { tokens: &self.tokens[..self.prompt], pages: &self.pages, reuse_max }
    }

    /// The session of a running sequence.
    pub fn session(&self) -> SessionId {
        self.session.expect("a running sequence has a session")
    }

    /// Its session is open. True the first time.
    pub fn admit(&mut self, opened: Opened, now: Instant) -> bool {
        self.session = Some(opened.session);
        self.planned = opened.computed;
        // A decode step allocates nothing; one that waits needs no room for its answer yet.
        self.tokens.reserve_exact(self.length_max - self.tokens.len());
        self.admitted.get_or_insert(now);
        let first = self.cached.is_none();
        self.cached.get_or_insert(opened.computed);
        first
    }

    /// Forgets its session, so that it can begin again with what it knows. Draws depend on positions alone, so the
    /// answer goes on as if nothing had happened.
    pub fn retreat(&mut self) {
        self.session = None;
        self.planned = 0;
        self.awaited = 0;
        self.guesses.tokens.clear();
        if self.is_scoring()
            && let Some(scoring) = &mut self.scoring
        {
            scoring.found.truncate(1);
        }
    }

    /// [`Sequence::retreat`], because its session was lost; how often that has happened.
    pub fn replay(&mut self) -> u32 {
        self.retreat();
        self.replays += 1;
        self.replays
    }

    /// The role of the next token to run.
    pub fn role(&self) -> Role {
        if self.planned < self.prompt { Role::Prompt } else { Role::Generated }
    }

    /// Known tokens that the next entry could run: those of one role that no step has been submitted for.
    pub fn ready(&self) -> usize {
        match self.role() {
            Role::Generated => self.tokens.len().saturating_sub(self.planned),
            // The last token of the prompt gives the answer, not a score.
            Role::Prompt if self.is_scoring() && self.planned + 1 < self.prompt => self.prompt - 1 - self.planned,
            Role::Prompt if self.wants_only_scores() => 0,
            Role::Prompt => self.prompt - self.planned,
        }
    }

    /// Whether it runs one token for the next one of its answer.
    pub fn is_decoding(&self) -> bool {
        self.role() == Role::Generated && self.ready() == 1
    }

    /// Whether its rows are pooled.
    pub fn is_embedding(&self) -> bool {
        matches!(self.goal, Goal::Embed(_))
    }

    /// Whether each of its next rows needs logits.
    pub fn is_scoring(&self) -> bool {
        self.scoring.as_ref().is_some_and(|scoring| scoring.found.len() < self.prompt)
    }

    /// Guesses at most `max` tokens to follow the known ones, if it may; returns how many.
    pub fn guess(&mut self, max: usize) -> usize {
        self.guesses.tokens.clear();
        if self.constrained.is_none() {
            // The last token of the answer, or of the context, need not be run.
            let room = (self.length_max - self.tokens.len()).saturating_sub(1);
            let max = max.min(room).min(self.guesses.reach);
            guess::continue_as_before(&self.tokens, max, &mut self.guesses.tokens);
        }
        self.guesses.tokens.len()
    }

    pub fn drop_guesses(&mut self) {
        self.guesses.tokens.clear();
    }

    /// Rows of an entry of `rows` known tokens whose logits are needed.
    pub fn logit_rows(&self, rows: usize) -> usize {
        match self.want(rows) {
            Want::Score { .. } => rows,
            Want::Sample { rows, .. } => rows,
            _ => 0,
        }
    }

    /// Adds the next `rows` known tokens, and the guesses after them, to a plan.
    pub fn enter(&self, rows: usize, plan: &mut StepPlan) {
        let tokens = &self.tokens[self.planned..self.planned + rows];
        let want = self.want(rows);
        let samples = matches!(want, Want::Sample { .. });
        let guesses = if samples { self.guesses.tokens.as_slice() } else { &[] };
        plan.push_guessed(self.session(), self.role(), self.planned, tokens, guesses, want);
        if let Some(constrained) = self.constrained.as_ref().filter(|_| samples) {
            debug_assert!(constrained.is_current);
            plan.mask_last(constrained.mask.words());
        }
    }

    /// The step with its entry was submitted: it runs up to `end`, and gives `samples` tokens.
    pub fn submitted(&mut self, end: usize, samples: usize) {
        self.planned = end;
        self.awaited += samples;
        self.guesses.right = 0;
    }

    /// Whether a sample of the step in flight still says something.
    pub fn awaits_sample(&self) -> bool {
        self.awaited > 0
    }

    /// Makes the constraint's mask that of the next token, unless a token is on its way.
    pub fn constrain(&mut self) -> Result<(), ConstraintError> {
        let early = self.tokens.len() - self.prompt < self.tokens_min;
        match &mut self.constrained {
            Some(Constrained { constraint, mask, is_current }) if !*is_current && self.awaited == 0 => {
                ask(|| constraint.mask(mask))?;
                if early {
                    mask.forbid_unless_last(&self.eos);
                }
                *is_current = true;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Adds a token that was sampled, unless it is no part of the answer; says whether the sequence has ended, and why.
    pub fn extend(&mut self, sampled: &Sampled, now: Instant) -> Option<FinishReason> {
        let token = sampled.token;
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.awaited -= 1;
        if self.eos.contains(&token) {
            return Some(FinishReason::Eos(sampled.clone()));
        }
        let is_fulfilled = match &mut self.constrained {
            None => false,
            Some(Constrained { constraint, is_current, .. }) => {
                *is_current = false;
                match ask(|| constraint.accept(token).map(|()| constraint.is_complete())) {
                    Ok(is_fulfilled) => is_fulfilled,
                    Err(error) => return Some(FinishReason::Failed(error.into())),
                }
            }
        };
        self.tokens.push(token);
        if is_fulfilled {
            return Some(FinishReason::Complete);
        }
        self.is_complete()
    }

    /// Compares the token that was added last with what was guessed in its place.
    pub fn check_guess(&mut self) -> Guessed {
        let guesses = &mut self.guesses;
        let Some(guess) = guesses.tokens.get(guesses.right) else { return Guessed::Nothing };
        if self.tokens.last() == Some(guess) {
            guesses.right += 1;
            if guesses.right == guesses.tokens.len() {
                guesses.reach = guesses.reach.saturating_mul(2);
            }
            return Guessed::Right;
        }
        guesses.reach = guesses.right + 1;
        guesses.tokens.clear();
        self.awaited = 0;
        Guessed::Wrong { keep: self.tokens.len() - 1 }
    }

    /// Adds log probabilities of the prompt's next tokens. True when there are no more to come, and nothing else.
    pub fn score(&mut self, scores: Vec<Logprobs>) -> bool {
        if let Some(scoring) = &mut self.scoring {
            scoring.found.extend(scores.into_iter().map(Some));
        }
        !self.is_scoring() && self.wants_only_scores()
    }

    /// Whether there is nothing left to do, and why.
    pub fn is_complete(&self) -> Option<FinishReason> {
        if self.is_embedding() || self.is_scoring() {
            None
        } else if self.generated() >= self.tokens_max {
            Some(FinishReason::Length)
        } else if self.tokens.len() >= self.length_max {
            Some(FinishReason::Context)
        } else {
            None
        }
    }

    /// Says once that the prompt has been run.
    pub fn prefilled(&mut self, events: &mut Vec<Event>) {
        if !std::mem::replace(&mut self.prefilled, true) {
            let prompt_logprobs = self.scoring.as_mut().map(|scoring| std::mem::take(&mut scoring.found));
            self.scoring = None;
            let cached_tokens = self.cached.unwrap_or(0);
            let prompt_logprobs = prompt_logprobs.unwrap_or_default();
            let kind = EventKind::Prefilled { cached_tokens, prompt_logprobs };
            events.push(Event { request: self.id, kind });
        }
    }

    pub fn finished(&self, reason: FinishReason, now: Instant) -> Finished {
        let admitted = self.admitted.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let timings = Timings {
            prompt_tokens: self.prompt,
            cached_tokens: self.cached.unwrap_or(0),
            generated_tokens: self.generated(),
            queued: admitted - self.added,
            prefill: first - admitted,
            decode: self.last_token.unwrap_or(first) - first,
        };
        Finished { reason, timings }
    }

    /// What an entry of the next `rows` known tokens is for: a token, once all known ones are run.
    fn want(&self, rows: usize) -> Want {
        let end = self.planned + rows;
        match (&self.scoring, self.goal) {
            (_, Goal::Embed(pooling)) => Want::Embed { pooling, last: end == self.prompt },
            (Some(scoring), _) if self.is_scoring() && end < self.prompt => {
                Want::Score { top: scoring.top, next: self.tokens[end] }
            }
            _ if end < self.tokens.len() => Want::Nothing,
            _ => Want::Sample {
                rows: 1 + self.guesses.tokens.len(),
                prompt: self.prompt,
                sampling: self.sampling.clone(),
                not_before: self.not_before(),
            },
        }
    }

    /// A constraint's mask says this by itself.
    fn not_before(&self) -> Option<NotBefore> {
        let applies = self.generated() < self.tokens_min && !self.eos.is_empty() && self.constrained.is_none();
        applies.then(|| NotBefore { position: self.prompt + self.tokens_min, tokens: self.eos.clone() })
    }

    /// Nothing is to be generated: the prompt's last token is not run.
    fn wants_only_scores(&self) -> bool {
        self.tokens_max == 0 && !self.is_embedding()
    }

    fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }
}
