//! `Ends`: what surrounds the layers. Whoever coordinates keeps it, so that prompts and tokens need not leave there.

use kernels::{Backend, Rows};
use types::Rank;

use crate::checkpoint::{Checkpoint, End};
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
    weight_bytes: usize,
    gathered: B::Buffer, // [rows, hidden]
    normed: B::Buffer,   // [rows, hidden]
    logits: B::Buffer,   // [wanted, vocab]
}

impl<B: Backend> Ends<B> {
    /// Every rank that has the ends has the whole of them.
    pub fn load(backend: &B, from: &Checkpoint, options: &LoadOptions, rank: Rank) -> Result<Self, LoadError> {
        let description = from.description();
        let mut loader = Loader::new(backend, from, options, rank)?;
        let embedding = loader.table(End::Embedding)?;
        let norm = loader.final_norm()?;
        let head = if description.tied { None } else { Some(loader.table(End::Head)?) };
        let wanted = options.limits.wanted;
        let rows = options.limits.step.rows.max(wanted);
        Ok(Self {
            embedding,
            embedding_scale: description.embedding_scale,
            norm,
            eps: description.eps,
            head,
            vocab: description.vocab,
            weight_bytes: loader.weight_bytes,
            gathered: backend.buffer(rows, description.hidden)?,
            normed: backend.buffer(rows, description.hidden)?,
            logits: backend.buffer(wanted, description.vocab)?,
        })
    }

    /// The residual stream of the step's tokens, before the first layer.
    pub fn embed(&self, backend: &B, step: &B::Step, hidden: &mut B::Buffer) {
        backend.embed(step, hidden, &self.embedding, self.embedding_scale);
    }

    /// Logits `[wanted, vocab]` of the step's wanted rows, from the residual stream after the last layer.
    pub fn logits(&mut self, backend: &B, step: &B::Step, wanted: usize, hidden: &B::Buffer) -> &B::Buffer {
        self.normed(backend, step, wanted, hidden);
        self.logits_of_normed(backend, wanted)
    }

    /// The states `[wanted, hidden]` of the step's wanted rows after the final norm.
    pub fn normed(&mut self, backend: &B, step: &B::Step, wanted: usize, hidden: &B::Buffer) -> &B::Buffer {
        backend.gather_wanted(step, &mut self.gathered, hidden);
        backend.rms_norm(wanted, &mut self.normed, &self.gathered, &self.norm, self.eps);
        &self.normed
    }

    /// Logits `[rows, vocab]` of the first rows that [`Ends::normed`] left.
    pub fn logits_of_normed(&mut self, backend: &B, rows: usize) -> &B::Buffer {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        // Few rows of a prompt are wanted: nothing would be won by another arithmetic for them.
        backend.linear(Rows::generated(rows), &mut self.logits, &self.normed, head, None);
        &self.logits
    }

    /// Where [`Ends::logits`] leaves them, for a caller who replays recorded ops.
    pub fn logits_buffer(&self) -> &B::Buffer {
        &self.logits
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Bytes of the packed matrices.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of the packed head, which every sampled token reads whole.
    pub fn head_bytes(&self, backend: &B) -> usize {
        backend.matrix_bytes(self.head.as_ref().unwrap_or(&self.embedding))
    }
}
