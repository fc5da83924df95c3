//! `GatedStage`: a stage whose steps end only when a test lets them.

use std::sync::{Arc, Condvar, Mutex};

use engine::{Capacity, Executor, ExecutorError, OpenedSession, Prefix, Stage, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use types::SessionId;

pub struct GatedStage {
    pub stage: Stage<CpuBackend>,
    pub gate: Arc<Gate>,
}

#[derive(Default)]
pub struct Gate {
    steps: Mutex<Steps>,
    changed: Condvar,
}

#[derive(Default)]
struct Steps {
    begun: usize,
    allowed: usize,
}

impl Gate {
    /// Steps that have begun.
    pub fn begun(&self) -> usize {
        self.steps.lock().unwrap().begun
    }

    /// Lets so many more steps end.
    pub fn allow(&self, steps: usize) {
        self.steps.lock().unwrap().allowed += steps;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let mut steps = self.steps.lock().unwrap();
        steps.begun += 1;
        let number = steps.begun;
        drop(self.changed.wait_while(steps, |steps| steps.allowed < number).unwrap());
    }
}

impl Executor for GatedStage {
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
        self.stage.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.gate.pass();
        self.stage.collect(output)
    }
}
