//! A chain of stages in one process. A stage runs nothing before it must: calls wait in a queue, in their order, until a step
//! that was submitted after them is collected. So the coordinator is ahead of the stages by the whole depth.

use std::collections::VecDeque;

use engine::{
    Capacity, CoordinatorStage, Executor, ExecutorError, OpenedSession, PageHash, Prefix, RequestedOutput, Stage,
    StepOutput, StepPlan,
};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, LoadOptions, ModelPart};
use types::{LayerRange, SessionId};

pub struct Chain {
    coordinator: CoordinatorStage<CpuBackend>,
    stages: Vec<Box<dyn Executor>>,
    calls: VecDeque<Call>,
    /// The plans of the steps in flight.
    plans: VecDeque<StepPlan>,
}

/// A call that the stages have not seen, with the result of the coordinator.
enum Call {
    Open { tokens_max: usize, pages: Vec<PageHash>, reuse_max: usize, opened: OpenedSession },
    Truncate { session: SessionId, tokens: usize, kept: usize },
    Close(SessionId),
    Step(StepPlan),
}

impl Chain {
    /// `split`: how many layers the coordinator and each stage have.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions, split: &[u32]) -> Self {
        let mut start = split[0];
        let stage = |&count: &u32| {
            let layers = LayerRange::new(start, start + count).unwrap();
            start += count;
            local_stage(checkpoint, options, layers)
        };
        let stages = split[1..].iter().map(stage).collect();
        assert_eq!(start as usize, checkpoint.description().layers.len());
        Self::new(checkpoint, options, split[0] as usize, stages)
    }

    /// A coordinator with its first layers, and any stages for the rest.
    pub fn new(checkpoint: &Checkpoint, options: &LoadOptions, layers: usize, stages: Vec<Box<dyn Executor>>) -> Self {
        let coordinator =
            CoordinatorStage::load(backend(), checkpoint, options, ModelPart::coordinator(layers), &mut |_| {})
                .unwrap();
        Self { coordinator, stages, calls: VecDeque::new(), plans: VecDeque::new() }
    }

    /// Runs the calls up to the oldest step. Returns the states of its last stage.
    fn advance(&mut self) -> Vec<f32> {
        loop {
            match self.calls.pop_front().expect("a step is in flight") {
                Call::Open { tokens_max, pages, reuse_max, opened } => {
                    // Tokens never leave the coordinator.
                    let prefix = Prefix { tokens: &[], pages: &pages, reuse_max };
                    self.stages
                        .iter_mut()
                        .for_each(|stage| assert_eq!(stage.open(tokens_max, prefix).unwrap(), opened));
                }
                Call::Truncate { session, tokens, kept } => {
                    self.stages.iter_mut().for_each(|stage| assert_eq!(stage.truncate(session, tokens).unwrap(), kept));
                }
                Call::Close(session) => self.stages.iter_mut().for_each(|stage| stage.close(session)),
                Call::Step(plan) => return self.step(&plan),
            }
        }
    }

    /// Runs a step through all stages: `plan` is that of the first one.
    fn step(&mut self, plan: &StepPlan) -> Vec<f32> {
        let wanted = self.plans.front().unwrap();
        let (mut states, mut output) = (plan.activations().to_vec(), StepOutput::new());
        let last = self.stages.len() - 1;
        for (index, stage) in self.stages.iter_mut().enumerate() {
            let mut next = StepPlan::new();
            for (entry, wanted) in plan.entries().iter().zip(wanted.entries()) {
                let rows = if index == last { wanted.state_rows().len() } else { entry.rows() };
                let requested = if rows > 0 { RequestedOutput::States { rows } } else { RequestedOutput::Nothing };
                next.push_rows(entry.session, entry.phase, entry.position, entry.rows(), requested);
            }
            next.activations_mut().append(&mut states);
            stage.submit(&next).unwrap();
            stage.collect(&mut output).unwrap();
            std::mem::swap(&mut states, &mut output.states);
        }
        states
    }
}

/// A stage in this process.
pub fn local_stage(checkpoint: &Checkpoint, options: &LoadOptions, layers: LayerRange) -> Box<dyn Executor> {
    Box::new(Stage::load(backend(), checkpoint, options, layers, &mut |_| {}).unwrap())
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

impl Executor for Chain {
    fn depth(&self) -> usize {
        self.stages.len() + usize::from(self.coordinator.stage().layers().is_some())
    }

    fn capacity(&self) -> Capacity {
        self.coordinator.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.coordinator.open(tokens_max, prefix)?;
        let (pages, reuse_max) = (prefix.pages.to_vec(), prefix.reuse_max);
        self.calls.push_back(Call::Open { tokens_max, pages, reuse_max, opened });
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.coordinator.truncate(session, tokens)?;
        self.calls.push_back(Call::Truncate { session, tokens, kept });
        Ok(kept)
    }

    fn close(&mut self, session: SessionId) {
        self.coordinator.close(session);
        self.calls.push_back(Call::Close(session));
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.plans.len() == self.depth() {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        let mut first = StepPlan::new();
        for entry in plan.entries() {
            let (rows, requested) = (entry.rows(), RequestedOutput::Nothing);
            first.push_rows(entry.session, entry.phase, entry.position, rows, requested);
        }
        self.coordinator.start(plan, first.activations_mut())?;
        self.calls.push_back(Call::Step(first));
        self.plans.push_back(plan.clone());
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        if self.plans.is_empty() {
            return Err(ExecutorError::NoStepInFlight);
        }
        let states = self.advance();
        let plan = self.plans.pop_front().unwrap();
        self.coordinator.finish(&plan, &states, output)
    }
}
