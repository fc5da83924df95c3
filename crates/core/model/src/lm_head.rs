//! `LmHead`: the final norm and the LM head, from the residual stream to logits. The ranks of a group shard the vocabulary:
//! each computes the logits of its shard, and rank 0 gathers all of them.

use std::ops::Range;
use std::sync::Arc;

use kernels::{Backend, BackendError, Rows};
use types::{Rank, WorldSize};

use crate::checkpoint::Checkpoint;
use crate::collective::{Collective, CollectiveError};
use crate::embedding::Embedding;
use crate::load::{LoadError, LoadOptions, Loader};
use crate::tensor_names::End;

/// Has working buffers for all rows of a step and for [`Limits::logit_rows`](crate::Limits::logit_rows) rows of logits.
pub struct LmHead<B: Backend> {
    /// The embedding's table, if the head is tied to it.
    weights: Arc<B::Matrix>,
    norm: B::Vector,
    eps: f32,
    vocab: usize,
    /// This rank's shard of the vocabulary.
    own: Range<usize>,
    rank: Rank,
    weight_bytes: usize,
    gathered: B::Buffer, // [rows, hidden]
    normed: B::Buffer,   // [rows, hidden]
    logits: B::Buffer,   // [logit_rows, own]
    /// `[logit_rows, vocab]`, on rank 0 of several ranks.
    whole: Option<B::Buffer>,
}

impl<B: Backend> LmHead<B> {
    /// Loads the shard of `rank`. `embedding` is the embedding of the same rank.
    pub fn load(
        backend: &B,
        from: &Checkpoint,
        options: &LoadOptions,
        rank: Rank,
        embedding: &Embedding<B>,
    ) -> Result<Self, LoadError> {
        let description = from.description();
        let mut loader = Loader::new(backend, from, options, rank)?;
        let weights = match description.tied {
            true => Arc::clone(embedding.table()),
            false => Arc::new(loader.pack(loader.table(End::Head)?)?),
        };
        let norm = loader.final_norm()?;
        let logit_rows = options.limits.logit_rows;
        let rows = options.limits.step.rows.max(logit_rows);
        let is_gathered = rank.world() != WorldSize::ONE && rank.index() == 0;
        let own = loader.shards.vocab.clone();
        Ok(Self {
            weights,
            norm,
            eps: description.eps,
            vocab: description.vocab,
            weight_bytes: loader.weight_bytes,
            gathered: backend.output(rows, description.hidden)?,
            normed: backend.buffer(rows, description.hidden)?,
            logits: backend.output(logit_rows, own.len())?,
            whole: is_gathered.then(|| backend.output(logit_rows, description.vocab)).transpose()?,
            own,
            rank,
        })
    }

    /// Logits `[logit_rows, vocab]` of the step's logit rows, from the residual stream after the last layer. `None` on all
    /// ranks but rank 0.
    pub fn logits(
        &mut self,
        backend: &B,
        step: &B::Step,
        logit_rows: usize,
        hidden: &B::Buffer,
        collective: &dyn Collective<B>,
    ) -> Result<Option<&B::Buffer>, CollectiveError> {
        self.normed(backend, step, logit_rows, hidden);
        self.logits_of_normed(backend, logit_rows, collective)
    }

    /// The hidden states `[logit_rows, hidden]` of the step's logit rows after the final norm.
    pub fn normed(&mut self, backend: &B, step: &B::Step, logit_rows: usize, hidden: &B::Buffer) -> &B::Buffer {
        backend.gather_logit_rows(step, &mut self.gathered, hidden);
        backend.rms_norm(0..logit_rows, &mut self.normed, &self.gathered, &self.norm, self.eps);
        &self.normed
    }

    /// The same for hidden states `[rows, hidden]` that another stage computed, at most as many rows as a step has.
    pub fn normed_of(&mut self, backend: &B, rows: usize, states: &[f32]) -> Result<&B::Buffer, BackendError> {
        backend.write(&mut self.gathered, states)?;
        backend.rms_norm(0..rows, &mut self.normed, &self.gathered, &self.norm, self.eps);
        Ok(&self.normed)
    }

    /// Logits `[rows, vocab]` of the first rows that [`LmHead::normed`] or [`LmHead::normed_of`] computed. `None` on all ranks but rank 0.
    pub fn logits_of_normed(
        &mut self,
        backend: &B,
        rows: usize,
        collective: &dyn Collective<B>,
    ) -> Result<Option<&B::Buffer>, CollectiveError> {
        if !self.own.is_empty() {
            // Few prefill rows need logits, so prefill arithmetic would gain nothing.
            backend.linear(Rows::decode(rows), &mut self.logits, &self.normed, &self.weights, None);
        }
        if self.rank.world() != WorldSize::ONE {
            collective.gather_columns(backend, rows, self.vocab, &self.logits, self.whole.as_mut())?;
        }
        Ok(self.logits_buffer())
    }

    /// The buffer to which [`LmHead::logits`] writes, for callers that replay a captured graph. `None` on all ranks but
    /// rank 0.
    pub fn logits_buffer(&self) -> Option<&B::Buffer> {
        match self.rank.world() {
            WorldSize::ONE => Some(&self.logits),
            _ => self.whole.as_ref(),
        }
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of the packed head; zero if it is tied to the embedding.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of the rank's packed head, tied or not. Computing logits reads all of them.
    pub fn head_bytes(&self, backend: &B) -> usize {
        backend.matrix_bytes(&self.weights)
    }
}
