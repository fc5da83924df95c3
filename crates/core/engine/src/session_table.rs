//! `SessionTable`: the open sessions of an executor, their pages, and which steps it can run.
//!
//! Given the same calls, two tables return the same results. The ranks of a group and their supervisor each keep one,
//! so the supervisor rejects a step that cannot run before it sends it to any rank.

use kernels::PAGE_TOKENS;
use model::Limits;
use types::{SessionId, TokenId};

use crate::executor::{Capacity, ExecutorError, OpenedSession};
use crate::page_tables::PageTables;
use crate::plan::{Entry, StepPlan};
use crate::prefix::Prefix;

#[derive(Debug)]
pub struct SessionTable {
    page_tables: PageTables,
    limits: Limits,
    vocab: usize,
}

impl SessionTable {
    pub fn new(limits: &Limits, vocab: usize) -> Self {
        Self { page_tables: PageTables::new(limits.kv_pages, limits.positions), limits: *limits, vocab }
    }

    pub fn capacity(&self) -> Capacity {
        let (limits, pool) = (self.limits.step, self.page_tables.pool());
        Capacity {
            vocab: self.vocab,
            positions_max: self.limits.positions,
            rows_max: limits.rows,
            // Each sequence may need a row, and its logits.
            sequences_max: limits.sequences.min(limits.rows).min(self.limits.logit_rows),
            logit_rows_max: self.limits.logit_rows.min(limits.rows),
            step_pages_max: limits.pages,
            page_tokens: PAGE_TOKENS,
            pages_total: pool.total(),
            pages_free: pool.free(),
            pages_cached: pool.cached(),
        }
    }

    /// Sessions that are open.
    pub fn count(&self) -> usize {
        self.page_tables.count()
    }

    pub fn is_open(&self, session: SessionId) -> bool {
        self.page_tables.computed(session).is_ok()
    }

    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.page_tables.open(tokens_max, prefix)
    }

    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.page_tables.truncate(session, tokens)
    }

    pub fn close(&mut self, session: SessionId) {
        self.page_tables.close(session);
    }

    /// Checks that the whole plan can run. Changes nothing.
    pub fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let capacity = self.capacity();
        let (mut needed, mut pages) = (0, 0);
        for (index, entry) in plan.entries().iter().enumerate() {
            let (session, position) = (entry.session, entry.position);
            let computed = self.page_tables.computed(session)?;
            if computed != position {
                return Err(ExecutorError::PositionMismatch { session, computed, position });
            }
            self.page_tables.check_layers(session, plan.layers())?;
            if plan.entries()[..index].iter().any(|earlier| earlier.session == session) {
                return Err(ExecutorError::DuplicateSession(session));
            }
            needed += self.page_tables.pages_missing(session, entry.end())?;
            pages += capacity.pages(entry.end());
        }
        for (what, found, max) in [
            ("sequences", plan.entries().len(), capacity.sequences_max),
            ("rows", plan.rows(), capacity.rows_max),
            ("rows with logits", plan.logit_rows(), capacity.logit_rows_max),
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

    /// Allocates the pages that a checked plan needs.
    pub fn reserve(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        plan.entries().iter().try_for_each(|entry| self.page_tables.reserve(entry.session, entry.end()))
    }

    /// The pages of an entry's tokens, which were reserved.
    pub fn pages(&self, entry: &Entry) -> Result<&[u32], ExecutorError> {
        Ok(&self.page_tables.pages(entry.session)?[..entry.end().div_ceil(PAGE_TOKENS)])
    }

    /// The step of a plan was started: from now on its tokens count as computed.
    pub fn advance(&mut self, plan: &StepPlan) {
        for entry in plan.entries() {
            self.page_tables.advance(entry.session, entry.end(), entry.phase, plan.layers());
        }
    }

    /// Releases what [`SessionTable::reserve`] allocated for a plan whose step could not be started.
    pub fn release_reserved(&mut self, plan: &StepPlan) {
        plan.entries().iter().for_each(|entry| self.page_tables.release_unused(entry.session));
    }

    /// Empties the prefix cache: a step failed, so the contents of pages may be wrong.
    pub fn clear_prefix_cache(&mut self) {
        self.page_tables.clear_prefix_cache();
    }

    /// Closes every session and empties the prefix cache.
    pub fn clear(&mut self) {
        *self = Self::new(&self.limits, self.vocab);
    }
}
