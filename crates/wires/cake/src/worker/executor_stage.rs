//! `ExecutorStage`: a [`CakeStage`] on an [`Executor`] of a range of layers, one process or a group of ranks.
//!
//! A thread owns the executor. The work that waits for it, of all connections, runs in one step. Prompts that are longer
//! than a step run in chunks, and tokens of other sequences are not held up by them.

use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use engine::{Executor, ExecutorError, Phase, Prefix, RequestedOutput, StepOutput, StepPlan};
use model::Checkpoint;
use types::{LayerRange, SessionId};

use super::stage::{CakeLoader, CakeSession, CakeStage, CakeStageError};

/// Loads an executor for a range of layers. It gets plans with activations and returns states.
pub type LoadExecutor = dyn Fn(&Checkpoint, LayerRange) -> Result<Box<dyn Executor>, CakeStageError> + Send + Sync;

pub struct ExecutorLoader {
    load: Box<LoadExecutor>,
    positions_max: Box<dyn Fn(&Checkpoint) -> usize + Send + Sync>,
}

impl ExecutorLoader {
    /// `positions_max`: tokens of the longest session.
    pub fn new(load: Box<LoadExecutor>, positions_max: Box<dyn Fn(&Checkpoint) -> usize + Send + Sync>) -> Self {
        Self { load, positions_max }
    }
}

impl CakeLoader for ExecutorLoader {
    fn load(&self, checkpoint: &Checkpoint, layers: LayerRange) -> Result<Arc<dyn CakeStage>, CakeStageError> {
        let executor = (self.load)(checkpoint, layers)?;
        Ok(Arc::new(ExecutorStage::new(executor, checkpoint.description().hidden)?))
    }

    fn positions_max(&self, checkpoint: &Checkpoint) -> usize {
        (self.positions_max)(checkpoint)
    }
}

/// Its sessions are dropped before it is.
struct ExecutorStage {
    /// `None` only while it is dropped.
    calls: Mutex<Option<Sender<Call>>>,
    thread: Option<JoinHandle<()>>,
}

struct ExecutorSession {
    calls: Sender<Call>,
    session: SessionId,
    computed: usize,
    hidden: usize,
}

enum Call {
    Open { reply: SyncSender<Result<ExecutorSession, CakeStageError>>, calls: Sender<Call> },
    Truncate { session: SessionId, tokens: usize, reply: SyncSender<Result<(), CakeStageError>> },
    Close(SessionId),
    Run(Run),
}

/// Rows of a sequence to run.
struct Run {
    session: SessionId,
    phase: Phase,
    position: usize,
    /// `[rows, hidden]`
    activations: Vec<f32>,
    /// Of the rows that have run.
    states: Vec<f32>,
    reply: SyncSender<Result<Vec<f32>, CakeStageError>>,
}

impl ExecutorStage {
    fn new(executor: Box<dyn Executor>, hidden: usize) -> Result<Self, CakeStageError> {
        let (calls, received) = channel();
        let runner = Runner { executor, hidden, received, waiting: Vec::new(), output: StepOutput::new() };
        let thread = thread::Builder::new()
            .name("consort-layers".to_owned())
            .spawn(move || runner.run())
            .map_err(|error| CakeStageError(format!("start a thread: {error}")))?;
        Ok(Self { calls: Mutex::new(Some(calls)), thread: Some(thread) })
    }
}

impl Drop for ExecutorStage {
    /// Waits until the thread has freed the weights.
    fn drop(&mut self) {
        *self.calls.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl CakeStage for ExecutorStage {
    fn open(&self) -> Result<Box<dyn CakeSession>, CakeStageError> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(ended)?;
        let (reply, opened) = sync_channel(1);
        call(&calls, Call::Open { reply, calls: calls.clone() }, &opened).map(|session| Box::new(session) as _)
    }
}

impl CakeSession for ExecutorSession {
    fn forward(&mut self, position: usize, activations: &mut Vec<f32>) -> Result<(), CakeStageError> {
        if position < self.computed {
            let (reply, truncated) = sync_channel(1);
            let Self { session, .. } = *self;
            call(&self.calls, Call::Truncate { session, tokens: position, reply }, &truncated)?;
        }
        let rows = activations.len() / self.hidden;
        // The protocol does not say whether a row is of a prompt: a generated token comes alone.
        let phase = if rows == 1 && position > 0 { Phase::Decode } else { Phase::Prefill };
        let (reply, done) = sync_channel(1);
        let activations_taken = std::mem::take(activations);
        let states = Vec::with_capacity(activations_taken.len());
        let run = Run { session: self.session, phase, position, activations: activations_taken, states, reply };
        *activations = call(&self.calls, Call::Run(run), &done)?;
        self.computed = position + rows;
        Ok(())
    }
}

impl Drop for ExecutorSession {
    fn drop(&mut self) {
        // If the thread has ended, so have its sessions.
        let _ = self.calls.send(Call::Close(self.session));
    }
}

fn call<T>(calls: &Sender<Call>, call: Call, reply: &Receiver<Result<T, CakeStageError>>) -> Result<T, CakeStageError> {
    calls.send(call).map_err(|_| ended())?;
    reply.recv().map_err(|_| ended())?
}

fn ended() -> CakeStageError {
    CakeStageError("the thread of the layers has ended".to_owned())
}

impl Run {
    fn rows_left(&self, hidden: usize) -> usize {
        (self.activations.len() - self.states.len()) / hidden
    }

    /// The position of the first row that has not run.
    fn at(&self, hidden: usize) -> usize {
        self.position + self.states.len() / hidden
    }
}

/// What the thread owns.
struct Runner {
    executor: Box<dyn Executor>,
    hidden: usize,
    received: Receiver<Call>,
    waiting: Vec<Run>,
    output: StepOutput,
}

impl Runner {
    fn run(mut self) {
        loop {
            if self.waiting.is_empty() {
                let Ok(call) = self.received.recv() else { return };
                self.take(call);
            }
            while let Ok(call) = self.received.try_recv() {
                self.take(call);
            }
            self.step();
        }
    }

    /// Whoever waits for a reply may be gone, so errors of sending one are ignored.
    fn take(&mut self, call: Call) {
        match call {
            Call::Open { reply, calls } => {
                let opened = self.executor.open(self.executor.capacity().tokens_max(), Prefix::NONE);
                let session = opened.map(|opened| ExecutorSession {
                    calls,
                    session: opened.session,
                    computed: 0,
                    hidden: self.hidden,
                });
                let _ = reply.send(session.map_err(stage_error));
            }
            Call::Truncate { session, tokens, reply } => {
                let kept = self.executor.truncate(session, tokens).map_err(stage_error);
                let is_exact = |kept| {
                    let why = || CakeStageError(format!("{kept} tokens remain of {tokens}"));
                    (kept == tokens).then_some(()).ok_or_else(why)
                };
                let _ = reply.send(kept.and_then(is_exact));
            }
            Call::Close(session) => self.executor.close(session),
            Call::Run(run) => self.waiting.push(run),
        }
    }

    /// Runs a step of what waits. If it cannot run, its sequences are run one by one, so that each gets its own error.
    fn step(&mut self) {
        // Rows of generated tokens come first, also in the plan.
        self.waiting.sort_by_key(|run| run.phase);
        let chosen = self.choose();
        if chosen.is_empty() {
            return;
        }
        if let Err(error) = self.run_chosen(&chosen) {
            if let [alone] = chosen[..] {
                self.fail(alone.run, error);
            } else {
                let alone = chosen.iter().map(|chosen| self.run_chosen(&[*chosen]).err());
                let errors: Vec<_> = alone.collect();
                let failed = chosen.iter().zip(errors).rev().filter_map(|(chosen, error)| Some((chosen.run, error?)));
                failed.for_each(|(run, error)| self.fail(run, error));
            }
        }
        let hidden = self.hidden;
        for run in self.waiting.extract_if(.., |run| run.rows_left(hidden) == 0) {
            let _ = run.reply.send(Ok(run.states));
        }
    }

    /// The runs of the next step, and how many rows of each: as many as fit.
    fn choose(&self) -> Vec<Chosen> {
        let capacity = self.executor.capacity();
        let (mut rows_left, mut pages_left) = (capacity.rows_max, capacity.step_pages_max);
        let mut chosen = Vec::new();
        for (run, waiting) in self.waiting.iter().enumerate().take(capacity.sequences_max) {
            let rows = waiting.rows_left(self.hidden).min(rows_left);
            let pages = capacity.pages(waiting.at(self.hidden) + rows);
            if rows == 0 || (pages > pages_left && !chosen.is_empty()) {
                break;
            }
            chosen.push(Chosen { run, rows });
            rows_left -= rows;
            pages_left = pages_left.saturating_sub(pages);
        }
        chosen
    }

    fn run_chosen(&mut self, chosen: &[Chosen]) -> Result<(), ExecutorError> {
        let (mut plan, hidden) = (StepPlan::new(), self.hidden);
        for &Chosen { run, rows } in chosen {
            let run = &self.waiting[run];
            plan.push_rows(run.session, run.phase, run.at(hidden), rows, RequestedOutput::States { rows });
            let start = run.states.len();
            plan.activations_mut().extend_from_slice(&run.activations[start..start + rows * hidden]);
        }
        self.executor.submit(&plan)?;
        self.executor.collect(&mut self.output)?;
        let mut states = &self.output.states[..];
        let short = || ExecutorError::Lost { why: "the layers returned too few states".into() };
        for &Chosen { run, rows } in chosen {
            let (own, rest) = states.split_at_checked(rows * hidden).ok_or_else(short)?;
            self.waiting[run].states.extend_from_slice(own);
            states = rest;
        }
        Ok(())
    }

    fn fail(&mut self, run: usize, error: ExecutorError) {
        let run = self.waiting.remove(run);
        let _ = run.reply.send(Err(stage_error(error)));
    }
}

/// An entry of a step: rows of a run that waits, by its place.
#[derive(Clone, Copy)]
struct Chosen {
    run: usize,
    rows: usize,
}

fn stage_error(error: ExecutorError) -> CakeStageError {
    CakeStageError(error.to_string())
}
