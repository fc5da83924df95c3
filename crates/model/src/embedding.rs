//! `Embedding`: from tokens to the residual stream. Whoever coordinates keeps it, so that prompts need not leave there. The ranks of a
//! group divide the vocabulary: each embeds its own tokens, and the sum over all ranks has every row.

use std::ops::Range;
use std::sync::Arc;

use kernels::Backend;
use types::{Rank, WorldSize};

use crate::checkpoint::{Checkpoint, End};
use crate::collective::{Collective, CollectiveError};
use crate::load::{LoadError, LoadOptions, Loader};

pub struct Embedding<B: Backend> {
    /// Shared with the head of a model whose head is tied to it.
    table: Arc<B::Matrix>,
    scale: f32,
    /// The tokens whose rows are here.
    own: Range<usize>,
    rank: Rank,
    weight_bytes: usize,
}

impl<B: Backend> Embedding<B> {
    /// The shard of `rank`.
    pub fn load(backend: &B, from: &Checkpoint, options: &LoadOptions, rank: Rank) -> Result<Self, LoadError> {
        let mut loader = Loader::new(backend, from, options, rank)?;
        let table = Arc::new(loader.pack(loader.table(End::Embedding)?)?);
        let scale = from.description().embedding_scale;
        Ok(Self { table, scale, own: loader.shards.vocab.clone(), rank, weight_bytes: loader.weight_bytes })
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
        backend.embed(step, hidden, &self.table, self.own.start, self.scale);
        match self.rank.world() {
            WorldSize::ONE => Ok(()),
            // One rank has a token's row, the others have zeros: the sum is exact.
            _ => collective.all_reduce(backend, rows, hidden),
        }
    }

    /// Bytes of the packed table.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    pub(crate) fn table(&self) -> &Arc<B::Matrix> {
        &self.table
    }
}
