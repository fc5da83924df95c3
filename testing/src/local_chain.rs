//! A chain of stages in one process. A stage runs nothing before it must: calls wait in a queue, in their order, until a step
//! that was submitted after them is collected. So the coordinator is ahead of the stages by the whole depth.

use std::collections::VecDeque;

use engine::{
    Capacity, CoordinatorStage, EmbeddingAndHead, EntryWithoutStates, Executor, ExecutorError, OpenedSession, PageHash,
    Prefix, RequestedOutput, Stage, StepOutput, StepPlan,
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
    head_at_end: Option<HeadAtEnd>,
}

/// A head at the end of a chain: the coordinator gets logits instead of states.
pub struct HeadAtEnd {
    pub head: EmbeddingAndHead<CpuBackend>,
    /// For whose sessions.
    pub is_for: fn(SessionId) -> bool,
}

impl HeadAtEnd {
    /// Takes the states of entries.
    fn take(&mut self, plan: &StepPlan, states: &mut [f32]) -> Vec<EntryWithoutStates> {
        let (mut without, mut rest) = (Vec::new(), states);
        for (index, entry) in plan.entries().iter().enumerate() {
            let (own, others) = rest.split_at_mut(entry.state_rows().len() * self.head.width());
            rest = others;
            if !own.is_empty() && (self.is_for)(entry.session) {
                let logits = entry.takes_logits().then(|| self.head.logits(own).unwrap());
                without.push(EntryWithoutStates { entry: index, logits });
                own.fill(0.0);
            }
        }
        without
    }
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
        Self { coordinator, stages, calls: VecDeque::new(), plans: VecDeque::new(), head_at_end: None }
    }

    pub fn with_head_at_end(self, head: HeadAtEnd) -> Self {
        Self { head_at_end: Some(head), ..self }
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
        let mut states = self.advance();
        let plan = self.plans.pop_front().unwrap();
        let without = self.head_at_end.as_mut().map(|head| head.take(&plan, &mut states));
        self.coordinator.finish_without(&plan, &states, &without.unwrap_or_default(), output)
    }
}
