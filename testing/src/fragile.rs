//! `Fragile`: an executor that a test can make fail, as if a group had lost a rank, or hold up.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use engine::{
    Capacity, Executor, ExecutorError, Health, LocalExecutor, OpenedSession, Prefix, RankReport, StepOutput, StepPlan,
};
use kernels::cpu::CpuBackend;
use types::{SessionId, WorldSize};

pub const WHY: &str = "rank 1: its process ended";

/// The test's handle to the executor.
#[derive(Clone, Default)]
pub struct Switch(Arc<(Mutex<State>, Condvar)>);

#[derive(Default)]
struct State {
    lost: bool,
    /// Steps that succeed before the loss.
    steps_left: Option<usize>,
    /// Steps that run before one waits until it is released.
    held_after: Option<usize>,
    /// Steps with fewer sequences are not counted.
    held_sequences: usize,
    losses: u64,
}

impl Switch {
    pub fn lose(&self) {
        self.lock().lose();
    }

    /// Makes the step after the next `steps` steps fail.
    pub fn lose_after(&self, steps: usize) {
        self.lock().steps_left = Some(steps);
    }

    /// The step after the next `steps` steps waits for [`Self::release`].
    pub fn hold_after(&self, steps: usize) {
        self.hold_after_with(steps, 0);
    }

    /// The same, counting only steps with so many sequences: those that still come would not be accepted while a step waits.
    pub fn hold_after_with(&self, steps: usize, sequences: usize) {
        let mut state = self.lock();
        (state.held_after, state.held_sequences) = (Some(steps), sequences);
    }

    pub fn release(&self) {
        self.lock().held_after = None;
        self.0.1.notify_all();
    }

    pub fn mend(&self) {
        self.lock().lost = false;
        self.0.1.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap()
    }
}

impl State {
    fn lose(&mut self) {
        self.lost = true;
        self.losses += 1;
    }
}

pub struct Fragile {
    local: LocalExecutor<CpuBackend>,
    sessions: Vec<SessionId>,
    switch: Switch,
}

impl Fragile {
    pub fn new(local: LocalExecutor<CpuBackend>, switch: &Switch) -> Self {
        Self { local, sessions: Vec::new(), switch: switch.clone() }
    }

    fn check_whole(&mut self) -> Result<(), ExecutorError> {
        if self.switch.lock().lost {
            self.sessions.drain(..).for_each(|session| self.local.close(session));
            return Err(ExecutorError::Lost { why: WHY.into() });
        }
        Ok(())
    }
}

impl Executor for Fragile {
    fn depth(&self) -> usize {
        self.local.depth()
    }

    fn capacity(&self) -> Capacity {
        self.local.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.check_whole()?;
        let opened = self.local.open(tokens_max, prefix)?;
        self.sessions.push(opened.session);
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.check_whole()?;
        self.local.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.local.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let (_, changed) = &*self.switch.0;
        let mut state = changed.wait_while(self.switch.lock(), |state| state.held_after == Some(0)).unwrap();
        if plan.entries().len() >= state.held_sequences {
            state.held_after = state.held_after.map(|steps| steps - 1);
        }
        match state.steps_left {
            Some(0) => {
                state.steps_left = None;
                state.lose();
            }
            Some(steps) => state.steps_left = Some(steps - 1),
            None => {}
        }
        drop(state);
        self.check_whole()?;
        self.local.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.local.collect(output)
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        if self.check_whole().is_ok() {
            return Health::Ready;
        }
        let (state, changed) = &*self.switch.0;
        let state = changed.wait_timeout_while(state.lock().unwrap(), wait, |state| state.lost).unwrap().0;
        if state.lost { Health::Rebuilding { why: WHY.into() } } else { Health::Ready }
    }

    fn ranks(&self) -> Vec<RankReport> {
        let State { lost, losses, .. } = *self.switch.lock();
        let report = |rank: types::Rank| {
            let is_gone = lost && rank.index() == 1;
            RankReport {
                rank,
                pid: (!is_gone).then_some(4000 + rank.index() as u32),
                ready: !is_gone,
                state: if is_gone { "absent" } else { "ready" },
                restarts: if rank.index() == 1 { losses } else { 0 },
                weight_bytes: 3 << 20,
                kv_bytes: 1 << 20,
                resident_bytes: 5 << 20,
                steps: 200,
                step_time: Duration::from_secs(4),
                wait_time: Duration::from_millis(500),
                send_time: Duration::ZERO,
                drains: 0,
                drain_max: Duration::ZERO,
            }
        };
        WorldSize::new(2).unwrap().ranks().map(report).collect()
    }
}
