//! `LocalExecutor`: runs all layers of a model in this process, with embedding, head and sampler: the whole model, or one rank's
//! shard of it. The ranks of a group get the same calls in the same order; the first of them samples, and its output is that
//! of the group.
//!
//! It has one step in flight. `submit` hands the layers to the backend, `collect` the head, then waits for the logits and
//! samples. On a backend that works in order, a page that is released between the two is written to only afterwards.

use kernels::Backend;
use model::{Checkpoint, Collective, LoadError, LoadOptions, ModelPart, SingleRank};
use types::{Rank, SessionId};

use crate::coordinator_stage::CoordinatorStage;
use crate::executor::{Capacity, Executor, ExecutorError, OpenedSession};
use crate::plan::{StepOutput, StepPlan};
use crate::prefix::Prefix;

pub struct LocalExecutor<B: Backend> {
    /// A chain whose first stage has all layers.
    coordinator: CoordinatorStage<B>,
    /// A copy of the plan whose step is in flight.
    flight: Option<StepPlan>,
    /// The plan of the previous step, kept for its memory.
    spare: StepPlan,
}

impl<B: Backend> LocalExecutor<B> {
    /// Loads all layers of a model. `progress` gets the number of layers loaded so far.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        Self::load_shard(backend, from, options, Rank::SINGLE, Box::new(SingleRank), progress)
    }

    /// Loads a rank's shard of all layers. `collective` connects it with the other ranks.
    pub fn load_shard(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let part = ModelPart::whole(from.description());
        let coordinator = CoordinatorStage::load_shard(backend, from, options, part, rank, collective, progress)?;
        Ok(Self { coordinator, flight: None, spare: StepPlan::new() })
    }

    /// Continues in a newly formed group: all sessions are closed, the weights stay.
    pub fn regroup(&mut self, collective: Box<dyn Collective<B>>) {
        self.coordinator.regroup(collective);
        self.flight = None;
    }

    /// Closes all sessions, empties the prefix cache and drops the step in flight. The weights stay.
    pub fn clear(&mut self) {
        self.coordinator.clear();
        self.flight = None;
    }

    pub fn backend(&self) -> &B {
        self.coordinator.stage().backend()
    }

    /// Sessions that are open.
    pub fn sessions(&self) -> usize {
        self.coordinator.sessions().count()
    }

    /// Bytes of the layers' weights.
    pub fn weight_bytes(&self) -> usize {
        self.coordinator.stage().weight_bytes()
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.coordinator.head_bytes()
    }
}

impl<B: Backend> Executor for LocalExecutor<B> {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.coordinator.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.coordinator.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.coordinator.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.coordinator.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.flight.is_some() {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        self.coordinator.begin(plan)?;
        let mut flight = std::mem::take(&mut self.spare);
        flight.clone_from(plan);
        self.flight = Some(flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        let plan = self.flight.take().ok_or(ExecutorError::NoStepInFlight)?;
        let result = self.coordinator.finish_own(&plan, output);
        self.spare = plan;
        result
    }
}
