//! `Ends`: what surrounds the layers. Whoever coordinates keeps it, so that prompts and tokens need not leave there. The
//! ranks of a group share the vocabulary: each embeds its own tokens and computes its own logits, and the first gets all.

use std::ops::Range;

use kernels::{Backend, Rows};
use types::{Rank, WorldSize};

use crate::checkpoint::{Checkpoint, End};
use crate::collective::{Collective, CollectiveError};
use crate::load::{LoadError, LoadOptions, Loader};

/// Embedding, final norm and head, with working buffers for all rows of a step, and for the logits of
/// [`Limits::wanted`](crate::Limits::wanted) of them.
pub struct Ends<B: Backend> {
    embedding: B::Matrix,
    embedding_scale: f32,
    norm: B::Vector,
    eps: f32,
    /// `None`: the head is the embedding.
    head: Option<B::Matrix>,
    vocab: usize,
    /// The rows of embedding and head that are here.
    own: Range<usize>,
    rank: Rank,
    weight_bytes: usize,
    gathered: B::Buffer, // [rows, hidden]
    normed: B::Buffer,   // [rows, hidden]
    logits: B::Buffer,   // [wanted, own]
    /// `[wanted, vocab]`, on the first of several ranks.
    whole: Option<B::Buffer>,
}

impl<B: Backend> Ends<B> {
    /// The share of `rank`.
    pub fn load(backend: &B, from: &Checkpoint, options: &LoadOptions, rank: Rank) -> Result<Self, LoadError> {
        let description = from.description();
        let mut loader = Loader::new(backend, from, options, rank)?;
        let embedding = loader.pack(loader.table(End::Embedding)?)?;
        let norm = loader.final_norm()?;
        let head = if description.tied { None } else { Some(loader.pack(loader.table(End::Head)?)?) };
        let wanted = options.limits.wanted;
        let rows = options.limits.step.rows.max(wanted);
        let is_gathered = rank.world() != WorldSize::ONE && rank.index() == 0;
        let whole = is_gathered.then(|| backend.output(wanted, description.vocab)).transpose()?;
        let own = loader.shares.vocab.clone();
        Ok(Self {
            embedding,
            embedding_scale: description.embedding_scale,
            norm,
            eps: description.eps,
            head,
            vocab: description.vocab,
            weight_bytes: loader.weight_bytes,
            gathered: backend.output(rows, description.hidden)?,
            normed: backend.buffer(rows, description.hidden)?,
            logits: backend.output(wanted, own.len())?,
            whole,
            own,
            rank,
        })
    }

    /// The residual stream of the step's `rows` tokens, before the first layer.
    pub fn embed(
        &self,
        backend: &B,
        step: &B::Step,
        rows: usize,
        hidden: &mut B::Buffer,
        collective: &dyn Collective<B>,
    ) -> Result<(), CollectiveError> {
        backend.embed(step, hidden, &self.embedding, self.own.start, self.embedding_scale);
        match self.rank.world() {
            WorldSize::ONE => Ok(()),
            // One rank has a token's row, the others have zeros: the sum is exact.
            _ => collective.all_reduce(backend, rows, hidden),
        }
    }

    /// Logits `[wanted, vocab]` of the step's wanted rows, from the residual stream after the last layer: on the first
    /// rank, `None` on the others.
    pub fn logits(
        &mut self,
        backend: &B,
        step: &B::Step,
        wanted: usize,
        hidden: &B::Buffer,
        collective: &dyn Collective<B>,
    ) -> Result<Option<&B::Buffer>, CollectiveError> {
        self.normed(backend, step, wanted, hidden);
        self.logits_of_normed(backend, wanted, collective)
    }

    /// The states `[wanted, hidden]` of the step's wanted rows after the final norm.
    pub fn normed(&mut self, backend: &B, step: &B::Step, wanted: usize, hidden: &B::Buffer) -> &B::Buffer {
        backend.gather_wanted(step, &mut self.gathered, hidden);
        backend.rms_norm(0..wanted, &mut self.normed, &self.gathered, &self.norm, self.eps);
        &self.normed
    }

    /// Logits `[rows, vocab]` of the first rows that [`Ends::normed`] left: on the first rank, `None` on the others.
    pub fn logits_of_normed(
        &mut self,
        backend: &B,
        rows: usize,
        collective: &dyn Collective<B>,
    ) -> Result<Option<&B::Buffer>, CollectiveError> {
        if !self.own.is_empty() {
            let head = self.head.as_ref().unwrap_or(&self.embedding);
            // Few rows of a prompt have logits, so the arithmetic of prompts would gain nothing.
            backend.linear(Rows::generated(rows), &mut self.logits, &self.normed, head, None);
        }
        if self.rank.world() != WorldSize::ONE {
            collective.gather_columns(backend, rows, self.vocab, &self.logits, self.whole.as_mut())?;
        }
        Ok(self.logits_buffer())
    }

    /// Where [`Ends::logits`] leaves them, for a caller who replays recorded ops. `None` if that is on another rank.
    pub fn logits_buffer(&self) -> Option<&B::Buffer> {
        match self.rank.world() {
            WorldSize::ONE => Some(&self.logits),
            _ => self.whole.as_ref(),
        }
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of the packed matrices.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of the rank's packed head, which every sampled token reads whole.
    pub fn head_bytes(&self, backend: &B) -> usize {
        backend.matrix_bytes(self.head.as_ref().unwrap_or(&self.embedding))
    }
}
