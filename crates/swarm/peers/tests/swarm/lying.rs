//! `LyingStage`: a stage that returns something else than it computed.

use engine::{Capacity, Executor, ExecutorError, OpenedSession, Prefix, Stage, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use types::SessionId;

pub struct LyingStage(pub Stage<CpuBackend>);

impl Executor for LyingStage {
    fn depth(&self) -> usize {
        self.0.depth()
    }

    fn capacity(&self) -> Capacity {
        self.0.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.0.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.0.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.0.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.submit(plan)
    }

    /// Finite values of the right shape.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.0.collect(output)?;
        output.states.iter_mut().step_by(3).for_each(|value| *value *= 1.2);
        Ok(())
    }
}
