//! `Queue`: who waits, and whose turn it is.
//!
//! Each tenant waits in a line of its own. The turn goes to the tenant that has been served the fewest tokens, so that one
//! with many or long requests does not keep the others waiting (virtual token counters: Sheng and others, Fairness in
//! serving large language models, 2024). A tenant that comes back begins at the count of the least served that is here:
//! an absence is not saved up.

use std::collections::VecDeque;

use crate::request::{RequestId, Tenant};
use crate::sequence::Sequence;

/// How many of a line are looked at for one that may go.
const LOOK_MAX: usize = 32;

#[derive(Default)]
pub(crate) struct Queue {
    /// Those that wait or run, in the order in which they came.
    lines: Vec<Line>,
    waiting: usize,
}

struct Line {
    tenant: Tenant,
    /// Tokens, run for it or given to it.
    served: u64,
    running: usize,
    waiting: VecDeque<Sequence>,
}

/// Where a sequence waits. Good until the queue changes.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    line: usize,
    index: usize,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.waiting
    }

    pub fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.lines.iter().flat_map(|line| &line.waiting)
    }

    /// At the end of its tenant's line.
    pub fn push(&mut self, sequence: Sequence) {
        self.line(sequence.tenant).waiting.push_back(sequence);
        self.waiting += 1;
    }

    /// One that ran, back to the head of its tenant's line.
    pub fn push_front(&mut self, sequence: Sequence) {
        let line = self.line(sequence.tenant);
        line.running -= 1;
        line.waiting.push_front(sequence);
        self.waiting += 1;
    }

    /// The first that may go, in the order of turns.
    pub fn next(&self, may_go: impl Fn(&Sequence) -> bool) -> Option<Place> {
        let first = |line: &Line| line.waiting.iter().take(LOOK_MAX).position(&may_go);
        let lines = self.lines.iter().enumerate();
        let candidates = lines.filter_map(|(at, line)| Some((line.served, Place { line: at, index: first(line)? })));
        candidates.min_by_key(|&(served, _)| served).map(|(_, place)| place)
    }

    pub fn get(&self, place: Place) -> &Sequence {
        &self.lines[place.line].waiting[place.index]
    }

    /// Takes a sequence out of its line in order to run it. [`Queue::leave`] says when it has ended.
    pub fn take(&mut self, place: Place) -> Sequence {
        self.waiting -= 1;
        let line = &mut self.lines[place.line];
        line.running += 1;
        line.waiting.remove(place.index).expect("a place holds a sequence")
    }

    /// Takes a sequence out that is not to run.
    pub fn remove(&mut self, id: RequestId) -> Option<Sequence> {
        let place = self.lines.iter().enumerate().find_map(|(line, waiting)| {
            let index = waiting.waiting.iter().position(|sequence| sequence.id == id)?;
            Some(Place { line, index })
        })?;
        let sequence = self.take(place);
        self.leave(sequence.tenant);
        Some(sequence)
    }

    /// A sequence that was taken has ended.
    pub fn leave(&mut self, tenant: Tenant) {
        let at = self.lines.iter().position(|line| line.tenant == tenant).expect("its tenant is here");
        let line = &mut self.lines[at];
        line.running -= 1;
        if line.running == 0 && line.waiting.is_empty() {
            self.lines.remove(at);
        }
    }

    /// Tokens were run for a tenant, or given to it.
    pub fn charge(&mut self, tenant: Tenant, tokens: usize) {
        if let Some(line) = self.lines.iter_mut().find(|line| line.tenant == tenant) {
            line.served += tokens as u64;
        }
    }

    /// Forgets everybody.
    pub fn clear(&mut self) {
        self.lines.clear();
        self.waiting = 0;
    }

    fn line(&mut self, tenant: Tenant) -> &mut Line {
        let at = self.lines.iter().position(|line| line.tenant == tenant).unwrap_or_else(|| {
            let served = self.lines.iter().map(|line| line.served).min().unwrap_or(0);
            self.lines.push(Line { tenant, served, running: 0, waiting: VecDeque::new() });
            self.lines.len() - 1
        });
        &mut self.lines[at]
    }
}
