//! `LyingStage`: a stage that returns something else than it computed.

use std::collections::VecDeque;

use engine::{Capacity, Executor, ExecutorError, OpenedSession, Prefix, Stage, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use types::SessionId;

/// Whether the row at a position is wrong.
pub type Lie = fn(usize) -> bool;

pub struct LyingStage {
    stage: Stage<CpuBackend>,
    lie: Lie,
    /// The positions of the rows that each step in flight returns.
    positions: VecDeque<Vec<usize>>,
}

impl LyingStage {
    pub fn new(stage: Stage<CpuBackend>, lie: Lie) -> Self {
        Self { stage, lie, positions: VecDeque::new() }
    }
}

impl Executor for LyingStage {
    fn depth(&self) -> usize {
        self.stage.depth()
    }

    fn capacity(&self) -> Capacity {
        self.stage.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.stage.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.stage.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.stage.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.stage.submit(plan)?;
        let returned = plan.entries().iter().flat_map(|entry| entry.end() - entry.state_rows().len()..entry.end());
        self.positions.push_back(returned.collect());
        Ok(())
    }

    /// Finite values of the right shape.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.stage.collect(output)?;
        let positions = self.positions.pop_front().unwrap_or_default();
        let width = output.states.len() / positions.len().max(1);
        for (position, row) in positions.into_iter().zip(output.states.chunks_exact_mut(width.max(1))) {
            if (self.lie)(position) {
                row.iter_mut().step_by(3).for_each(|value| *value *= 1.2);
            }
        }
        Ok(())
    }
}
