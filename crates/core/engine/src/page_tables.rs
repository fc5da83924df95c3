//! `PageTables`: the page table of each open session, for an executor that holds a KV cache.
//!
//! Invariant: a page that a session may still write to belongs to that session alone and is not in the prefix cache. Only
//! whole, computed pages are shared or published. A session that is truncated within such a page releases that page and
//! computes its tokens again. A page is published only if all its tokens were computed in prefill, by all layers: decode may use
//! other arithmetic, and an answer must not depend on whether its prefix was found. A layer reads only pages that it wrote for
//! the same session, or that were published.

use kernels::PAGE_TOKENS;
use types::{LayerRange, SessionId};

use crate::executor::{ExecutorError, OpenedSession};
use crate::page_pool::PagePool;
use crate::plan::Phase;
use crate::prefix::{PageHash, Prefix};

/// Sessions that may be open at once, running or not.
pub const SESSIONS_MAX: usize = 4096;

/// Slots are reused, with their memory. A session id holds the index of its slot and the slot's version, so that the id of a
/// closed session is never taken for that of a later one.
#[derive(Debug)]
pub struct PageTables {
    pool: PagePool,
    positions_max: usize,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
}

#[derive(Debug)]
struct Slot {
    /// How many sessions the slot has had.
    version: u32,
    open: bool,
    tokens_max: usize,
    computed: usize,
    /// The layers that have computed these tokens; `None`: all.
    layers: Option<LayerRange>,
    /// Covers at least the computed tokens.
    pages: Vec<u32>,
    /// The hashes under which its first pages are published when they are computed.
    hashes: Vec<PageHash>,
}

impl PageTables {
    pub fn new(pages: usize, positions_max: usize) -> Self {
        Self { pool: PagePool::new(pages), positions_max, slots: Vec::new(), free_slots: Vec::new() }
    }

    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Sessions that are open.
    pub fn count(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Opens a session, which begins with those pages of `prefix` that the prefix cache has.
    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let session = self.allocate_slot(tokens_max)?;
        let slot = &mut self.slots[slot_of(session)];
        let hashes = &prefix.pages[..prefix.pages.len().min(tokens_max / PAGE_TOKENS)];
        slot.hashes.extend_from_slice(hashes);
        for hash in &hashes[..hashes.len().min(prefix.reuse_max / PAGE_TOKENS)] {
            let Some(page) = self.pool.find(hash) else { break };
            self.pool.retain(page);
            slot.pages.push(page);
        }
        slot.computed = slot.pages.len() * PAGE_TOKENS;
        Ok(OpenedSession { session, computed: slot.computed })
    }

    /// A slot for an empty session without hashes.
    fn allocate_slot(&mut self, tokens_max: usize) -> Result<SessionId, ExecutorError> {
        if tokens_max > self.positions_max {
            return Err(ExecutorError::TooLong { tokens: tokens_max, max: self.positions_max });
        }
        let index = match self.free_slots.pop() {
            Some(index) => index,
            None if self.slots.len() == SESSIONS_MAX => return Err(ExecutorError::OutOfSessions { max: SESSIONS_MAX }),
            None => {
                self.slots.push(Slot {
                    version: 0,
                    open: false,
                    tokens_max: 0,
                    computed: 0,
                    layers: None,
                    pages: Vec::new(),
                    hashes: Vec::new(),
                });
                self.slots.len() as u32 - 1
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.open = true;
        slot.version = slot.version.wrapping_add(1);
        slot.tokens_max = tokens_max;
        slot.computed = 0;
        slot.layers = None;
        slot.hashes.clear();
        // A step of a session never allocates.
        slot.pages.reserve(tokens_max.div_ceil(PAGE_TOKENS));
        Ok(SessionId(u64::from(slot.version) << 32 | u64::from(index)))
    }

    /// Keeps at most the first `tokens` computed tokens, and returns how many: fewer if these end within a shared or
    /// published page.
    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let slot = self.slot(session)?;
        let mut kept = tokens.min(slot.computed);
        if !kept.is_multiple_of(PAGE_TOKENS) {
            let page = slot.pages[kept / PAGE_TOKENS];
            if self.pool.references(page) > 1 || self.pool.is_published(page) {
                kept -= kept % PAGE_TOKENS;
            }
        }
        let slot = &mut self.slots[slot_of(session)];
        if kept < slot.computed {
            // Other tokens than those that were hashed may come next.
            slot.hashes.truncate(kept / PAGE_TOKENS);
        }
        slot.computed = kept;
        self.release_unused(session);
        Ok(kept)
    }

    /// Closes a session, if it is open.
    pub fn close(&mut self, session: SessionId) {
        if self.truncate(session, 0).is_ok() {
            self.slots[slot_of(session)].open = false;
            self.free_slots.push(slot_of(session) as u32);
        }
    }

    /// Tokens computed so far.
    pub fn computed(&self, session: SessionId) -> Result<usize, ExecutorError> {
        Ok(self.slot(session)?.computed)
    }

    /// Checks that these layers (`None`: all) have computed the session's tokens.
    pub fn check_layers(&self, session: SessionId, layers: Option<LayerRange>) -> Result<(), ExecutorError> {
        let slot = self.slot(session)?;
        let have_all = match (slot.layers, layers) {
            (None, _) => true,
            (Some(computed), Some(layers)) => computed.contains(layers),
            (Some(_), None) => false,
        };
        if have_all || slot.computed == 0 { Ok(()) } else { Err(ExecutorError::OtherLayers(session)) }
    }

    /// Pages that the session has to allocate in order to hold `tokens` tokens.
    pub fn pages_missing(&self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let slot = self.slot(session)?;
        if tokens > slot.tokens_max {
            return Err(ExecutorError::TooLong { tokens, max: slot.tokens_max });
        }
        Ok(tokens.div_ceil(PAGE_TOKENS).saturating_sub(slot.pages.len()))
    }

    /// Allocates the pages that [`PageTables::pages_missing`] counts. On an error it allocates none.
    pub fn reserve(&mut self, session: SessionId, tokens: usize) -> Result<(), ExecutorError> {
        let (needed, free) = (self.pages_missing(session, tokens)?, self.pool.free());
        if needed > free {
            return Err(ExecutorError::OutOfPages { needed, free });
        }
        let pages = &mut self.slots[slot_of(session)].pages;
        pages.extend((0..needed).map(|_| self.pool.allocate().expect("counted above")));
        Ok(())
    }

    /// Marks the tokens up to `tokens` as computed in this phase, by layers that [`PageTables::check_layers`] checked. Their pages
    /// were reserved. Pages of a prompt that are complete now are published, if all layers computed them.
    pub fn advance(&mut self, session: SessionId, tokens: usize, phase: Phase, layers: Option<LayerRange>) {
        let slot = &mut self.slots[slot_of(session)];
        assert!(slot.open && tokens <= slot.pages.len() * PAGE_TOKENS, "computed tokens have pages");
        let first = slot.computed / PAGE_TOKENS;
        match (phase, layers) {
            (Phase::Decode, _) | (_, Some(_)) => slot.hashes.truncate(first),
            (Phase::Prefill, None) => {
                let last = slot.hashes.len().min(tokens / PAGE_TOKENS).max(first);
                for (page, hash) in slot.pages[first..last].iter_mut().zip(slot.hashes.iter().skip(first)) {
                    *page = self.pool.publish(*page, *hash);
                }
            }
        }
        slot.computed = tokens;
        slot.layers = layers;
    }

    /// Releases the pages beyond the computed tokens, the last one first.
    pub fn release_unused(&mut self, session: SessionId) {
        let slot = &mut self.slots[slot_of(session)];
        for page in slot.pages.drain(slot.computed.div_ceil(PAGE_TOKENS)..).rev() {
            self.pool.release(page);
        }
    }

    /// Empties the prefix cache: a step failed, so the contents of pages may be wrong.
    pub fn clear_prefix_cache(&mut self) {
        self.pool.clear_prefix_cache();
        self.slots.iter_mut().for_each(|slot| slot.hashes.clear());
    }

    /// The session's pages, in the order of its tokens.
    pub fn pages(&self, session: SessionId) -> Result<&[u32], ExecutorError> {
        Ok(&self.slot(session)?.pages)
    }

    fn slot(&self, session: SessionId) -> Result<&Slot, ExecutorError> {
        self.slots
            .get(slot_of(session))
            .filter(|slot| slot.open && u64::from(slot.version) == session.0 >> 32)
            .ok_or(ExecutorError::UnknownSession(session))
    }
}

/// The index of a session's slot: below [`SESSIONS_MAX`] for ids made by [`PageTables`].
pub(crate) fn slot_of(session: SessionId) -> usize {
    (session.0 & u64::from(u32::MAX)) as usize
}

#[cfg(test)]
mod tests;
