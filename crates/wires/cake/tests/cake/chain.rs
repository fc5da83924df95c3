//! Chains of a coordinator and stages that are threads of this process, and generations on them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cluster::chain::{Chain, ChainBuilder, ChainLink, ChainTimes, FormedChain};
use cluster::node::StageShape;
use engine::{CoordinatorStage, Engine, EngineOptions, EventKind, Executor, FinishReason, Request};
use kernels::cpu::CpuBackend;
use model::{Checkpoint, ModelPart};
use types::TokenId;

use super::fixture::{OPTIONS, backend};
use testing::cake_programs::Prompt;

/// Longer than any test.
const DEADLINE: Duration = Duration::from_secs(300);

/// Makes the stages of a chain.
pub type MakeStages = Box<dyn FnMut() -> Vec<Box<dyn Executor>> + Send>;

/// Forms a chain of new stages whenever one is lost.
pub struct Former {
    checkpoint: Checkpoint,
    /// How many layers the coordinator has.
    first: usize,
    stages: MakeStages,
    is_wanted: bool,
    formed: Arc<AtomicUsize>,
}

pub struct TestChain {
    pub executor: Chain<CpuBackend, Former>,
    formed: Arc<AtomicUsize>,
}

impl TestChain {
    pub fn new(model: &Path, first: usize, stages: MakeStages) -> Self {
        let formed = Arc::<AtomicUsize>::default();
        let checkpoint = Checkpoint::open(model).unwrap();
        let mut former = Former { checkpoint, first, stages, is_wanted: true, formed: Arc::clone(&formed) };
        let chain = former.poll(Duration::ZERO).unwrap();
        Self { executor: Chain::new(former, chain, Arc::<ChainTimes>::default(), DEADLINE), formed }
    }

    /// How often the chain was lost.
    pub fn losses(&self) -> usize {
        self.formed.load(Ordering::Relaxed) - 1
    }
}

impl ChainBuilder<CpuBackend> for Former {
    fn rebuild(&mut self, _: &str, _: Option<Box<CoordinatorStage<CpuBackend>>>) {
        self.is_wanted = true;
    }

    fn poll(&mut self, _: Duration) -> Option<FormedChain<CpuBackend>> {
        if !std::mem::take(&mut self.is_wanted) {
            return None;
        }
        self.formed.fetch_add(1, Ordering::Relaxed);
        Some(form(&self.checkpoint, self.first, (self.stages)()))
    }
}

fn form(checkpoint: &Checkpoint, first: usize, stages: Vec<Box<dyn Executor>>) -> FormedChain<CpuBackend> {
    let ends =
        CoordinatorStage::load(backend(), checkpoint, &OPTIONS, ModelPart::coordinator(first), &mut |_| {}).unwrap();
    let shape = StageShape { rows_max: OPTIONS.limits.step.rows, hidden: checkpoint.description().hidden };
    FormedChain { stage: Box::new(ends), link: Some(ChainLink::in_process(stages, shape).unwrap()) }
}

/// The greedy tokens of all prompts, run together, with this many draft tokens at a time.
pub fn generate<E: Executor>(executor: E, prompts: &[Prompt], tokens: usize, drafts: usize) -> (Generated, E) {
    let options = EngineOptions { draft_tokens_max: drafts, ..EngineOptions::default() };
    let mut engine = Engine::with_options(executor, options);
    let add = |prompt: &Prompt| engine.add(Request::greedy(prompt.tokens.clone(), tokens)).unwrap();
    let ids: Vec<_> = prompts.iter().map(add).collect();
    let mut generated = Generated { answers: vec![Vec::new(); ids.len()], cached_tokens: 0 };
    let mut events = Vec::new();
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        for event in events.drain(..) {
            let index = ids.iter().position(|&id| id == event.request).unwrap();
            match event.kind {
                EventKind::Token(sampled) => generated.answers[index].push(sampled.token),
                EventKind::Prefilled { cached_tokens, .. } => generated.cached_tokens += cached_tokens,
                EventKind::Finished(finished) => {
                    assert!(!matches!(finished.reason, FinishReason::Failed(_)), "{:?}", finished.reason);
                }
                _ => {}
            }
        }
    }
    (generated, engine.into_executor())
}

#[derive(Debug, PartialEq, Eq)]
pub struct Generated {
    pub answers: Vec<Vec<TokenId>>,
    /// Tokens that came from the prefix cache.
    pub cached_tokens: usize,
}
