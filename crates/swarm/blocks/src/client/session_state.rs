//! `SessionState`: which rows each span of a session's chain has, and what is to be sent next. Pure: events in, actions out.
//!
//! The client keeps the activations before every span. So a span can be replaced at any time: the new peer gets the rows again,
//! and the peers after it go on where they are. Peers pass rows on to each other; what they return to the client is then a copy.
//! Where a peer cannot pass rows on, the client does.
//!
//! Rows that a peer gets twice are harmless: it discards what it had from their position on.
//!
//! The client may drop rows that all peers have, to save memory. Then no span can be replaced any more: the session has to be
//! begun again from its tokens.

mod rows;
mod span;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use engine::Phase;
use types::LayerRange;

use crate::wire::{Activations, Encoding, PushKey, Returned, Run};
use rows::KeptRows;
use span::{Due, RUNS_DUE_MAX, Span};

pub(super) use span::{NewSpan, SpanId};

/// Rows of a step of the engine.
#[derive(Debug)]
struct Job {
    number: u64,
    position: usize,
    rows: usize,
    state_rows: usize,
    takes_logits: bool,
}

/// The result of a job.
#[derive(Debug, PartialEq)]
pub(super) enum JobOutput {
    /// `[state_rows, hidden]`.
    States(Vec<f32>),
    /// Of the last row, instead of its state.
    Logits(Vec<f32>),
    /// The job needs states, and the chain ends with a span that returns logits.
    NoStates,
}

/// What the owner of the state does.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    /// A reply with so many rows will be due.
    Expect {
        from: SpanId,
        run: u64,
        rows: usize,
    },
    Send {
        to: SpanId,
        run: Run,
    },
    /// The rows of a job were discarded.
    Discarded {
        job: u64,
        state_rows: usize,
    },
    /// The span does not get its rows from the one before any more.
    Unfeed {
        before: SpanId,
        span: SpanId,
    },
    Done {
        job: u64,
        output: JobOutput,
    },
    /// The span's peer did not do its part.
    Lost {
        span: SpanId,
        why: LossReason,
    },
    /// A span needs rows that were dropped.
    Unreplayable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossReason {
    Silent,
    /// What it returned has another shape, or is not finite.
    Malformed,
}

#[derive(Debug)]
pub(super) struct SessionState {
    hidden: usize,
    vocab: usize,
    encoding: Encoding,
    /// The first layer of the chain.
    first: usize,
    spans: Vec<Span>,
    /// The activations before a layer, `[rows, hidden]`.
    inputs: BTreeMap<usize, KeptRows>,
    /// What the last span has returned, by position, if that is kept.
    outputs: Option<BTreeMap<usize, Vec<f32>>>,
    /// Of the rows before the first layer.
    phases: Vec<Phase>,
    jobs: VecDeque<Job>,
    next_number: u64,
    actions: Vec<Action>,
}

impl SessionState {
    /// Of a chain that begins with layer `first`.
    pub fn new(first: usize, [hidden, vocab]: [usize; 2], encoding: Encoding) -> Self {
        Self {
            hidden,
            vocab,
            encoding,
            first,
            spans: Vec::new(),
            inputs: BTreeMap::new(),
            outputs: None,
            phases: Vec::new(),
            jobs: VecDeque::new(),
            next_number: 0,
            actions: Vec::new(),
        }
    }

    /// From now on what the last span returns is kept too, to be checked.
    pub fn keep_outputs(&mut self) {
        self.outputs.get_or_insert_default();
    }

    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether a span gets its rows from the one before.
    pub fn is_fed(&self, id: SpanId) -> bool {
        self.index(id).is_some_and(|index| self.spans[index].is_fed())
    }

    /// The number of spans that get their rows from the one before.
    pub fn fed(&self) -> usize {
        self.spans.iter().filter(|span| span.is_fed()).count()
    }

    /// The job that a run of a span is about.
    pub fn job_of(&self, id: SpanId, run: u64) -> Option<u64> {
        self.spans[self.index(id)?].due.get(&run)?.job
    }

    /// Whether a span's peer has done anything yet.
    pub fn has_replied(&self, id: SpanId) -> bool {
        self.index(id).is_some_and(|index| self.spans[index].has_replied)
    }

    /// Since when a span's peer owes a reply.
    pub fn owes_since(&self, id: SpanId) -> Option<Instant> {
        self.spans[self.index(id)?].due.values().filter_map(|due| due.since).min()
    }

    /// How long a run of a span has been due; `None` if nobody knows when it came there.
    pub fn waited(&self, id: SpanId, run: u64, now: Instant) -> Option<Duration> {
        let since = self.spans[self.index(id)?].due.get(&run)?.since?;
        Some(now.saturating_duration_since(since))
    }

    /// This process stood still: nobody is late because of that.
    pub fn postpone(&mut self, stood: Duration) {
        let due = self.spans.iter_mut().flat_map(|span| span.due.values_mut());
        due.filter_map(|due| due.since.as_mut()).for_each(|since| *since += stood);
    }

    /// Adds rows before the first layer, and returns the number of the job. What the session had from their position on is
    /// discarded, and so are the results of jobs about it. With `takes_logits`, the logits of the last row serve as well as its
    /// state, which is the only one that is needed.
    pub fn add_job(
        &mut self,
        position: usize,
        phase: Phase,
        rows: &[f32],
        state_rows: usize,
        takes_logits: bool,
    ) -> u64 {
        self.truncate(position);
        let count = rows.len() / self.hidden;
        self.inputs.entry(self.first).or_insert_with(|| KeptRows::new(self.hidden)).append(rows);
        self.phases.resize(position + count, phase);
        let number = self.number();
        self.jobs.push_back(Job { number, position, rows: count, state_rows, takes_logits });
        self.pump_all();
        number
    }

    /// Replaces spans next to each other that have these layers; at first, when there are none, all. The new ones are given in
    /// order, and `after_fed_by` is the key with which the last of them passes rows on to the span behind.
    pub fn replace(&mut self, layers: LayerRange, new: Vec<NewSpan>, after_fed_by: Option<PushKey>) {
        let is_within =
            |span: &Span| span.new.layers.start() >= layers.start() && span.new.layers.end() <= layers.end();
        let at = self.spans.iter().position(|span| span.new.layers.start() >= layers.start());
        let at = at.unwrap_or(self.spans.len());
        self.spans.retain(|span| !is_within(span));
        let count = new.len();
        if at == self.spans.len() {
            self.outputs.iter_mut().for_each(BTreeMap::clear);
        }
        // Rows after these layers that are known came from others.
        let spans: Vec<_> = new.into_iter().map(|new| Span::new(self.rows_before(new.layers.end()), new)).collect();
        self.spans.splice(at..at, spans);
        if let Some(after) = self.spans.get_mut(at + count) {
            after.new.fed_by = after_fed_by;
        }
        self.forget_coming(at + count, |_| true);
        // What stood between old spans is not needed, unless new ones meet there too.
        let boundaries: Vec<usize> = self.spans.iter().map(|span| span.new.layers.start()).collect();
        self.inputs.retain(|layer, _| *layer == self.first || boundaries.contains(layer));
        self.pump_all();
    }

    /// A span's peer returned rows.
    pub fn returned(&mut self, id: SpanId, returned: Returned) {
        let Some(index) = self.index(id) else { return };
        // A reply about rows that were discarded, or that came twice.
        let Some(due) = self.spans[index].due.remove(&returned.run) else { return };
        let states = &returned.states;
        let width = if self.spans[index].new.returns_logits { self.vocab } else { self.hidden };
        let is_whole = states.rows == due.states && states.values.len() == due.states * width;
        if !is_whole || states.values.iter().any(|value| !value.is_finite()) {
            self.actions.push(Action::Lost { span: id, why: LossReason::Malformed });
            return;
        }
        self.spans[index].ran(&due);
        self.spans[index].has_replied = true;
        if index + 1 == self.spans.len() {
            self.finish(&due, returned.states.values);
        } else if due.states > 0 {
            if !due.is_discarded {
                self.append(index, due.position, &returned.states.values);
            }
            self.passed_on(index, returned.run, due, returned.passed_on);
        }
        self.pump_all();
    }

    /// A span's peer says that it has passed rows on, or that it has not.
    fn passed_on(&mut self, index: usize, run: u64, due: Due, key: Option<PushKey>) {
        let next = &mut self.spans[index + 1];
        // Rows before them are missing if the next peer is new.
        if key.is_some() && next.new.fed_by == key && (due.is_discarded || next.sent >= due.position) {
            if !due.is_discarded {
                // The run may be older than the next peer.
                self.expect_behind(index, run, due);
                self.spans[index + 1].sent = self.spans[index + 1].sent.max(due.end());
            }
            if let Some(due) = self.spans[index + 1].due.get_mut(&run) {
                due.since = Some(Instant::now());
            }
            return;
        }
        // They went nowhere, or to a peer that has been replaced, or do not fit.
        self.forget_coming(index + 1, |lost| lost == run);
        // A peer that could not pass rows on once does not try again.
        if key.is_none() && self.spans[index + 1].is_fed() {
            self.stop_feeding(index + 1);
        }
    }

    /// Looks for replies that are late.
    pub fn check_deadlines(&mut self, now: Instant) {
        for index in 0..self.spans.len() {
            let Some(late) = self.spans[index].late(now) else { continue };
            if late.is_passed_on {
                // The rows did not arrive.
                self.send_again(index);
                self.stop_feeding(index);
            } else {
                self.actions.push(Action::Lost { span: self.spans[index].new.id, why: LossReason::Silent });
                return;
            }
        }
        self.pump_all();
    }

    fn send_again(&mut self, index: usize) {
        let span = &mut self.spans[index];
        span.sent = span.due.values().map(|due| due.position).min().unwrap_or(span.sent).min(span.sent);
        let runs = std::mem::take(&mut span.due);
        self.forget_coming(index + 1, |run| runs.contains_key(&run));
    }

    /// From now on the client sends a span its rows.
    fn stop_feeding(&mut self, index: usize) {
        let (before, span) = (self.spans[index - 1].new.id, &mut self.spans[index].new);
        span.fed_by = None;
        self.actions.push(Action::Unfeed { before, span: span.id });
    }

    /// Rows that were to come from the span before do not come: spans from this one on expect no such runs.
    fn forget_coming(&mut self, from: usize, is_lost: impl Fn(u64) -> bool) {
        for span in self.spans.iter_mut().skip(from) {
            span.due.retain(|run, due| due.since.is_some() || !is_lost(*run));
        }
    }

    fn index(&self, id: SpanId) -> Option<usize> {
        self.spans.iter().position(|span| span.new.id == id)
    }

    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn job(&self, number: Option<u64>) -> Option<&Job> {
        self.jobs.iter().find(|known| Some(known.number) == number)
    }

    /// Rows of the states of a job that is not done.
    fn state_rows(&self, job: Option<u64>) -> usize {
        self.job(job).map_or(0, |job| job.state_rows)
    }

    /// Rows of them that the last span returns.
    fn returned_rows(&self, job: Option<u64>) -> usize {
        let job = self.job(job).filter(|job| job.takes_logits || !self.ends_in_logits());
        job.map_or(0, |job| job.state_rows)
    }

    fn ends_in_logits(&self) -> bool {
        self.spans.last().is_some_and(|span| span.new.returns_logits)
    }

    fn rows_before(&self, layer: usize) -> usize {
        self.inputs.get(&layer).map_or(0, KeptRows::len)
    }

    fn truncate(&mut self, position: usize) {
        if position >= self.phases.len() {
            return;
        }
        self.inputs.values_mut().for_each(|rows| rows.truncate(position));
        self.outputs.iter_mut().for_each(|rows| drop(rows.split_off(&position)));
        self.phases.truncate(position);
        self.spans.iter_mut().for_each(|span| span.truncate(position));
        let (kept, dropped) = self.jobs.drain(..).partition(|job| job.position + job.rows <= position);
        self.jobs = kept;
        let dropped: VecDeque<Job> = dropped;
        let discarded = |Job { number, state_rows, .. }: Job| Action::Discarded { job: number, state_rows };
        self.actions.extend(dropped.into_iter().map(discarded));
    }

    /// Adds what a span returned to the input of the next one.
    fn append(&mut self, index: usize, position: usize, states: &[f32]) {
        let layer = self.spans[index].new.layers.end();
        let rows = self.inputs.entry(layer).or_insert_with(|| KeptRows::new(self.hidden));
        // Rows before them are missing only if a peer replies out of order; they are asked for again.
        if position > rows.len() {
            self.spans[index].sent = rows.len();
            return;
        }
        if let Some(more) = states.get((rows.len() - position) * self.hidden..) {
            rows.append(more);
        }
    }

    /// The last span returned what was due of a job.
    fn finish(&mut self, due: &Due, values: Vec<f32>) {
        let ends_in_logits = self.ends_in_logits();
        if let Some(outputs) = self.outputs.as_mut().filter(|_| !ends_in_logits && !due.is_discarded) {
            let rows = values.chunks_exact(self.hidden).map(<[f32]>::to_vec);
            outputs.extend((due.end() - due.states..due.end()).zip(rows));
        }
        let Some(index) = self.jobs.iter().position(|known| Some(known.number) == due.job) else { return };
        let Some(Job { number, state_rows, takes_logits, .. }) = self.jobs.remove(index) else { return };
        let output = match (self.ends_in_logits() && state_rows > 0, takes_logits) {
            (false, _) => JobOutput::States(values),
            (true, true) => JobOutput::Logits(values),
            (true, false) => JobOutput::NoStates,
        };
        self.actions.push(Action::Done { job: number, output });
    }

    fn pump_all(&mut self) {
        for index in 0..self.spans.len() {
            self.pump(index);
        }
    }

    /// Sends a span what the client has for it and its peer has not.
    fn pump(&mut self, index: usize) {
        let layers = self.spans[index].new.layers;
        let is_last = index + 1 == self.spans.len();
        loop {
            let (from, have) = (self.spans[index].sent, self.rows_before(layers.start()));
            if from >= have || self.spans[index].is_coming(from) || !self.may_send(index, from) {
                return;
            }
            if self.inputs.get(&layers.start()).is_some_and(|rows| from < rows.first()) {
                self.actions.push(Action::Unreplayable);
                return;
            }
            let Some((rows, job)) = self.chunk(from, have, self.spans[index].new.rows_max) else { return };
            let end = from + rows;
            let is_known = if is_last { job.is_none() } else { self.rows_before(layers.end()) >= end };
            self.send(index, job, from..end, is_known);
        }
    }

    /// Whether rows from a position on may be sent to a span: it and those that get their rows from it are ready for them.
    fn may_send(&self, index: usize, from: usize) -> bool {
        let (span, behind) = (&self.spans[index], &self.spans[index + 1..]);
        let fed = behind.iter().take_while(|span| span.is_fed());
        let is_ready = |span: &Span| span.due.len() < RUNS_DUE_MAX && span.is_in_order(from);
        [span].into_iter().chain(fed).all(is_ready)
    }

    /// The rows of the next run from `from` on, and the job that they are.
    fn chunk(&self, from: usize, have: usize, rows_max: usize) -> Option<(usize, Option<u64>)> {
        if let Some(job) = self.jobs.iter().find(|job| job.position == from) {
            return (from + job.rows <= have).then_some((job.rows, Some(job.number)));
        }
        let phase = self.phases[from];
        let is_same = |row: &usize| self.phases[*row] == phase && self.jobs.iter().all(|job| job.position != *row);
        Some((1 + (from + 1..have.min(from + rows_max)).take_while(is_same).count(), None))
    }

    /// Every time rows are sent they are another run: a reply tells which of them it is about.
    fn send(&mut self, index: usize, job: Option<u64>, rows: std::ops::Range<usize>, is_silent: bool) {
        let (run, count) = (self.number(), rows.len());
        let is_last = index + 1 == self.spans.len();
        // Other spans pass it on, possibly to one that takes the place of a last one that returned logits.
        let state_rows = if is_last { self.returned_rows(job) } else { self.state_rows(job) };
        let states = match (is_silent, is_last) {
            (true, _) => 0,
            (false, true) => state_rows,
            (false, false) => count,
        };
        let layer = self.spans[index].new.layers.start();
        // `pump` sends what is there.
        let Some(values) = self.inputs.get(&layer).and_then(|kept| kept.get(rows.clone())) else { return };
        let values = values.to_vec();
        let activations = Activations { encoding: self.encoding, rows: count, values };
        let phase = self.phases[rows.start];
        let message = Run { run, position: rows.start, phase, state_rows, is_silent, activations };
        let since = Some(Instant::now());
        let due =
            Due { job, position: rows.start, rows: count, states, since, is_passed_on: false, is_discarded: false };
        let span = &mut self.spans[index];
        span.due.insert(run, due);
        span.sent = rows.end;
        self.actions.push(Action::Expect { from: span.new.id, run, rows: states });
        self.actions.push(Action::Send { to: span.new.id, run: message });
        if !is_silent {
            self.expect_behind(index, run, due);
        }
    }

    /// The spans behind one get the rows of a run from one another: their replies will be due.
    fn expect_behind(&mut self, index: usize, run: u64, due: Due) {
        let state_rows = self.state_rows(due.job);
        let last = self.spans.len() - 1;
        for (index, span) in self.spans.iter_mut().enumerate().skip(index + 1).take_while(|(_, span)| span.is_fed()) {
            let states = if index == last { state_rows } else { due.rows };
            // It has replied already: what is not known behind it comes from the client.
            if span.sent >= due.end() && !span.due.contains_key(&run) {
                return;
            }
            let due = Due { states, since: None, is_passed_on: true, ..due };
            span.due.entry(run).or_insert(due);
            self.actions.push(Action::Expect { from: span.new.id, run, rows: states });
        }
    }
}
