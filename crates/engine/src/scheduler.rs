//! `Scheduler`: which tokens of which sequences the next step runs. What it decides changes when an answer comes, never
//! what it says.
//!
//! All sequences that decode come first, one row each. Prefill gets what the chunk leaves, in two turns: prompts that
//! will be through, oldest first, up to half of it, so that a short request does not wait for a long one; then the others,
//! oldest first. If that makes a long prompt hold up a short one, it gets a quarter only: the step is over sooner, and the
//! long prompt still moves in every step, however many short ones come.

use crate::executor::Capacity;
use crate::plan::{Role, StepPlan};
use crate::sequence::Sequence;

pub(crate) struct Scheduler {
    /// Rows of a step, unless there are more sequences that decode.
    pub chunk: usize,
    /// Tokens that may be guessed for a sequence in one step.
    pub guesses_max: usize,
    shares: Vec<Share>,
}

/// One sequence's part of the step.
struct Share {
    /// Among the running ones.
    index: usize,
    rows: usize,
    /// Where its entry comes in the plan.
    order: (Role, bool),
}

/// What the step has taken of the executor's capacity.
struct Room<'a> {
    capacity: &'a Capacity,
    rows: usize,
    logit_rows: usize,
    pages: usize,
    sequences: usize,
}

impl Scheduler {
    pub fn new(chunk: usize, guesses_max: usize) -> Self {
        Self { chunk: chunk.max(1), guesses_max, shares: Vec::new() }
    }

    /// Fills `plan` with the next step of `running`, which is in the order of age.
    pub fn plan(&mut self, plan: &mut StepPlan, running: &mut [Sequence], capacity: &Capacity) {
        plan.clear();
        self.shares.clear();
        let mut room = Room { capacity, rows: 0, logit_rows: 0, pages: 0, sequences: 0 };
        for (index, sequence) in running.iter_mut().enumerate().filter(|(_, sequence)| sequence.is_decoding()) {
            sequence.drop_guesses();
            self.share(&mut room, index, sequence, 1);
        }
        if self.guesses_max > 0 {
            self.guess(&mut room, running);
        }
        self.prefill(&mut room, running);
        self.shares.sort_unstable_by_key(|share| (share.order, share.index));
        for share in &self.shares {
            running[share.index].enter(share.rows, plan);
        }
    }

    /// Guesses for the sequences that decode, while rows are left.
    fn guess(&self, room: &mut Room<'_>, running: &mut [Sequence]) {
        let capacity = room.capacity;
        for share in &self.shares {
            let rows = self.chunk.min(capacity.rows_max).saturating_sub(room.rows);
            let left = rows.min(capacity.wanted_max.saturating_sub(room.logit_rows)).min(self.guesses_max);
            let sequence = &mut running[share.index];
            let pages = capacity.pages(sequence.planned + 1);
            // Within the pages that the step may list.
            let spare = capacity.step_pages_max.saturating_sub(room.pages) + pages;
            let left = left.min((spare * capacity.page_tokens).saturating_sub(sequence.planned + 1));
            let guessed = sequence.guess(left);
            room.rows += guessed;
            room.logit_rows += guessed;
            room.pages += capacity.pages(sequence.planned + 1 + guessed) - pages;
        }
    }

    fn prefill(&mut self, room: &mut Room<'_>, running: &[Sequence]) {
        let waits = |index: &usize| running[*index].ready() > 0 && !running[*index].is_decoding();
        let budget = self.chunk.saturating_sub(room.rows).max(1);
        let soon_max = (budget / 2).max(1);
        let (first, mut soon, mut held_back) = (self.shares.len(), 0, false);
        for index in (0..running.len()).filter(waits) {
            let ready = running[index].ready();
            held_back |= ready > soon_max;
            if soon + ready <= soon_max {
                soon += self.share(room, index, &running[index], ready);
            }
        }
        let whole = first..self.shares.len();
        let mut left = if soon > 0 && held_back { (budget / 4).max(1) } else { budget - soon };
        for index in (0..running.len()).filter(waits) {
            // Those of the first turn are in the order of their indices.
            let is_whole = self.shares[whole.clone()].binary_search_by_key(&index, |share| share.index).is_ok();
            if left > 0 && !is_whole {
                left -= self.share(room, index, &running[index], left);
            }
        }
    }

    /// Gives a sequence up to `rows_max` rows, as far as there is room, and returns how many.
    fn share(&mut self, room: &mut Room<'_>, index: usize, sequence: &Sequence, rows_max: usize) -> usize {
        let capacity = room.capacity;
        let mut rows = sequence.ready().min(rows_max).min(capacity.rows_max.saturating_sub(room.rows));
        let logit_rows_left = capacity.wanted_max.saturating_sub(room.logit_rows);
        if sequence.is_scoring() {
            rows = rows.min(logit_rows_left);
        }
        if rows == 0 || room.sequences == capacity.sequences_max {
            return 0;
        }
        let (logit_rows, pages) = (sequence.logit_rows(rows), capacity.pages(sequence.planned + rows));
        if logit_rows > logit_rows_left || room.pages + pages > capacity.step_pages_max {
            return 0;
        }
        room.rows += rows;
        room.logit_rows += logit_rows;
        room.pages += pages;
        room.sequences += 1;
        self.shares.push(Share { index, rows, order: (sequence.role(), sequence.is_embedding()) });
        rows
    }
}
