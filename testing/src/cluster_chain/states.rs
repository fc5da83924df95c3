//! Sequences of activations through an executor of layers: together and in chunks, as prompts and as answers, computed again
//! after a truncation, and with several steps in flight.

use std::collections::VecDeque;
use std::path::Path;

use engine::{CoordinatorStage, Executor, ExecutorError, Phase, Prefix, RequestedOutput, Stage, StepOutput, StepPlan};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, ModelPart};
use types::{LayerRange, SessionId};

use super::{OPTIONS, prompt};

/// The last rows of each sequence, which are decoded.
const DECODED: usize = 5;
/// In the middle of a page.
const KEPT: usize = 9;

pub fn range(start: usize, end: usize) -> LayerRange {
    LayerRange::new(start as u32, end as u32).unwrap()
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

/// The layers in this process.
pub fn stage(model: &Path, layers: LayerRange) -> Stage<CpuBackend> {
    Stage::load(backend(), &Checkpoint::open(model).unwrap(), &OPTIONS, layers, &mut |_| {}).unwrap()
}

/// What comes out of the layers before `layers`, for some prompts. `width` is that of a row.
pub struct Activations {
    pub width: usize,
    sequences: Vec<Vec<f32>>,
}

impl Activations {
    pub fn before(model: &Path, layers: LayerRange) -> Self {
        let checkpoint = Checkpoint::open(model).unwrap();
        let part = ModelPart::coordinator(layers.start());
        let mut before = CoordinatorStage::load(backend(), &checkpoint, &OPTIONS, part, &mut |_| {}).unwrap();
        let rows_of = |(length, seed): (usize, u32)| {
            let (mut plan, mut rows, tokens) = (StepPlan::new(), Vec::new(), prompt(model, length, seed));
            let session = before.open(length, Prefix::NONE).unwrap().session;
            plan.push(session, Phase::Prefill, 0, &tokens, RequestedOutput::Nothing);
            before.start(&plan, &mut rows).unwrap();
            before.close(session);
            rows
        };
        let sequences = [(50, 1), (17, 2), (90, 3), (6, 4)].map(rows_of).to_vec();
        Self { width: checkpoint.description().hidden, sequences }
    }

    /// A step of the rows of a sequence from `position` on.
    pub fn plan(&self, sequence: usize, session: SessionId, position: usize, rows: usize) -> StepPlan {
        let mut plan = StepPlan::new();
        plan.push_rows(session, Phase::Prefill, position, rows, RequestedOutput::States { rows });
        let values = &self.sequences[sequence][position * self.width..(position + rows) * self.width];
        plan.activations_mut().extend_from_slice(values);
        plan
    }

    fn rows(&self, sequence: usize) -> usize {
        self.sequences[sequence].len() / self.width
    }
}

/// The states of all rows, computed in several ways.
pub fn states(executor: &mut impl Executor, activations: &Activations) -> Vec<Vec<f32>> {
    let mut all = in_flight(executor, activations);
    let mut batch = Batch::open(executor, activations);
    batch.run();
    all.append(&mut batch.states.clone());
    batch.truncate();
    batch.run();
    all.append(&mut batch.states);
    batch.close();
    assert_eq!(executor.capacity().pages_free, executor.capacity().pages_total, "pages are left behind");
    all
}

/// Whole sequences, one in each step, as many steps at once as the executor takes.
fn in_flight(executor: &mut impl Executor, activations: &Activations) -> Vec<Vec<f32>> {
    let (mut waiting, mut found, mut output) = (VecDeque::new(), Vec::new(), StepOutput::new());
    let count = activations.sequences.len();
    let mut next = 0;
    while found.len() < count {
        if next < count && waiting.len() < executor.depth() {
            let session = executor.open(OPTIONS.limits.positions, Prefix::NONE).unwrap().session;
            executor.submit(&activations.plan(next, session, 0, activations.rows(next))).unwrap();
            waiting.push_back(session);
            next += 1;
            continue;
        }
        executor.collect(&mut output).unwrap();
        found.push(output.states.clone());
        executor.close(waiting.pop_front().unwrap());
    }
    found
}

/// All sequences together.
struct Batch<'a, E: Executor> {
    executor: &'a mut E,
    activations: &'a Activations,
    sessions: Vec<SessionId>,
    computed: Vec<usize>,
    states: Vec<Vec<f32>>,
}

impl<'a, E: Executor> Batch<'a, E> {
    fn open(executor: &'a mut E, activations: &'a Activations) -> Self {
        let count = activations.sequences.len();
        let mut open = || executor.open(OPTIONS.limits.positions, Prefix::NONE).unwrap().session;
        let sessions = (0..count).map(|_| open()).collect();
        Self { executor, activations, sessions, computed: vec![0; count], states: vec![Vec::new(); count] }
    }

    /// Prompts in chunks of other sizes, then answers row by row.
    fn next(&self, sequence: usize) -> Option<(Phase, usize)> {
        match self.activations.rows(sequence) - self.computed[sequence] {
            0 => None,
            left if left <= DECODED => Some((Phase::Decode, 1)),
            left => Some((Phase::Prefill, (7 + 6 * sequence).min(left - DECODED))),
        }
    }

    fn run(&mut self) {
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        loop {
            let entries = (0..self.sessions.len()).filter_map(|index| Some((self.next(index)?, index)));
            let mut entries: Vec<_> = entries.collect();
            entries.sort();
            if entries.is_empty() {
                return;
            }
            plan.clear();
            for &((phase, rows), index) in &entries {
                let (position, requested) = (self.computed[index], RequestedOutput::States { rows });
                plan.push_rows(self.sessions[index], phase, position, rows, requested);
                let values = self.activations.plan(index, self.sessions[index], position, rows);
                plan.activations_mut().extend_from_slice(values.activations());
            }
            self.executor.submit(&plan).unwrap();
            self.executor.collect(&mut output).unwrap();
            let mut states = output.states.as_slice();
            for ((_, rows), index) in entries {
                let (own, rest) = states.split_at(rows * self.activations.width);
                self.states[index].extend_from_slice(own);
                self.computed[index] += rows;
                states = rest;
            }
            assert!(states.is_empty());
        }
    }

    fn truncate(&mut self) {
        for index in 0..self.sessions.len() {
            let kept = KEPT.min(self.computed[index]);
            assert_eq!(self.executor.truncate(self.sessions[index], KEPT).unwrap(), kept);
            self.computed[index] = kept;
            self.states[index].truncate(kept * self.activations.width);
        }
    }

    fn close(self) {
        self.sessions.iter().for_each(|&session| self.executor.close(session));
    }
}

/// Opens a session and runs one step.
pub fn try_step(executor: &mut impl Executor, activations: &Activations) -> Result<Vec<f32>, ExecutorError> {
    let mut output = StepOutput::new();
    let session = executor.open(OPTIONS.limits.positions, Prefix::NONE)?.session;
    executor.submit(&activations.plan(0, session, 0, 20))?;
    executor.collect(&mut output)?;
    executor.close(session);
    Ok(output.states)
}
