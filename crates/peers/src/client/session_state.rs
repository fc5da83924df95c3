//! `SessionState`: which rows each span of a session's chain has, and what is to be sent next. Pure: events in, actions out.
//!
//! The client keeps the activations before every span. So a span can be replaced at any time: the new peer gets the rows again,
//! and the peers after it go on where they are. Peers pass rows on to each other; what they return to the client is then a copy.
//! Where a peer cannot pass rows on, the client does.
//!
//! Rows that a peer gets twice are harmless: it discards what it had from their position on.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use engine::Phase;
use types::LayerRange;

use crate::wire::{Activations, Encoding, PushKey, Returned, Run};

/// Names a span, also after it has left the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SpanId(pub u64);

/// A span of the chain, with an open session at its peer.
#[derive(Clone, Debug)]
pub(super) struct NewSpan {
    pub id: SpanId,
    pub layers: LayerRange,
    /// Rows of one run.
    pub rows_max: usize,
    /// With which key the span before passes its rows on to it, if it does.
    pub fed_by: Option<PushKey>,
    /// How long a run of so many rows may take: a fixed part, and one for each row.
    pub wait: Duration,
    pub wait_per_row: Duration,
}

#[derive(Debug)]
struct Span {
    new: NewSpan,
    /// Rows that its peer has, or that are on their way to it.
    sent: usize,
    /// Runs whose reply is due.
    due: BTreeMap<u64, Due>,
}

#[derive(Clone, Copy, Debug)]
struct Due {
    position: usize,
    rows: usize,
    /// Rows of the reply.
    states: usize,
    /// `None` while the rows have not left the span before.
    since: Option<Instant>,
    is_passed_on: bool,
}

/// Rows of a step of the engine.
#[derive(Debug)]
struct Job {
    run: u64,
    position: usize,
    rows: usize,
    state_rows: usize,
}

/// What the owner of the state does.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Send {
        to: SpanId,
        run: Run,
    },
    /// The rows of a job were discarded.
    Discarded {
        run: u64,
        state_rows: usize,
    },
    /// The span does not get its rows from the one before any more.
    Unfeed {
        before: SpanId,
    },
    /// The states of a job.
    Done {
        run: u64,
        states: Vec<f32>,
    },
    /// The span's peer did not do its part.
    Lost {
        span: SpanId,
        why: LossReason,
    },
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
    encoding: Encoding,
    /// The first layer of the chain.
    first: usize,
    spans: Vec<Span>,
    /// The activations before a layer, `[rows, hidden]`.
    inputs: BTreeMap<usize, Vec<f32>>,
    /// Of the rows before the first layer.
    phases: Vec<Phase>,
    jobs: VecDeque<Job>,
    next_run: u64,
    actions: Vec<Action>,
}

impl SessionState {
    /// Of a chain that begins with layer `first`.
    pub fn new(first: usize, hidden: usize, encoding: Encoding) -> Self {
        Self {
            hidden,
            encoding,
            first,
            spans: Vec::new(),
            inputs: BTreeMap::new(),
            phases: Vec::new(),
            jobs: VecDeque::new(),
            next_run: 0,
            actions: Vec::new(),
        }
    }

    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Whether a span gets its rows from the one before.
    pub fn is_fed(&self, id: SpanId) -> bool {
        self.index(id).is_some_and(|index| self.spans[index].new.fed_by.is_some())
    }

    /// The number of spans that get their rows from the one before.
    pub fn fed(&self) -> usize {
        self.spans.iter().filter(|span| span.new.fed_by.is_some()).count()
    }

    /// The first rows before a layer, if the client has them, and their phases.
    pub fn rows_before_layer(&self, layer: usize, rows: usize) -> Option<(&[f32], &[Phase])> {
        let values = self.inputs.get(&layer)?.get(..rows * self.hidden)?;
        Some((values, self.phases.get(..rows)?))
    }

    /// Adds rows before the first layer, and returns the number of the job. What the session had from their position on is
    /// discarded, and so are the results of jobs about it.
    pub fn add_job(&mut self, position: usize, phase: Phase, rows: &[f32], state_rows: usize) -> u64 {
        self.truncate(position);
        let count = rows.len() / self.hidden;
        let inputs = self.inputs.entry(self.first).or_default();
        inputs.extend_from_slice(rows);
        self.phases.resize(position + count, phase);
        let run = self.number();
        self.jobs.push_back(Job { run, position, rows: count, state_rows });
        self.pump_all();
        run
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
        let spans = new.into_iter().map(|new| Span { new, sent: 0, due: BTreeMap::new() });
        self.spans.splice(at..at, spans);
        if let Some(after) = self.spans.get_mut(at + count) {
            after.new.fed_by = after_fed_by;
        }
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
        let is_whole = states.rows == due.states && states.values.len() == due.states * self.hidden;
        if !is_whole || states.values.iter().any(|value| !value.is_finite()) {
            self.actions.push(Action::Lost { span: id, why: LossReason::Malformed });
            return;
        }
        let end = due.position + due.rows;
        self.spans[index].sent = self.spans[index].sent.max(end);
        if index + 1 == self.spans.len() {
            self.finish(returned.run, returned.states.values);
        } else if due.states > 0 {
            self.append(index, due.position, &returned.states.values);
            let next = &mut self.spans[index + 1];
            match returned.passed_on {
                Some(key) if next.new.fed_by == Some(key) => {
                    next.sent = next.sent.max(end);
                    if let Some(due) = next.due.get_mut(&returned.run) {
                        due.since = Some(Instant::now());
                    }
                }
                // They went to a peer that has been replaced.
                Some(_) => drop(next.due.remove(&returned.run)),
                // A peer that could not pass rows on once does not try again.
                None => next.new.fed_by = None,
            }
        }
        self.pump_all();
    }

    /// Looks for replies that are late.
    pub fn check_deadlines(&mut self, now: Instant) {
        for index in 0..self.spans.len() {
            let Span { new, due, .. } = &self.spans[index];
            let limit = |due: &Due| new.wait + new.wait_per_row * due.rows as u32;
            let is_late = |due: &Due| due.since.is_some_and(|since| now.saturating_duration_since(since) > limit(due));
            let Some(late) = due.values().find(|due| is_late(due)).copied() else { continue };
            if late.is_passed_on {
                self.stop_feeding(index);
            } else {
                self.actions.push(Action::Lost { span: new.id, why: LossReason::Silent });
                return;
            }
        }
        self.pump_all();
    }

    /// Rows that were passed on to a span did not arrive: from now on the client sends them.
    fn stop_feeding(&mut self, index: usize) {
        let before = self.spans[index - 1].new.id;
        let span = &mut self.spans[index];
        span.new.fed_by = None;
        span.sent = span.due.values().map(|due| due.position).min().unwrap_or(span.sent).min(span.sent);
        span.due.clear();
        self.actions.push(Action::Unfeed { before });
    }

    fn index(&self, id: SpanId) -> Option<usize> {
        self.spans.iter().position(|span| span.new.id == id)
    }

    fn number(&mut self) -> u64 {
        self.next_run += 1;
        self.next_run
    }

    fn rows_before(&self, layer: usize) -> usize {
        self.inputs.get(&layer).map_or(0, |values| values.len() / self.hidden)
    }

    fn truncate(&mut self, position: usize) {
        if position >= self.phases.len() {
            return;
        }
        let values = position * self.hidden;
        self.inputs.values_mut().for_each(|rows| rows.truncate(values));
        self.phases.truncate(position);
        for span in &mut self.spans {
            span.sent = span.sent.min(position);
            span.due.retain(|_, due| due.position + due.rows <= position);
        }
        let (kept, dropped) = self.jobs.drain(..).partition(|job| job.position + job.rows <= position);
        self.jobs = kept;
        let dropped: VecDeque<Job> = dropped;
        let discarded = |Job { run, state_rows, .. }: Job| Action::Discarded { run, state_rows };
        self.actions.extend(dropped.into_iter().map(discarded));
    }

    /// Adds what a span returned to the input of the next one.
    fn append(&mut self, index: usize, position: usize, states: &[f32]) {
        let rows = self.inputs.entry(self.spans[index].new.layers.end()).or_default();
        let start = position * self.hidden;
        // Rows before them are missing only if a peer replies out of order; they are asked for again.
        if start > rows.len() {
            self.spans[index].sent = rows.len() / self.hidden;
            return;
        }
        let known = rows.len() - start;
        if let Some(more) = states.get(known..) {
            rows.extend_from_slice(more);
        }
    }

    fn finish(&mut self, run: u64, states: Vec<f32>) {
        let Some(index) = self.jobs.iter().position(|job| job.run == run) else { return };
        self.jobs.remove(index);
        self.actions.push(Action::Done { run, states });
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
        // Rows that are on their way from the span before.
        let is_coming = |span: &Span, position: usize| {
            span.new.fed_by.is_some() && span.due.values().any(|due| due.is_passed_on && due.position == position)
        };
        loop {
            let (from, have) = (self.spans[index].sent, self.rows_before(layers.start()));
            if from >= have || is_coming(&self.spans[index], from) {
                return;
            }
            let Some((rows, job)) = self.chunk(from, have, self.spans[index].new.rows_max) else { return };
            let end = from + rows;
            let is_known = if is_last { job.is_none() } else { self.rows_before(layers.end()) >= end };
            let run = job.map_or_else(|| self.number(), |(run, _)| run);
            let state_rows = job.map_or(0, |(_, state_rows)| state_rows);
            self.send(index, run, from..end, state_rows, is_known);
        }
    }

    /// The rows of the next run from `from` on, and the job that they are.
    fn chunk(&self, from: usize, have: usize, rows_max: usize) -> Option<(usize, Option<(u64, usize)>)> {
        if let Some(job) = self.jobs.iter().find(|job| job.position == from) {
            return (from + job.rows <= have).then_some((job.rows, Some((job.run, job.state_rows))));
        }
        let phase = self.phases[from];
        let is_same = |row: &usize| self.phases[*row] == phase && self.jobs.iter().all(|job| job.position != *row);
        Some((1 + (from + 1..have.min(from + rows_max)).take_while(is_same).count(), None))
    }

    fn send(&mut self, index: usize, run: u64, rows: std::ops::Range<usize>, state_rows: usize, is_silent: bool) {
        let (now, hidden) = (Instant::now(), self.hidden);
        let count = rows.len();
        let is_last = |index: usize| index + 1 == self.spans.len();
        let states = match (is_silent, is_last(index)) {
            (true, _) => 0,
            (false, true) => state_rows,
            (false, false) => count,
        };
        let layer = self.spans[index].new.layers.start();
        let values = self.inputs[&layer][rows.start * hidden..rows.end * hidden].to_vec();
        let activations = Activations { encoding: self.encoding, rows: count, values };
        let phase = self.phases[rows.start];
        let message = Run { run, position: rows.start, phase, state_rows, is_silent, activations };
        let due = Due { position: rows.start, rows: count, states, since: Some(now), is_passed_on: false };
        let span = &mut self.spans[index];
        span.due.insert(run, due);
        span.sent = rows.end;
        self.actions.push(Action::Send { to: span.new.id, run: message });
        // The spans behind get the rows from one another.
        let mut next = index + 1;
        while !is_silent && self.spans.get(next).is_some_and(|span| span.new.fed_by.is_some()) {
            let states = if next + 1 == self.spans.len() { state_rows } else { count };
            let due = Due { states, since: None, is_passed_on: true, ..due };
            self.spans[next].due.insert(run, due);
            next += 1;
        }
    }
}
