//! `LmHead`: from the residual stream to logits: the final norm and the head. Whoever coordinates keeps it, so that tokens need not leave
//! there. The ranks of a group divide the vocabulary: each computes its own logits, and the first gathers all.

use std::ops::Range;
use std::sync::Arc;

use kernels::{Backend, Rows};
use types::{Rank, WorldSize};

use crate::checkpoint::{Checkpoint, End};
use crate::collective::{Collective, CollectiveError};
use crate::embedding::Embedding;
use crate::load::{LoadError, LoadOptions, Loader};

/// With working buffers for all rows of a step, and for the logits of [`Limits::logit_rows`](crate::Limits::logit_rows) of them.
pub struct LmHead<B: Backend> {
    /// The embedding's table, if the head is tied to it.
    weights: Arc<B::Matrix>,
    norm: B::Vector,
    eps: f32,
    vocab: usize,
    /// The tokens whose rows are here.
    own: Range<usize>,
    rank: Rank,
    weight_bytes: usize,
    gathered: B::Buffer, // [rows, hidden]
    normed: B::Buffer,   // [rows, hidden]
    logits: B::Buffer,   // [logit_rows, own]
    /// `[logit_rows, vocab]`, on the first of several ranks.
    whole: Option<B::Buffer>,
}

impl<B: Backend> LmHead<B> {
    /// The shard of `rank`, which has loaded this `embedding`.
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

    /// Logits `[logit_rows, vocab]` of the step's logit rows, from the residual stream after the last layer: on the first
    /// rank, `None` on the others.
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

    /// The states `[logit_rows, hidden]` of the step's logit rows after the final norm.
    pub fn normed(&mut self, backend: &B, step: &B::Step, logit_rows: usize, hidden: &B::Buffer) -> &B::Buffer {
        backend.gather_logit_rows(step, &mut self.gathered, hidden);
        backend.rms_norm(0..logit_rows, &mut self.normed, &self.gathered, &self.norm, self.eps);
        &self.normed
    }

    /// Logits `[rows, vocab]` of the first rows that [`LmHead::normed`] left: on the first rank, `None` on the others.
    pub fn logits_of_normed(
        &mut self,
        backend: &B,
        rows: usize,
        collective: &dyn Collective<B>,
    ) -> Result<Option<&B::Buffer>, CollectiveError> {
        if !self.own.is_empty() {
            // Few rows of a prompt have logits, so the arithmetic of prompts would gain nothing.
            backend.linear(Rows::decode(rows), &mut self.logits, &self.normed, &self.weights, None);
        }
        if self.rank.world() != WorldSize::ONE {
            collective.gather_columns(backend, rows, self.vocab, &self.logits, self.whole.as_mut())?;
        }
        Ok(self.logits_buffer())
    }

    /// Where [`LmHead::logits`] leaves them, for a caller who replays recorded ops. `None` if that is on another rank.
    pub fn logits_buffer(&self) -> Option<&B::Buffer> {
        match self.rank.world() {
            WorldSize::ONE => Some(&self.logits),
            _ => self.whole.as_ref(),
        }
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of the packed head; none if it is tied to the embedding.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of the rank's packed head, tied or not: every sampled token reads all of them.
    pub fn head_bytes(&self, backend: &B) -> usize {
        backend.matrix_bytes(&self.weights)
    }
}
