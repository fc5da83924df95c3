//! `Sessions`: the page tables of open sequences, for whoever holds K/V: a whole model or one stage of it.
//!
//! Invariant: a page that a session may still write to belongs to that session alone. Only whole, computed pages are
//! shared, and a session that is cut back into a shared page lets that page go and computes its tokens again.

use kernels::PAGE_TOKENS;
use types::SessionId;

use crate::executor::{ExecutorError, Forked};
use crate::pages::Pages;

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

    pub fn open(&mut self, tokens_max: usize) -> Result<SessionId, ExecutorError> {
        if tokens_max > self.positions_max {
            return Err(ExecutorError::TooLong { tokens: tokens_max, max: self.positions_max });
        }
        let index = match self.vacant.pop() {
            Some(index) => index,
            None if self.slots.len() == SESSIONS_MAX => return Err(ExecutorError::OutOfSessions { max: SESSIONS_MAX }),
            None => {
                self.slots.push(Slot { generation: 0, open: false, tokens_max: 0, computed: 0, table: Vec::new() });
                self.slots.len() as u32 - 1
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.open = true;
        slot.generation = slot.generation.wrapping_add(1);
        slot.tokens_max = tokens_max;
        slot.computed = 0;
        // A step of a session never allocates.
        slot.table.reserve(tokens_max.div_ceil(PAGE_TOKENS));
        Ok(SessionId(u64::from(slot.generation) << 32 | u64::from(index)))
    }

    /// Shares the whole pages among the first `tokens` computed tokens of `from`.
    pub fn fork(&mut self, from: SessionId, tokens: usize, tokens_max: usize) -> Result<Forked, ExecutorError> {
        let computed = self.slot(from)?.computed;
        let whole = tokens.min(computed).min(tokens_max) / PAGE_TOKENS;
        let session = self.open(tokens_max)?;
        for index in 0..whole {
            let page = self.slots[slot_of(from)].table[index];
            self.pages.share(page);
            self.slots[slot_of(session)].table.push(page);
        }
        self.slots[slot_of(session)].computed = whole * PAGE_TOKENS;
        Ok(Forked { session, computed: whole * PAGE_TOKENS })
    }

    /// Keeps at most the first `tokens` computed tokens; see the invariant for when it keeps fewer.
    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let slot = self.slot(session)?;
        let mut kept = tokens.min(slot.computed);
        let partial = !kept.is_multiple_of(PAGE_TOKENS);
        if partial && self.pages.references(slot.table[kept / PAGE_TOKENS]) > 1 {
            kept -= kept % PAGE_TOKENS;
        }
        self.slots[slot_of(session)].computed = kept;
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

    /// Declares the tokens up to `tokens` computed. Their pages were reserved.
    pub fn advance(&mut self, session: SessionId, tokens: usize) {
        let slot = &mut self.slots[slot_of(session)];
        assert!(slot.open && tokens <= slot.table.len() * PAGE_TOKENS, "computed tokens have pages");
        slot.computed = tokens;
    }

    /// Gives back the pages beyond the computed tokens.
    pub fn trim(&mut self, session: SessionId) {
        let slot = &mut self.slots[slot_of(session)];
        for page in slot.table.drain(slot.computed.div_ceil(PAGE_TOKENS)..) {
            self.pages.release(page);
        }
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 12;
    const POSITIONS: usize = 300;

    #[derive(Clone, Debug)]
    enum Op {
        Open(usize),
        Fork(usize, usize),
        Run(usize, usize),
        ReserveOnly(usize, usize),
        Truncate(usize, usize),
        Close(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        let (which, tokens) = (0usize..8, 0usize..150);
        prop_oneof![
            (0usize..POSITIONS + 10).prop_map(Op::Open),
            (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::Fork(a, b)),
            (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::Run(a, b)),
            (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::ReserveOnly(a, b)),
            (which.clone(), tokens).prop_map(|(a, b)| Op::Truncate(a, b)),
            which.prop_map(Op::Close),
        ]
    }

    fn check_invariants(sessions: &Sessions, open: &[SessionId]) {
        let mut references = [0; PAGES];
        for &session in open {
            let (table, computed) = (sessions.table(session).unwrap(), sessions.computed(session).unwrap());
            assert!(computed <= table.len() * PAGE_TOKENS);
            for (index, &page) in table.iter().enumerate() {
                references[page as usize] += 1;
                let may_be_written = (index + 1) * PAGE_TOKENS > computed;
                assert!(!may_be_written || sessions.pages().references(page) == 1, "a page to be written is shared");
            }
        }
        for (page, &counted) in references.iter().enumerate() {
            assert_eq!(sessions.pages().references(page as u32), counted);
        }
        assert_eq!(sessions.pages().free(), references.iter().filter(|&&count| count == 0).count());
        assert_eq!(sessions.count(), open.len());
    }

    proptest! {
        #[test]
        fn pages_are_never_lost_nor_shared_for_writing(ops in prop::collection::vec(op(), 1..60)) {
            let mut sessions = Sessions::new(PAGES, POSITIONS);
            let mut open: Vec<SessionId> = Vec::new();
            for op in ops {
                let free = sessions.pages().free();
                match op {
                    Op::Open(tokens) => match sessions.open(tokens) {
                        Ok(session) => open.push(session),
                        Err(_) => assert!(tokens > POSITIONS),
                    },
                    Op::Fork(which, tokens) if which < open.len() => {
                        let forked = sessions.fork(open[which], tokens, POSITIONS).unwrap();
                        let whole = tokens.min(sessions.computed(open[which]).unwrap()) / PAGE_TOKENS;
                        assert_eq!(forked.computed, whole * PAGE_TOKENS);
                        assert_eq!(sessions.table(forked.session).unwrap(), &sessions.table(open[which]).unwrap()[..whole]);
                        open.push(forked.session);
                    }
                    Op::Run(which, tokens) if which < open.len() => {
                        let end = sessions.computed(open[which]).unwrap() + tokens;
                        match sessions.reserve(open[which], end) {
                            Ok(()) => sessions.advance(open[which], end),
                            Err(_) => assert_eq!(sessions.pages().free(), free),
                        }
                    }
                    Op::ReserveOnly(which, tokens) if which < open.len() => {
                        let end = sessions.computed(open[which]).unwrap() + tokens;
                        let _ = sessions.reserve(open[which], end);
                        sessions.trim(open[which]);
                        assert_eq!(sessions.pages().free(), free);
                    }
                    Op::Truncate(which, tokens) if which < open.len() => {
                        let before = sessions.computed(open[which]).unwrap();
                        let kept = sessions.truncate(open[which], tokens).unwrap();
                        let wanted = tokens.min(before);
                        assert!(kept == wanted || kept == wanted - wanted % PAGE_TOKENS);
                        assert_eq!(sessions.table(open[which]).unwrap().len(), kept.div_ceil(PAGE_TOKENS));
                    }
                    Op::Close(which) if which < open.len() => {
                        let session = open.remove(which);
                        sessions.close(session);
                        assert!(sessions.table(session).is_err());
                        sessions.close(session);
                    }
                    _ => {}
                }
                check_invariants(&sessions, &open);
            }
            for session in open {
                sessions.close(session);
            }
            assert_eq!(sessions.pages().free(), PAGES);
        }
    }

    #[test]
    fn the_id_of_a_closed_session_is_unknown_after_its_slot_is_used_again() {
        let mut sessions = Sessions::new(1, POSITIONS);
        let first = sessions.open(10).unwrap();
        sessions.close(first);
        let second = sessions.open(10).unwrap();
        assert_eq!(slot_of(first), slot_of(second));
        assert!(matches!(sessions.computed(first), Err(ExecutorError::UnknownSession(id)) if id == first));
        assert!(sessions.computed(second).is_ok());
    }

    #[test]
    fn sessions_are_limited_in_number_and_length() {
        let mut sessions = Sessions::new(1, POSITIONS);
        assert!(matches!(sessions.open(POSITIONS + 1), Err(ExecutorError::TooLong { .. })));
        for _ in 0..SESSIONS_MAX {
            sessions.open(0).unwrap();
        }
        let error = sessions.open(0).unwrap_err();
        assert!(matches!(error, ExecutorError::OutOfSessions { .. }) && error.is_retryable());
    }

    #[test]
    fn cutting_back_into_a_shared_page_gives_that_page_up() {
        let mut sessions = Sessions::new(4, POSITIONS);
        let first = sessions.open(POSITIONS).unwrap();
        sessions.reserve(first, 70).unwrap();
        sessions.advance(first, 70);
        let second = sessions.fork(first, 64, POSITIONS).unwrap();
        assert_eq!(second.computed, 64);
        assert_eq!(sessions.truncate(first, 40).unwrap(), 32);
        assert_eq!(sessions.table(second.session).unwrap().len(), 2);
        sessions.close(second.session);
        assert_eq!(sessions.pages().free(), 3);
    }
}
