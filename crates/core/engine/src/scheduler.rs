//! `Scheduler`: which rows of which sequences the next step runs. Its decisions change the time of an answer, never its
//! tokens.
//!
//! Sequences in decode come first, with one row each and draft tokens. Prefill gets the rows that the chunk leaves, in two
//! passes. The first takes prompts that it can complete, oldest first, up to half of these rows, so that a short prompt does
//! not wait for a long one. The second takes the others, oldest first. If the first pass took short prompts while a long one
//! waits, the second is limited to a quarter: the step ends sooner, and the long prompt still advances in every step,
//! however many short ones come.
//!
//! While sequences generate, each of them waits for the whole step before its next token. Then prefill gets no more rows than
//! the step can run in a given time, by the measured cost of prefill rows.
//!
//! With several steps in flight, each gets an equal part of the sequences in decode, so that the stages of a chain are
//! equally busy, and a prompt is cut into more chunks, so that one stage computes a chunk while the next one computes the
//! chunk before it. The next chunk of a prompt need not wait for the one before it.

use std::time::Duration;

use crate::executor::Capacity;
use crate::plan::{Phase, StepPlan};
use crate::prefill_cost::{PrefillCost, PrefillRows};
use crate::sequence::Sequence;

/// The fewest prefill rows of a step with others in flight, if so many are ready. With fewer, the time to read the weights
/// would outweigh that of the rows.
const PIPELINED_ROWS_MIN: usize = 64;

/// How many of the prefill rows that are ready a step gets at most: any number, or a part that keeps `depth` stages busy.
pub(crate) fn pipelined_rows(ready: usize, depth: usize) -> usize {
    if depth > 1 { ready.div_ceil(2 * depth).max(PIPELINED_ROWS_MIN) } else { usize::MAX }
}

pub(crate) struct Scheduler {
    /// Rows of a step, unless more sequences are in decode.
    chunk: usize,
    /// Draft tokens of a sequence in one step.
    draft_tokens_max: usize,
    /// The time of a step with prefill while sequences generate; `None`: any.
    prefill_step: Option<Duration>,
    prefill_cost: PrefillCost,
    scheduled: Vec<ScheduledRows>,
    /// Indices of the sequences that are ready to decode.
    ready: Vec<usize>,
}

/// One sequence's rows of the step.
struct ScheduledRows {
    /// The index of the sequence among the running ones.
    index: usize,
    /// Without draft tokens.
    rows: usize,
    /// Sorts the entries of the plan.
    order: (Phase, bool),
}

/// What the step uses of the executor's capacity.
struct StepBudget<'a> {
    capacity: &'a Capacity,
    rows: usize,
    logit_rows: usize,
    pages: usize,
    sequences: usize,
}

impl Scheduler {
    pub fn new(chunk: usize, draft_tokens_max: usize, prefill_step: Option<Duration>) -> Self {
        let (chunk, prefill_cost) = (chunk.max(1), PrefillCost::default());
        Self { chunk, draft_tokens_max, prefill_step, prefill_cost, scheduled: Vec::new(), ready: Vec::new() }
    }

    /// A step with these prefill rows took `elapsed`.
    pub fn record(&mut self, prefill: PrefillRows, elapsed: Duration) {
        self.prefill_cost.record(prefill, elapsed);
    }

    /// Fills `plan` with the next step of `running`, which is in the order of admission. Up to `depth` steps are in flight.
    /// Returns its prefill rows.
    pub fn plan(
        &mut self,
        plan: &mut StepPlan,
        running: &mut [Sequence],
        capacity: &Capacity,
        depth: usize,
    ) -> PrefillRows {
        plan.clear();
        self.scheduled.clear();
        let mut budget = StepBudget { capacity, rows: 0, logit_rows: 0, pages: 0, sequences: 0 };
        self.decode(&mut budget, running, depth.max(1));
        if self.draft_tokens_max > 0 {
            self.draft(&mut budget, running);
        }
        let prefill = self.prefill(&mut budget, running, depth.max(1));
        self.scheduled.sort_unstable_by_key(|scheduled| (scheduled.order, scheduled.index));
        for scheduled in &self.scheduled {
            running[scheduled.index].push_entry(scheduled.rows, plan);
        }
        prefill
    }

    /// Schedules the step's part of the sequences that generate: of those that are ready, the ones that have waited longest.
    fn decode(&mut self, budget: &mut StepBudget<'_>, running: &mut [Sequence], depth: usize) {
        let generating = running.iter().filter(|sequence| sequence.is_generating()).count();
        let mut left = generating.div_ceil(depth);
        self.ready.clear();
        self.ready.extend((0..running.len()).filter(|&index| running[index].is_decoding()));
        self.ready.sort_unstable_by_key(|&index| (running[index].last_step(), index));
        for position in 0..self.ready.len() {
            let index = self.ready[position];
            running[index].clear_draft();
            if left > 0 {
                left -= self.schedule(budget, index, &running[index], 1);
            }
        }
    }

    /// Adds draft tokens to the sequences in decode, while rows are left.
    fn draft(&self, budget: &mut StepBudget<'_>, running: &mut [Sequence]) {
        let capacity = budget.capacity;
        for scheduled in &self.scheduled {
            let rows = self.chunk.min(capacity.rows_max).saturating_sub(budget.rows);
            let logit_rows = capacity.logit_rows_max.saturating_sub(budget.logit_rows);
            let sequence = &mut running[scheduled.index];
            let pages = capacity.pages(sequence.planned + 1);
            // Tokens that fit on the pages that the step may list.
            let pages_left = capacity.step_pages_max.saturating_sub(budget.pages) + pages;
            let tokens_left = (pages_left * capacity.page_tokens).saturating_sub(sequence.planned + 1);
            let drafted = sequence.draft(rows.min(logit_rows).min(self.draft_tokens_max).min(tokens_left));
            budget.rows += drafted;
            budget.logit_rows += drafted;
            budget.pages += capacity.pages(sequence.planned + 1 + drafted) - pages;
        }
    }

    fn prefill(&mut self, budget: &mut StepBudget<'_>, running: &[Sequence], depth: usize) -> PrefillRows {
        let waits = |index: &usize| running[*index].rows_ready() > 0 && !running[*index].is_decoding();
        let mut rows_max = self.chunk.saturating_sub(budget.rows).max(1);
        let ready = (0..running.len()).filter(waits).map(|index| running[index].rows_ready()).sum();
        rows_max = rows_max.min(pipelined_rows(ready, depth));
        if let Some(limit) = self.prefill_step.filter(|_| running.iter().any(Sequence::is_generating)) {
            let furthest = (0..running.len()).filter(waits).map(|index| running[index].planned).max();
            // A sequence in decode waits for all steps in flight.
            let rows = self.prefill_cost.rows_within(limit / depth as u32, furthest.unwrap_or(0));
            rows_max = rows_max.min(rows);
        }
        let short_max = (rows_max / 2).max(1);
        let (start, mut short_rows, mut has_long) = (self.scheduled.len(), 0, false);
        for index in (0..running.len()).filter(waits) {
            let ready = running[index].rows_ready();
            has_long |= ready > short_max;
            if short_rows + ready <= short_max {
                short_rows += self.schedule(budget, index, &running[index], ready);
            }
        }
        let first_pass = start..self.scheduled.len();
        let mut left = if short_rows > 0 && has_long { (rows_max / 4).max(1) } else { rows_max - short_rows };
        for index in (0..running.len()).filter(waits) {
            // The first pass went through the sequences in the order of their indices.
            let first_pass = &self.scheduled[first_pass.clone()];
            let is_scheduled = first_pass.binary_search_by_key(&index, |scheduled| scheduled.index).is_ok();
            if left > 0 && !is_scheduled {
                left -= self.schedule(budget, index, &running[index], left);
            }
        }
        let mut prefill = PrefillRows::default();
        self.scheduled[start..].iter().for_each(|rows| prefill.add(running[rows.index].planned, rows.rows));
        prefill
    }

    /// Gives a sequence up to `rows_max` rows, as far as the budget allows, and returns how many.
    fn schedule(&mut self, budget: &mut StepBudget<'_>, index: usize, sequence: &Sequence, rows_max: usize) -> usize {
        let capacity = budget.capacity;
        let mut rows = sequence.rows_ready().min(rows_max).min(capacity.rows_max.saturating_sub(budget.rows));
        let logit_rows_left = capacity.logit_rows_max.saturating_sub(budget.logit_rows);
        if sequence.needs_prompt_logprobs() {
            rows = rows.min(logit_rows_left);
        }
        if rows == 0 || budget.sequences == capacity.sequences_max {
            return 0;
        }
        let (logit_rows, pages) = (sequence.logit_rows(rows), capacity.pages(sequence.planned + rows));
        if logit_rows > logit_rows_left || budget.pages + pages > capacity.step_pages_max {
            return 0;
        }
        budget.rows += rows;
        budget.logit_rows += logit_rows;
        budget.pages += pages;
        budget.sequences += 1;
        self.scheduled.push(ScheduledRows { index, rows, order: (sequence.phase(), sequence.is_embedding()) });
        rows
    }
}
