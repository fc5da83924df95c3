//! A coordinator with the first layers, and one stage with the others.

use engine::{
    Capacity, CoordinatorStage, Engine, EngineOptions, EventKind, Executor, ExecutorError, OpenedSession, Prefix,
    Request, RequestedOutput, StepOutput, StepPlan,
};
use kernels::cpu::CpuBackend;
use model::Checkpoint;
use types::{SessionId, TokenId};

use super::fixture::{OPTIONS, Prompt, backend};

pub struct TwoParts<S> {
    ends: CoordinatorStage<CpuBackend>,
    stage: S,
    plan: Option<StepPlan>,
    output: StepOutput,
    /// How often the stage was lost.
    pub losses: usize,
}

impl<S: Executor> TwoParts<S> {
    /// `first`: how many layers the coordinator has.
    pub fn new(checkpoint: &Checkpoint, first: usize, stage: S) -> Self {
        let ends = CoordinatorStage::load(backend(), checkpoint, &OPTIONS, first, &mut |_| {}).unwrap();
        Self { ends, stage, plan: None, output: StepOutput::new(), losses: 0 }
    }

    fn or_lost<T>(&mut self, result: Result<T, ExecutorError>) -> Result<T, ExecutorError> {
        if result.as_ref().is_err_and(ExecutorError::is_lost) {
            self.ends.clear();
            self.losses += 1;
        }
        result
    }
}

impl<S: Executor> Executor for TwoParts<S> {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.ends.capacity()
    }

    fn open(&mut self, tokens_max: usize, _: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.ends.open(tokens_max, Prefix::NONE)?;
        assert_eq!(self.stage.open(tokens_max, Prefix::NONE)?, opened);
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.stage.truncate(session, tokens)?;
        self.ends.truncate(session, kept)
    }

    fn close(&mut self, session: SessionId) {
        self.ends.close(session);
        self.stage.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let mut next = StepPlan::new();
        for entry in plan.entries() {
            let requested = RequestedOutput::States { rows: entry.state_rows().len() };
            next.push_rows(entry.session, entry.phase, entry.position, entry.rows(), requested);
        }
        self.ends.start(plan, next.activations_mut())?;
        let submitted = self.stage.submit(&next);
        self.or_lost(submitted)?;
        self.plan = Some(plan.clone());
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let plan = self.plan.take().ok_or(ExecutorError::NoStepInFlight)?;
        let collected = self.stage.collect(&mut self.output);
        self.or_lost(collected)?;
        self.ends.finish(&plan, &self.output.states, output)
    }
}

/// The greedy tokens of all prompts, run together, and the executor.
pub fn generate<E: Executor>(executor: E, prompts: &[Prompt], tokens: usize) -> (Vec<Vec<TokenId>>, E) {
    let options = EngineOptions { draft_tokens_max: 0, ..EngineOptions::default() };
    let mut engine = Engine::with_options(executor, options);
    let add = |prompt: &Prompt| engine.add(Request::greedy(prompt.tokens.clone(), tokens)).unwrap();
    let ids: Vec<_> = prompts.iter().map(add).collect();
    let mut answers = vec![Vec::new(); ids.len()];
    let mut events = Vec::new();
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        for event in events.drain(..) {
            let index = ids.iter().position(|&id| id == event.request).unwrap();
            match event.kind {
                EventKind::Token(sampled) => answers[index].push(sampled.token),
                EventKind::Finished(finished) => assert!(!format!("{:?}", finished.reason).contains("Failed")),
                _ => {}
            }
        }
    }
    (answers, engine.into_executor())
}
