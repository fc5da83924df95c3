//! Random operations on page tables, checked against a model that records what each page holds; and single cases.

use proptest::prelude::*;
use types::TokenId;

use super::*;
use crate::prefix::page_hashes;
use crate::request::TenantId;

const PAGES: usize = 12;
const POSITIONS: usize = 300;

#[derive(Clone, Debug)]
enum Op {
    /// The kind of a prompt, its length, and how much of it may be reused. All kinds begin with the same 64 tokens.
    Open(u32, usize, usize),
    Run(usize, usize),
    ReserveOnly(usize, usize),
    Truncate(usize, usize),
    Close(usize),
    ClearCache,
}

fn op() -> impl Strategy<Value = Op> {
    let (which, tokens) = (0usize..8, 0usize..150);
    prop_oneof![
        4 => (0u32..3, 0usize..150, 0usize..150).prop_map(|(a, b, c)| Op::Open(a, b, c)),
        6 => (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::Run(a, b)),
        1 => (which.clone(), tokens.clone()).prop_map(|(a, b)| Op::ReserveOnly(a, b)),
        2 => (which.clone(), tokens).prop_map(|(a, b)| Op::Truncate(a, b)),
        3 => which.prop_map(Op::Close),
        1 => Just(Op::ClearCache),
    ]
}

fn prompt(kind: u32, length: usize) -> Vec<TokenId> {
    (0..length as u32).map(|index| TokenId(if index < 64 { index } else { 1000 * kind + index })).collect()
}

/// A session, and what its pages should hold.
struct Open {
    session: SessionId,
    prompt: Vec<TokenId>,
    cells: Vec<(TokenId, Phase)>,
}

/// `PageTables` with a record of the contents of each page.
struct Model {
    tables: PageTables,
    open: Vec<Open>,
    kv: Vec<[(TokenId, Phase); PAGE_TOKENS]>,
    fresh: u32,
}

impl Model {
    fn apply(&mut self, op: Op) {
        let free = self.tables.pool().free();
        match op {
            Op::Open(kind, length, reuse_max) => {
                let prompt = prompt(kind, length);
                let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
                let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max };
                let OpenedSession { session, computed } = self.tables.open(POSITIONS, prefix).unwrap();
                assert!(computed <= reuse_max.min(length) && computed.is_multiple_of(PAGE_TOKENS));
                let cells = prompt[..computed].iter().map(|&token| (token, Phase::Prefill)).collect();
                self.open.push(Open { session, prompt, cells });
            }
            Op::Run(which, rows) if which < self.open.len() => self.run(which, rows),
            Op::ReserveOnly(which, tokens) if which < self.open.len() => {
                let session = self.open[which].session;
                let cached = self.tables.pool().cached();
                let end = self.tables.computed(session).unwrap() + tokens;
                let _ = self.tables.reserve(session, end);
                self.tables.release_unused(session);
                assert_eq!(self.tables.pool().free(), free);
                assert!(self.tables.pool().cached() <= cached);
            }
            Op::Truncate(which, tokens) if which < self.open.len() => {
                let Open { session, cells, prompt } = &mut self.open[which];
                let wanted = tokens.min(cells.len());
                let kept = self.tables.truncate(*session, tokens).unwrap();
                assert!(kept == wanted || kept == wanted - wanted % PAGE_TOKENS);
                assert_eq!(self.tables.pages(*session).unwrap().len(), kept.div_ceil(PAGE_TOKENS));
                if kept < cells.len() {
                    prompt.clear(); // it continues with other tokens
                }
                cells.truncate(kept);
            }
            Op::Close(which) if which < self.open.len() => {
                let session = self.open.remove(which).session;
                self.tables.close(session);
                assert!(self.tables.pages(session).is_err());
                self.tables.close(session);
            }
            Op::ClearCache => self.tables.clear_prefix_cache(),
            _ => {}
        }
    }

    /// Runs the next rows of the prompt, or generated ones after it.
    fn run(&mut self, which: usize, rows: usize) {
        let free = self.tables.pool().free();
        let Open { session, prompt, cells } = &mut self.open[which];
        let start = cells.len();
        let next: Vec<(TokenId, Phase)> = match prompt.get(start..).filter(|rest| !rest.is_empty()) {
            Some(rest) => rest.iter().take(rows).map(|&token| (token, Phase::Prefill)).collect(),
            None => (0..rows as u32).map(|row| (TokenId((1 << 20) + self.fresh + row), Phase::Decode)).collect(),
        };
        self.fresh += rows as u32;
        let Some(&(_, phase)) = next.first() else { return };
        if self.tables.reserve(*session, start + next.len()).is_err() {
            assert_eq!(self.tables.pool().free(), free);
            return;
        }
        let pages = self.tables.pages(*session).unwrap();
        for (position, &cell) in (start..).zip(&next) {
            self.kv[pages[position / PAGE_TOKENS] as usize][position % PAGE_TOKENS] = cell;
        }
        cells.extend(next);
        self.tables.advance(*session, cells.len(), phase, None);
    }

    fn check(&self) {
        let Self { tables, open, kv, .. } = self;
        let mut references = [0; PAGES];
        for Open { session, cells, .. } in open {
            let pages = tables.pages(*session).unwrap();
            assert_eq!(tables.computed(*session).unwrap(), cells.len());
            let held = pages.iter().flat_map(|&page| kv[page as usize]).take(cells.len());
            assert!(held.eq(cells.iter().copied()), "a page in use was written to by another");
            for (index, &page) in pages.iter().enumerate() {
                references[page as usize] += 1;
                let may_be_written = (index + 1) * PAGE_TOKENS > cells.len();
                let is_shared = tables.pool().references(page) > 1 || tables.pool().is_published(page);
                assert!(!(may_be_written && is_shared), "a page to be written is shared");
            }
        }
        for (page, &counted) in references.iter().enumerate() {
            assert_eq!(tables.pool().references(page as u32), counted);
        }
        let unused = references.iter().filter(|&&count| count == 0).count();
        assert_eq!(tables.pool().free(), unused);
        assert!(tables.pool().cached() <= unused);
        assert_eq!(tables.count(), open.len());
    }
}

proptest! {
    #[test]
    fn pages_are_never_lost_nor_changed_while_a_session_uses_them(ops in prop::collection::vec(op(), 1..80)) {
        let kv = vec![[(TokenId(u32::MAX), Phase::Decode); PAGE_TOKENS]; PAGES];
        let tables = PageTables::new(PAGES, POSITIONS);
        let mut model = Model { tables, open: Vec::new(), kv, fresh: 0 };
        for op in ops {
            model.apply(op);
            model.check();
        }
        for Open { session, .. } in model.open.drain(..) {
            model.tables.close(session);
        }
        assert_eq!(model.tables.pool().free(), PAGES);
        // Pages that are still found have the contents of their hashes.
        for kind in 0..3 {
            model.apply(Op::Open(kind, 150, 150));
        }
        model.check();
    }
}

fn open(tables: &mut PageTables, tokens_max: usize) -> SessionId {
    tables.open(tokens_max, Prefix::NONE).unwrap().session
}

#[test]
fn the_id_of_a_closed_session_is_unknown_after_its_slot_is_reused() {
    let mut tables = PageTables::new(1, POSITIONS);
    let first = open(&mut tables, 10);
    tables.close(first);
    let second = open(&mut tables, 10);
    assert_eq!(slot_of(first), slot_of(second));
    assert!(matches!(tables.computed(first), Err(ExecutorError::UnknownSession(id)) if id == first));
    assert!(tables.computed(second).is_ok());
}

#[test]
fn sessions_are_limited_in_number_and_length() {
    let mut tables = PageTables::new(1, POSITIONS);
    assert!(matches!(tables.open(POSITIONS + 1, Prefix::NONE), Err(ExecutorError::TooLong { .. })));
    for _ in 0..SESSIONS_MAX {
        open(&mut tables, 0);
    }
    let error = tables.open(0, Prefix::NONE).unwrap_err();
    assert!(matches!(error, ExecutorError::OutOfSessions { .. }) && error.is_retryable());
}

#[test]
fn truncating_within_a_shared_page_releases_it() {
    let mut tables = PageTables::new(4, POSITIONS);
    let prompt = prompt(0, 70);
    let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 69 };
    let first = tables.open(POSITIONS, prefix).unwrap().session;
    tables.reserve(first, 70).unwrap();
    tables.advance(first, 70, Phase::Prefill, None);
    let second = tables.open(POSITIONS, prefix).unwrap();
    assert_eq!(second.computed, 64);
    // The page stays shared when it can no longer be found.
    tables.clear_prefix_cache();
    assert_eq!(tables.truncate(first, 40).unwrap(), 32);
    assert_eq!(tables.pages(second.session).unwrap().len(), 2);
    tables.close(second.session);
    assert_eq!(tables.pool().free(), 3);
}

#[test]
fn a_prefix_is_found_while_its_session_runs_and_after_it_has_ended() {
    let mut tables = PageTables::new(8, POSITIONS);
    let prompt = prompt(0, 100);
    let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 99 };
    let first = tables.open(120, prefix).unwrap();
    assert_eq!(first.computed, 0);
    tables.reserve(first.session, 70).unwrap();
    tables.advance(first.session, 70, Phase::Prefill, None);
    assert_eq!(tables.open(120, prefix).unwrap().computed, 64, "whole pages only");
    tables.reserve(first.session, 110).unwrap();
    tables.advance(first.session, 100, Phase::Prefill, None);
    tables.advance(first.session, 110, Phase::Decode, None);
    tables.close(first.session);
    let second = tables.open(120, prefix).unwrap();
    assert_eq!(second.computed, 96);
    let less = Prefix { reuse_max: 95, ..prefix };
    assert_eq!(tables.open(120, less).unwrap().computed, 64);
    let other = page_hashes(TenantId(1), &prompt, PAGE_TOKENS);
    assert_eq!(tables.open(120, Prefix { pages: &other, ..prefix }).unwrap().computed, 0);
}

#[test]
fn tokens_that_were_computed_in_decode_are_never_found() {
    let mut tables = PageTables::new(8, POSITIONS);
    let prompt = prompt(0, 100);
    let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 99 };
    let first = tables.open(120, prefix).unwrap().session;
    tables.reserve(first, 100).unwrap();
    for (end, phase) in [(40, Phase::Prefill), (50, Phase::Decode), (100, Phase::Prefill)] {
        tables.advance(first, end, phase, None);
    }
    assert_eq!(tables.open(120, prefix).unwrap().computed, 32);
}

#[test]
fn tokens_that_a_part_of_the_layers_computed_are_never_found_and_are_read_by_these_alone() {
    let range = |start, end| LayerRange::new(start, end);
    let mut tables = PageTables::new(8, POSITIONS);
    let prompt = prompt(0, 100);
    let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 99 };
    let run = |tables: &mut PageTables, session, end, layers| {
        tables.reserve(session, end).unwrap();
        tables.advance(session, end, Phase::Prefill, layers);
    };
    let allowed = |tables: &PageTables, session, layers| tables.check_layers(session, layers).is_ok();
    let part = tables.open(120, prefix).unwrap().session;
    assert!([None, range(0, 2), range(2, 4)].iter().all(|layers| allowed(&tables, part, *layers)), "it has no tokens");
    run(&mut tables, part, 64, range(1, 3));
    for (layers, is_allowed) in [(None, false), (range(1, 3), true), (range(2, 3), true), (range(0, 3), false)] {
        assert_eq!(allowed(&tables, part, layers), is_allowed, "{layers:?}");
    }
    let whole = tables.open(120, prefix).unwrap();
    assert_eq!(whole.computed, 0);
    run(&mut tables, whole.session, 64, None);

    // What all layers computed, some of them may go on with.
    let found = tables.open(120, prefix).unwrap();
    assert_eq!(found.computed, 64);
    assert!(allowed(&tables, found.session, None) && allowed(&tables, found.session, range(2, 3)));
    run(&mut tables, found.session, 100, range(2, 3));
    assert!(!allowed(&tables, found.session, None) && !allowed(&tables, found.session, range(1, 3)));
    assert_eq!(tables.truncate(found.session, 0).unwrap(), 0);
    assert!(allowed(&tables, found.session, None));
    assert_eq!(tables.open(120, prefix).unwrap().computed, 64, "the last page was not published");
}

#[test]
fn two_that_compute_the_same_page_share_it_in_the_end() {
    let mut tables = PageTables::new(8, POSITIONS);
    let prompt = prompt(0, 64);
    let pages = page_hashes(TenantId(0), &prompt, PAGE_TOKENS);
    let prefix = Prefix { tokens: &prompt, pages: &pages, reuse_max: 63 };
    let both = [(); 2].map(|()| tables.open(100, prefix).unwrap().session);
    for session in both {
        tables.reserve(session, 70).unwrap();
        tables.advance(session, 64, Phase::Prefill, None);
    }
    assert_eq!(tables.pages(both[0]).unwrap()[..2], tables.pages(both[1]).unwrap()[..2]);
    assert_eq!(tables.pool().free(), 4);
    for session in both {
        tables.close(session);
    }
    assert_eq!((tables.pool().free(), tables.pool().cached()), (8, 2));
}
