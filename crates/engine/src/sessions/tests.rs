//! Random operations on sessions above pages whose contents are written down, and the cases that they taught.

use proptest::prelude::*;
use types::TokenId;

use super::*;
use crate::prefix::page_hashes;
use crate::request::Tenant;

const PAGES: usize = 12;
const POSITIONS: usize = 300;

#[derive(Clone, Debug)]
enum Op {
    /// A prompt of a kind and a length; all kinds begin with the same 64 tokens. And how much of it may be reused.
    Open(u32, usize, usize),
    Run(usize, usize),
    ReserveOnly(usize, usize),
    Truncate(usize, usize),
    Close(usize),
    Forget,
}

fn op() -> impl Strategy<Value = Op> {
    let (which, tokens) = (0usize..8, 0usize..150);
    prop_oneof![
        4 => (0u32..3, 0usize..150, 0usize..150).prop_map(|(a, b, c)| Op::Open(a, b, c)),
        6 => (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::Run(a, b)),
        1 => (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::ReserveOnly(a, b)),
        2 => (which.clone(), tokens).prop_map(|(a, b)| Op::Truncate(a, b)),
        3 => which.prop_map(Op::Close),
        1 => Just(Op::Forget),
    ]
}

fn prompt(kind: u32, length: usize) -> Vec<TokenId> {
    (0..length as u32).map(|index| TokenId(if index < 64 { index } else { 1000 * kind + index })).collect()
}

/// A session, and what its pages should hold.
struct Open {
    session: SessionId,
    prompt: Vec<TokenId>,
    cells: Vec<(TokenId, Role)>,
}

/// Sessions above pages whose contents are written down.
struct Model {
    sessions: Sessions,
    open: Vec<Open>,
    kv: Vec<[(TokenId, Role); PAGE_TOKENS]>,
    fresh: u32,
}

impl Model {
    fn apply(&mut self, op: Op) {
        let free = self.sessions.pages().free();
        match op {
            Op::Open(kind, length, reuse_max) => {
                let prompt = prompt(kind, length);
                let pages = page_hashes(Tenant(0), &prompt, PAGE_TOKENS);
                let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max };
                let Opened { session, computed } = self.sessions.open(POSITIONS, prefix).unwrap();
                assert!(computed <= reuse_max.min(length) && computed.is_multiple_of(PAGE_TOKENS));
                let cells = prompt[..computed].iter().map(|&token| (token, Role::Prompt)).collect();
                self.open.push(Open { session, prompt, cells });
            }
            Op::Run(which, rows) if which < self.open.len() => self.run(which, rows),
            Op::ReserveOnly(which, tokens) if which < self.open.len() => {
                let session = self.open[which].session;
                let cached = self.sessions.pages().cached();
                let end = self.sessions.computed(session).unwrap() + tokens;
                let _ = self.sessions.reserve(session, end);
                self.sessions.trim(session);
                assert_eq!(self.sessions.pages().free(), free);
                assert!(self.sessions.pages().cached() <= cached);
            }
            Op::Truncate(which, tokens) if which < self.open.len() => {
                let Open { session, cells, prompt } = &mut self.open[which];
                let wanted = tokens.min(cells.len());
                let kept = self.sessions.truncate(*session, tokens).unwrap();
                assert!(kept == wanted || kept == wanted - wanted % PAGE_TOKENS);
                assert_eq!(self.sessions.table(*session).unwrap().len(), kept.div_ceil(PAGE_TOKENS));
                if kept < cells.len() {
                    prompt.clear(); // it goes on with other tokens
                }
                cells.truncate(kept);
            }
            Op::Close(which) if which < self.open.len() => {
                let session = self.open.remove(which).session;
                self.sessions.close(session);
                assert!(self.sessions.table(session).is_err());
                self.sessions.close(session);
            }
            Op::Forget => self.sessions.forget_prefixes(),
            _ => {}
        }
    }

    /// Runs the next rows of the prompt, or generated ones after it.
    fn run(&mut self, which: usize, rows: usize) {
        let free = self.sessions.pages().free();
        let Open { session, prompt, cells } = &mut self.open[which];
        let start = cells.len();
        let next: Vec<(TokenId, Role)> = match prompt.get(start..).filter(|rest| !rest.is_empty()) {
            Some(rest) => rest.iter().take(rows).map(|&token| (token, Role::Prompt)).collect(),
            None => (0..rows as u32).map(|row| (TokenId((1 << 20) + self.fresh + row), Role::Generated)).collect(),
        };
        self.fresh += rows as u32;
        let Some(&(_, role)) = next.first() else { return };
        if self.sessions.reserve(*session, start + next.len()).is_err() {
            assert_eq!(self.sessions.pages().free(), free);
            return;
        }
        let table = self.sessions.table(*session).unwrap();
        for (position, &cell) in (start..).zip(&next) {
            self.kv[table[position / PAGE_TOKENS] as usize][position % PAGE_TOKENS] = cell;
        }
        cells.extend(next);
        self.sessions.advance(*session, cells.len(), role);
    }

    fn check(&self) {
        let Self { sessions, open, kv, .. } = self;
        let mut references = [0; PAGES];
        for Open { session, cells, .. } in open {
            let table = sessions.table(*session).unwrap();
            assert_eq!(sessions.computed(*session).unwrap(), cells.len());
            let held = table.iter().flat_map(|&page| kv[page as usize]).take(cells.len());
            assert!(held.eq(cells.iter().copied()), "a page in use was written to by another");
            for (index, &page) in table.iter().enumerate() {
                references[page as usize] += 1;
                let may_be_written = (index + 1) * PAGE_TOKENS > cells.len();
                let is_shared = sessions.pages().references(page) > 1 || sessions.pages().is_named(page);
                assert!(!(may_be_written && is_shared), "a page to be written is shared");
            }
        }
        for (page, &counted) in references.iter().enumerate() {
            assert_eq!(sessions.pages().references(page as u32), counted);
        }
        let unused = references.iter().filter(|&&count| count == 0).count();
        assert_eq!(sessions.pages().free(), unused);
        assert!(sessions.pages().cached() <= unused);
        assert_eq!(sessions.count(), open.len());
    }
}

proptest! {
    #[test]
    fn pages_are_never_lost_nor_changed_under_a_session(ops in prop::collection::vec(op(), 1..80)) {
        let kv = vec![[(TokenId(u32::MAX), Role::Generated); PAGE_TOKENS]; PAGES];
        let sessions = Sessions::new(PAGES, POSITIONS);
        let mut model = Model { sessions, open: Vec::new(), kv, fresh: 0 };
        for op in ops {
            model.apply(op);
            model.check();
        }
        for Open { session, .. } in model.open.drain(..) {
            model.sessions.close(session);
        }
        assert_eq!(model.sessions.pages().free(), PAGES);
        // Whatever is still found is what it says.
        for kind in 0..3 {
            model.apply(Op::Open(kind, 150, 150));
        }
        model.check();
    }
}

fn open(sessions: &mut Sessions, tokens_max: usize) -> SessionId {
    sessions.open(tokens_max, Prefix::NONE).unwrap().session
}

#[test]
fn the_id_of_a_closed_session_is_unknown_after_its_slot_is_used_again() {
    let mut sessions = Sessions::new(1, POSITIONS);
    let first = open(&mut sessions, 10);
    sessions.close(first);
    let second = open(&mut sessions, 10);
    assert_eq!(slot_of(first), slot_of(second));
    assert!(matches!(sessions.computed(first), Err(ExecutorError::UnknownSession(id)) if id == first));
    assert!(sessions.computed(second).is_ok());
}

#[test]
fn sessions_are_limited_in_number_and_length() {
    let mut sessions = Sessions::new(1, POSITIONS);
    assert!(matches!(sessions.open(POSITIONS + 1, Prefix::NONE), Err(ExecutorError::TooLong { .. })));
    for _ in 0..SESSIONS_MAX {
        open(&mut sessions, 0);
    }
    let error = sessions.open(0, Prefix::NONE).unwrap_err();
    assert!(matches!(error, ExecutorError::OutOfSessions { .. }) && error.is_retryable());
}

#[test]
fn cutting_back_into_a_shared_page_gives_that_page_up() {
    let mut sessions = Sessions::new(4, POSITIONS);
    let prompt = prompt(0, 70);
    let pages = page_hashes(Tenant(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 69 };
    let first = sessions.open(POSITIONS, prefix).unwrap().session;
    sessions.reserve(first, 70).unwrap();
    sessions.advance(first, 70, Role::Prompt);
    let second = sessions.open(POSITIONS, prefix).unwrap();
    assert_eq!(second.computed, 64);
    // The page stays shared when it can no longer be found.
    sessions.forget_prefixes();
    assert_eq!(sessions.truncate(first, 40).unwrap(), 32);
    assert_eq!(sessions.table(second.session).unwrap().len(), 2);
    sessions.close(second.session);
    assert_eq!(sessions.pages().free(), 3);
}

#[test]
fn a_prefix_is_found_while_its_session_runs_and_after_it_has_ended() {
    let mut sessions = Sessions::new(8, POSITIONS);
    let prompt = prompt(0, 100);
    let pages = page_hashes(Tenant(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 99 };
    let first = sessions.open(120, prefix).unwrap();
    assert_eq!(first.computed, 0);
    sessions.reserve(first.session, 70).unwrap();
    sessions.advance(first.session, 70, Role::Prompt);
    assert_eq!(sessions.open(120, prefix).unwrap().computed, 64, "whole pages only");
    sessions.reserve(first.session, 110).unwrap();
    sessions.advance(first.session, 100, Role::Prompt);
    sessions.advance(first.session, 110, Role::Generated);
    sessions.close(first.session);
    let second = sessions.open(120, prefix).unwrap();
    assert_eq!(second.computed, 96);
    let shy = Prefix { reuse_max: 95, ..prefix };
    assert_eq!(sessions.open(120, shy).unwrap().computed, 64);
    let other = page_hashes(Tenant(1), &prompt, PAGE_TOKENS);
    assert_eq!(sessions.open(120, Prefix { pages: &other, ..prefix }).unwrap().computed, 0);
}

#[test]
fn tokens_that_were_not_run_as_a_prompt_are_never_found() {
    let mut sessions = Sessions::new(8, POSITIONS);
    let prompt = prompt(0, 100);
    let pages = page_hashes(Tenant(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 99 };
    let first = sessions.open(120, prefix).unwrap().session;
    sessions.reserve(first, 100).unwrap();
    for (end, role) in [(40, Role::Prompt), (50, Role::Generated), (100, Role::Prompt)] {
        sessions.advance(first, end, role);
    }
    assert_eq!(sessions.open(120, prefix).unwrap().computed, 32);
}

#[test]
fn two_that_compute_the_same_page_share_it_in_the_end() {
    let mut sessions = Sessions::new(8, POSITIONS);
    let prompt = prompt(0, 64);
    let pages = page_hashes(Tenant(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 63 };
    let both = [(); 2].map(|()| sessions.open(100, prefix).unwrap().session);
    for session in both {
        sessions.reserve(session, 70).unwrap();
        sessions.advance(session, 64, Role::Prompt);
    }
    assert_eq!(sessions.table(both[0]).unwrap()[..2], sessions.table(both[1]).unwrap()[..2]);
    assert_eq!(sessions.pages().free(), 4);
    for session in both {
        sessions.close(session);
    }
    assert_eq!((sessions.pages().free(), sessions.pages().cached()), (8, 2));
}
