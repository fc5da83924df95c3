//! `Embedding`: from tokens to the residual stream. The ranks of a group shard the vocabulary: each embeds the tokens of its
//! shard, and the sum over all ranks has every row.

use std::ops::Range;
use std::sync::Arc;

use kernels::Backend;
use types::{Rank, WorldSize};

use crate::checkpoint::Checkpoint;
use crate::collective::{Collective, CollectiveError};
use crate::load::{LoadError, LoadOptions, Loader};
use crate::tensor_names::End;

pub struct Embedding<B: Backend> {
    /// Shared with the LM head if the model ties them.
    table: Arc<B::Matrix>,
    scale: f32,
    /// This rank's shard of the vocabulary.
    own: Range<usize>,
    rank: Rank,
    weight_bytes: usize,
}

impl<B: Backend> Embedding<B> {
    /// Loads the shard of `rank`.
    pub fn load(backend: &B, from: &Checkpoint, options: &LoadOptions, rank: Rank) -> Result<Self, LoadError> {
        let mut loader = Loader::new(backend, from, options, rank)?;
        let table = Arc::new(loader.pack(loader.table(End::Embedding)?)?);
        let scale = from.description().embedding_scale;
        Ok(Self { table, scale, own: loader.shards.vocab.clone(), rank, weight_bytes: loader.weight_bytes })
    }

    /// Writes the residual stream of the step's `rows` tokens, before the first layer, to `hidden`.
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
            // One rank has a token's row and the others have zeros, so the sum is exact.
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
