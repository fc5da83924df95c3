//! `Ledger`: what an executor holds and may still take. The ranks of a group and whoever drives them keep the same one: given the same calls,
//! two ledgers give the same answers, so a step is refused before any rank has heard of it.

use kernels::PAGE_TOKENS;
use model::Limits;
use types::{SessionId, TokenId};

use crate::executor::{Capacity, ExecutorError, Opened};
use crate::plan::{Entry, StepPlan};
use crate::prefix::Prefix;
use crate::sessions::Sessions;

#[derive(Debug)]
pub struct Ledger {
    sessions: Sessions,
    limits: Limits,
    vocab: usize,
}

impl Ledger {
    pub fn new(limits: &Limits, vocab: usize) -> Self {
        Self { sessions: Sessions::new(limits.kv_pages, limits.positions), limits: *limits, vocab }
    }

    pub fn capacity(&self) -> Capacity {
        let (limits, pages) = (self.limits.step, self.sessions.pages());
        Capacity {
            vocab: self.vocab,
            positions_max: self.limits.positions,
            rows_max: limits.rows,
            // Each sequence may need a row, and its logits.
            sequences_max: limits.sequences.min(limits.rows).min(self.limits.wanted),
            wanted_max: self.limits.wanted.min(limits.rows),
            step_pages_max: limits.pages,
            page_tokens: PAGE_TOKENS,
            pages_total: pages.total(),
            pages_free: pages.free(),
            pages_cached: pages.cached(),
        }
    }

    /// Sessions that are open.
    pub fn sessions(&self) -> usize {
        self.sessions.count()
    }

    pub fn is_open(&self, session: SessionId) -> bool {
        self.sessions.computed(session).is_ok()
    }

    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<Opened, ExecutorError> {
        self.sessions.open(tokens_max, prefix)
    }

    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.sessions.truncate(session, tokens)
    }

    pub fn close(&mut self, session: SessionId) {
        self.sessions.close(session);
    }

    /// That the plan can run as a whole: only then is anything changed.
    pub fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let capacity = self.capacity();
        let (mut needed, mut pages) = (0, 0);
        for (index, entry) in plan.entries().iter().enumerate() {
            let (session, position) = (entry.session, entry.position);
            let computed = self.sessions.computed(session)?;
            if computed != position {
                return Err(ExecutorError::OutOfPlace { session, computed, position });
            }
            if plan.entries()[..index].iter().any(|earlier| earlier.session == session) {
                return Err(ExecutorError::Duplicate(session));
            }
            needed += self.sessions.missing(session, entry.end())?;
            pages += capacity.pages(entry.end());
        }
        for (what, found, max) in [
            ("sequences", plan.entries().len(), capacity.sequences_max),
            ("rows", plan.rows(), capacity.rows_max),
            ("rows with logits", plan.logit_rows(), capacity.wanted_max),
            ("pages", pages, capacity.step_pages_max),
        ] {
            if found > max {
                return Err(ExecutorError::StepTooLarge { what, found, max });
            }
        }
        let vocab = capacity.vocab;
        if let Some(&TokenId(token)) = plan.all_tokens().iter().find(|token| token.0 as usize >= vocab) {
            return Err(ExecutorError::TokenOutOfRange { token, vocab });
        }
        if needed > capacity.pages_free {
            return Err(ExecutorError::OutOfPages { needed, free: capacity.pages_free });
        }
        Ok(())
    }

    /// Takes the pages that a plan which was checked needs.
    pub fn reserve(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        plan.entries().iter().try_for_each(|entry| self.sessions.reserve(entry.session, entry.end()))
    }

    /// The pages of an entry's tokens, as they were reserved.
    pub fn table(&self, entry: &Entry) -> Result<&[u32], ExecutorError> {
        Ok(&self.sessions.table(entry.session)?[..entry.end().div_ceil(PAGE_TOKENS)])
    }

    /// The step of a plan has begun: its tokens are computed, for whatever comes after it.
    pub fn advance(&mut self, plan: &StepPlan) {
        for entry in plan.entries() {
            self.sessions.advance(entry.session, entry.end(), entry.role);
        }
    }

    /// The step of a plan could not begin.
    pub fn give_back(&mut self, plan: &StepPlan) {
        plan.entries().iter().for_each(|entry| self.sessions.trim(entry.session));
    }

    /// A step broke: what the pages hold can not be trusted, and no prefix is found any more.
    pub fn forget_prefixes(&mut self) {
        self.sessions.forget_prefixes();
    }

    /// As new: no session is open.
    pub fn clear(&mut self) {
        *self = Self::new(&self.limits, self.vocab);
    }
}
