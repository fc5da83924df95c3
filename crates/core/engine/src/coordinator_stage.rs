//! `CoordinatorStage`: what the coordinator of a chain keeps: the first layers (possibly none), and in a chain for a whole model
//! the embedding and the head. There tokens become activations at the beginning of the chain, and states from its last stage
//! become sampled tokens. In a chain for a range of layers, activations come in and states go out, as in a [`Stage`].
//!
//! Several steps may be in flight between [`CoordinatorStage::start`] and [`CoordinatorStage::finish`]. The caller keeps their plans.

use kernels::Backend;
use model::{Block, Checkpoint, Collective, Embedding, LoadError, LoadOptions, ModelPart, SingleRank};
use types::{Rank, SessionId};

use crate::executor::{Capacity, ExecutorError, OpenedSession};
use crate::head::{Head, HeadInput};
use crate::plan::{EntryWithoutStates, StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::session_table::SessionTable;
use crate::stage::Stage;

pub struct CoordinatorStage<B: Backend> {
    stage: Stage<B>,
    /// `None` in a chain for a range of layers.
    embedding_and_head: Option<EmbeddingAndSampler<B>>,
}

struct EmbeddingAndSampler<B: Backend> {
    embedding: Embedding<B>,
    head: Head<B>,
}

impl<B: Backend> CoordinatorStage<B> {
    /// Loads the coordinator's part. `progress` gets the number of layers loaded so far.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        part: ModelPart,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        Self::load_shard(backend, from, options, part, Rank::SINGLE, Box::new(SingleRank), progress)
    }

    /// Loads a rank's shard of them. `collective` connects it with the other ranks.
    pub(crate) fn load_shard(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        part: ModelPart,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let load_both = || {
            let embedding = Embedding::load(&backend, from, options, rank)?;
            let head = Head::load(&backend, from, options, rank, &embedding)?;
            Ok::<_, LoadError>(EmbeddingAndSampler { embedding, head })
        };
        let embedding_and_head = part.has_embedding_and_head.then(load_both).transpose()?;
        let block =
            part.layers.map(|layers| Block::load(&backend, from, layers, rank, options, progress)).transpose()?;
        let stage = Stage::new(backend, from, options, block, rank, collective)?;
        Ok(Self { stage, embedding_and_head })
    }

    /// The stage of the first layers, which holds the sessions.
    pub fn stage(&self) -> &Stage<B> {
        &self.stage
    }

    pub fn sessions(&self) -> &SessionTable {
        self.stage.sessions()
    }

    /// Bytes of the head's weights, if it has one.
    pub fn head_bytes(&self) -> usize {
        self.embedding_and_head.as_ref().map_or(0, |both| both.head.head_bytes(self.stage.backend()))
    }

    pub fn capacity(&self) -> Capacity {
        self.stage.sessions().capacity()
    }

    pub fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.stage.sessions_mut().open(tokens_max, prefix)?;
        if let Some(EmbeddingAndSampler { head, .. }) = &mut self.embedding_and_head {
            head.open(opened.session, tokens_max, &prefix.tokens[..opened.computed]);
        }
        Ok(opened)
    }

    pub fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.stage.sessions_mut().truncate(session, tokens)?;
        if let Some(EmbeddingAndSampler { head, .. }) = &mut self.embedding_and_head {
            head.truncate(session, kept);
        }
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

    /// Computes what the plan of a step that was started requests. `states` are the hidden states after the chain's last layer
    /// of the rows that need logits, are pooled or are requested ([`Entry::state_rows`](crate::Entry::state_rows)). After an
    /// error the chain has to be formed anew.
    pub fn finish(&mut self, plan: &StepPlan, states: &[f32], output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.finish_without(plan, states, &[], output)
    }

    /// The same for a chain for a whole model whose end returned something else for some entries, which are listed in the
    /// order of the plan.
    pub fn finish_without(
        &mut self,
        plan: &StepPlan,
        states: &[f32],
        without: &[EntryWithoutStates],
        output: &mut StepOutput,
    ) -> Result<(), ExecutorError> {
        output.clear();
        let Some(EmbeddingAndSampler { head, .. }) = &mut self.embedding_and_head else {
            let (rows, width, found) = (plan.state_rows(), self.stage.width(), states.len());
            if found != rows * width {
                return Err(ExecutorError::ActivationShape { rows, width, found });
            }
            output.states.extend_from_slice(states);
            return Ok(());
        };
        let (backend, collective, ..) = self.stage.step();
        head.finish(backend, collective, self.stage.sessions(), plan, HeadInput::States { states, without }, output)
    }

    /// Starts a step. Its rows stay in the stage.
    pub(crate) fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        match &mut self.embedding_and_head {
            Some(EmbeddingAndSampler { embedding, head }) => {
                plan.check_model()?;
                self.stage.start(plan, Some(embedding))?;
                head.record(plan);
                Ok(())
            }
            None => {
                plan.check_stage(self.stage.width())?;
                plan.check_all_layers()?;
                // The next machine would take them for a fault of this one.
                if plan.activations().iter().any(|value| !value.is_finite()) {
                    return Err(ExecutorError::Input { expected: "finite activations" });
                }
                self.stage.start(plan, None)
            }
        }
    }

    /// Computes what the plan of the step that was started last requests, from the stage's own rows.
    pub(crate) fn finish_own(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let result = match &mut self.embedding_and_head {
            Some(EmbeddingAndSampler { head, .. }) => {
                let (backend, collective, step, hidden) = self.stage.step();
                let input = HeadInput::Step { step, hidden };
                head.finish(backend, collective, self.stage.sessions(), plan, input, output)
            }
            None => {
                let mut rows = plan.entries().iter().map(|entry| entry.state_rows());
                rows.try_for_each(|rows| self.stage.read(rows, &mut output.states))
            }
        };
        if result.is_err() {
            self.stage.sessions_mut().clear_prefix_cache();
        }
        result
    }

    pub(crate) fn regroup(&mut self, collective: Box<dyn Collective<B>>) {
        self.stage.regroup(collective);
    }
}
