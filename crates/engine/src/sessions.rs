//! `Sessions`: the page tables of open sequences, for whoever holds K/V: a whole model or one stage of it.
//!
//! Invariant: a page that a session may still write to belongs to that session alone and has no name. Only whole,
//! computed pages are shared or named, and a session that is cut back into such a page lets that page go and computes its
//! tokens again. Pages are named only if all their tokens were computed as a prompt's: the arithmetic of a generated token
//! may differ, and an answer must not depend on whether its prefix was found.

use kernels::PAGE_TOKENS;
use types::SessionId;

use crate::executor::{ExecutorError, Opened};
use crate::pages::Pages;
use crate::plan::Role;
use crate::prefix::{PageHash, Prefix};

/// Sessions that may be open at once, running or not.
pub const SESSIONS_MAX: usize = 4096;

/// Open sessions and their pages. Slots are used again, with their memory; an id carries the slot's generation, so that
/// an id of a closed session is never taken for that of a later one.
#[derive(Debug)]
pub struct Sessions {
    pages: Pages,
    positions_max: usize,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    open: bool,
    tokens_max: usize,
    computed: usize,
    /// Covers at least the computed tokens.
    table: Vec<u32>,
    /// The names of its first pages, given when they are computed.
    names: Vec<PageHash>,
}

impl Sessions {
    pub fn new(pages: usize, positions_max: usize) -> Self {
        Self { pages: Pages::new(pages), positions_max, slots: Vec::new(), vacant: Vec::new() }
    }

    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Sessions that are open.
    pub fn count(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// A new session, which begins with the pages of `prefix` that are found.
    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<Opened, ExecutorError> {
        let session = self.seat(tokens_max)?;
        let slot = &mut self.slots[slot_of(session)];
        let named = &prefix.pages[..prefix.pages.len().min(tokens_max / PAGE_TOKENS)];
        slot.names.extend_from_slice(named);
        for name in &named[..named.len().min(prefix.reuse_max / PAGE_TOKENS)] {
            let Some(page) = self.pages.find(name) else { break };
            self.pages.share(page);
            slot.table.push(page);
        }
        slot.computed = slot.table.len() * PAGE_TOKENS;
        Ok(Opened { session, computed: slot.computed })
    }

    /// An empty session without names.
    fn seat(&mut self, tokens_max: usize) -> Result<SessionId, ExecutorError> {
        if tokens_max > self.positions_max {
            return Err(ExecutorError::TooLong { tokens: tokens_max, max: self.positions_max });
        }
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.slots.len() == SESSIONS_MAX => return Err(ExecutorError::OutOfSessions { max: SESSIONS_MAX }),
            None => {
                self.slots.push(Slot {
                    generation: 0,
                    open: false,
                    tokens_max: 0,
                    computed: 0,
                    table: Vec::new(),
                    names: Vec::new(),
                });
                self.slots.len() as u32 - 1
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.open = true;
        slot.generation = slot.generation.wrapping_add(1);
        slot.tokens_max = tokens_max;
        slot.computed = 0;
        slot.names.clear();
        // A step of a session never allocates.
        slot.table.reserve(tokens_max.div_ceil(PAGE_TOKENS));
        Ok(SessionId(u64::from(slot.generation) << 32 | u64::from(index)))
    }

    /// Keeps at most the first `tokens` computed tokens; see the invariant for when it keeps fewer.
    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let slot = self.slot(session)?;
        let mut kept = tokens.min(slot.computed);
        if !kept.is_multiple_of(PAGE_TOKENS) {
            let page = slot.table[kept / PAGE_TOKENS];
            if self.pages.references(page) > 1 || self.pages.is_named(page) {
                kept -= kept % PAGE_TOKENS;
            }
        }
        let slot = &mut self.slots[slot_of(session)];
        if kept < slot.computed {
            // What comes next need not be what the names say.
            slot.names.truncate(kept / PAGE_TOKENS);
        }
        slot.computed = kept;
        self.trim(session);
        Ok(kept)
    }

    /// Ends a session, if it is open.
    pub fn close(&mut self, session: SessionId) {
        if self.truncate(session, 0).is_ok() {
            self.slots[slot_of(session)].open = false;
            self.vacant.push(slot_of(session) as u32);
        }
    }

    /// Tokens computed so far.
    pub fn computed(&self, session: SessionId) -> Result<usize, ExecutorError> {
        Ok(self.slot(session)?.computed)
    }

    /// Pages that the session lacks in order to hold `tokens` tokens.
    pub fn missing(&self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let slot = self.slot(session)?;
        if tokens > slot.tokens_max {
            return Err(ExecutorError::TooLong { tokens, max: slot.tokens_max });
        }
        Ok(tokens.div_ceil(PAGE_TOKENS).saturating_sub(slot.table.len()))
    }

    /// Takes the pages that [`Sessions::missing`] counts. On an error none was taken.
    pub fn reserve(&mut self, session: SessionId, tokens: usize) -> Result<(), ExecutorError> {
        let (needed, free) = (self.missing(session, tokens)?, self.pages.free());
        if needed > free {
            return Err(ExecutorError::OutOfPages { needed, free });
        }
        let table = &mut self.slots[slot_of(session)].table;
        table.extend((0..needed).map(|_| self.pages.take().expect("counted above")));
        Ok(())
    }

    /// Declares the tokens up to `tokens` computed, in this role. Their pages were reserved. Pages of a prompt that are
    /// complete now can be found from here on.
    pub fn advance(&mut self, session: SessionId, tokens: usize, role: Role) {
        let slot = &mut self.slots[slot_of(session)];
        assert!(slot.open && tokens <= slot.table.len() * PAGE_TOKENS, "computed tokens have pages");
        let first = slot.computed / PAGE_TOKENS;
        match role {
            Role::Generated => slot.names.truncate(first),
            Role::Prompt => {
                let last = slot.names.len().min(tokens / PAGE_TOKENS).max(first);
                for (page, name) in slot.table[first..last].iter_mut().zip(slot.names.iter().skip(first)) {
                    *page = self.pages.name(*page, *name);
                }
            }
        }
        slot.computed = tokens;
    }

    /// Gives back the pages beyond the computed tokens, the last one first.
    pub fn trim(&mut self, session: SessionId) {
        let slot = &mut self.slots[slot_of(session)];
        for page in slot.table.drain(slot.computed.div_ceil(PAGE_TOKENS)..).rev() {
            self.pages.release(page);
        }
    }

    /// A step broke: what the pages hold can not be trusted, and no prefix is found any more.
    pub fn forget_prefixes(&mut self) {
        self.pages.forget();
        self.slots.iter_mut().for_each(|slot| slot.names.clear());
    }

    /// The session's pages, in the order of its tokens.
    pub fn table(&self, session: SessionId) -> Result<&[u32], ExecutorError> {
        Ok(&self.slot(session)?.table)
    }

    fn slot(&self, session: SessionId) -> Result<&Slot, ExecutorError> {
        self.slots
            .get(slot_of(session))
            .filter(|slot| slot.open && u64::from(slot.generation) == session.0 >> 32)
            .ok_or(ExecutorError::UnknownSession(session))
    }
}

/// The slot that an id names: below [`SESSIONS_MAX`] for ids that [`Sessions`] gave.
pub(crate) fn slot_of(session: SessionId) -> usize {
    (session.0 & u64::from(u32::MAX)) as usize
}

#[cfg(test)]
mod tests;
