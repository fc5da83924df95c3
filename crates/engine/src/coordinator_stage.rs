//! `CoordinatorStage`: what the coordinator of a chain keeps: the embedding, the first layers (possibly none), and the head. Tokens
//! become activations at the beginning of the chain, and states from its last stage become sampled tokens.
//!
//! Several steps may be in flight between [`CoordinatorStage::start`] and [`CoordinatorStage::finish`]. The caller keeps their plans.

use kernels::Backend;
use model::{Block, Checkpoint, Collective, Embedding, LoadError, LoadOptions, ModelPart, SingleRank};
use types::{Rank, SessionId};

use crate::executor::{Capacity, ExecutorError, OpenedSession};
use crate::head::{Head, HeadInput};
use crate::plan::{StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::session_table::SessionTable;
use crate::stage::Stage;

pub struct CoordinatorStage<B: Backend> {
    embedding: Embedding<B>,
    stage: Stage<B>,
    head: Head<B>,
}

impl<B: Backend> CoordinatorStage<B> {
    /// Loads the embedding, the head and the first `layers` layers. `progress` gets the number of layers loaded so far.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        layers: usize,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        Self::load_shard(backend, from, options, layers, Rank::SINGLE, Box::new(SingleRank), progress)
    }

    /// Loads a rank's shard of them. `collective` connects it with the other ranks.
    pub(crate) fn load_shard(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        layers: usize,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let embedding = Embedding::load(&backend, from, options, rank)?;
        let head = Head::load(&backend, from, options, rank, &embedding)?;
        let layers = ModelPart::coordinator(layers).layers;
        let block = layers.map(|layers| Block::load(&backend, from, layers, rank, options, progress)).transpose()?;
        let stage = Stage::new(backend, from, options, block, rank, collective)?;
        Ok(Self { embedding, stage, head })
    }

    /// The stage of the first layers, which holds the sessions.
    pub fn stage(&self) -> &Stage<B> {
        &self.stage
    }

    pub fn sessions(&self) -> &SessionTable {
        self.stage.sessions()
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.head.head_bytes(self.stage.backend())
    }

    pub fn capacity(&self) -> Capacity {
        self.stage.sessions().capacity()
    }

    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.stage.sessions_mut().open(tokens_max, prefix)?;
        self.head.open(opened.session, tokens_max, &prefix.tokens[..opened.computed]);
        Ok(opened)
    }

    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.stage.sessions_mut().truncate(session, tokens)?;
        self.head.truncate(session, kept);
        Ok(kept)
    }

    pub fn close(&mut self, session: SessionId) {
        self.stage.sessions_mut().close(session);
    }

    /// Closes all sessions and empties the prefix cache, for a newly formed chain. The weights stay.
    pub fn clear(&mut self) {
        self.stage.clear();
    }

    /// Starts a step and replaces `states` with the activations `[rows, hidden]` of all its rows, for the next stage. An error
    /// of [`SessionTable::check`] means that no session changed; after another error the chain has to be formed anew.
    pub fn start(&mut self, plan: &StepPlan, states: &mut Vec<f32>) -> Result<(), ExecutorError> {
        states.clear();
        self.begin(plan)?;
        self.stage.read(0..plan.rows(), states)
    }

    /// Computes what the plan of a step that was started requests. `states` are the hidden states after the model's last layer
    /// of the rows that need logits or are pooled ([`Entry::state_rows`](crate::Entry::state_rows)). After an error the chain
    /// has to be formed anew.
    pub fn finish(&mut self, plan: &StepPlan, states: &[f32], output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        let (backend, collective, ..) = self.stage.step();
        let input = HeadInput::States(states);
        self.head.finish(backend, collective, self.stage.sessions(), plan, input, output)
    }

    /// Starts a step. Its rows stay in the stage.
    pub(crate) fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        plan.check_model()?;
        self.stage.start(plan, Some(&self.embedding))?;
        self.head.record(plan);
        Ok(())
    }

    /// Computes what the plan of the step that was started last requests, from the stage's own rows.
    pub(crate) fn finish_own(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let (backend, collective, step, hidden) = self.stage.step();
        let input = HeadInput::Step { step, hidden };
        let result = self.head.finish(backend, collective, self.stage.sessions(), plan, input, output);
        if result.is_err() {
            self.stage.sessions_mut().clear_prefix_cache();
        }
        result
    }

    pub(crate) fn regroup(&mut self, collective: Box<dyn Collective<B>>) {
        self.stage.regroup(collective);
    }
}
