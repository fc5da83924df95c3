//! `Footprint`: the memory that a rank's shard of a part of a model needs, computed before weights are read or allocated. It
//! sums the backend's sizes of everything that `Embedding`, `Block` and `LmHead` allocate.

use kernels::{Backend, Gated, KvShape};
use types::{LayerRange, Rank, WorldSize};

use crate::architecture::WeightKind;
use crate::checkpoint::Checkpoint;
use crate::description::{FeedForward, Layer};
use crate::load::{LoadError, LoadOptions, Loader, Stack};
use crate::part::ModelPart;
use crate::tensor_names::End;

/// Bytes that one rank allocates for its layers and, if it has them, the embedding and the LM head. Norms and step inputs, a few kilobytes per
/// layer, are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Packed matrices: the sum of `weight_bytes` of `Embedding`, `Block` and `LmHead`.
    pub weights: u64,
    /// The KV pages of all layers.
    pub kv: u64,
    /// Working memory of steps: activations in all layouts, RoPE tables, logits. Rows and layouts that no step uses do not
    /// become resident.
    pub working: u64,
}

impl Footprint {
    /// Fails like loading if a tensor is missing, has the wrong shape, or cannot be sharded or converted as requested.
    pub fn new<B: Backend>(
        backend: &B,
        from: &Checkpoint,
        options: &LoadOptions,
        part: ModelPart,
        rank: Rank,
    ) -> Result<Self, LoadError> {
        let (layers, loader) = (part.layers_of(from.description())?, Loader::new(backend, from, options, rank)?);
        let plan = Plan { backend, from, options, part, layers, rank, loader };
        Ok(Self { weights: plan.weights()?, kv: plan.kv(), working: plan.working() })
    }

    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.working)
    }
}

struct Plan<'a, B: Backend> {
    backend: &'a B,
    from: &'a Checkpoint,
    options: &'a LoadOptions,
    part: ModelPart,
    layers: &'a [Layer],
    rank: Rank,
    loader: Loader<'a, B>,
}

impl<B: Backend> Plan<'_, B> {
    fn weights(&self) -> Result<u64, LoadError> {
        let mut sum = 0;
        if self.part.has_embedding_and_head {
            sum += self.packed(self.loader.table(End::Embedding)?);
        }
        if self.part.has_embedding_and_head && !self.from.description().tied {
            sum += self.packed(self.loader.table(End::Head)?);
        }
        let first = self.part.layers.map_or(0, LayerRange::start);
        for (index, layer) in (first..).zip(self.layers) {
            let linear =
                |roles: &[WeightKind], inner| Ok::<_, LoadError>(self.packed(self.loader.linear(index, roles, inner)?));
            sum += linear(&[WeightKind::Query, WeightKind::Key, WeightKind::Value], 0)?
                + linear(&[WeightKind::Output], 0)?;
            match layer.feed_forward {
                FeedForward::Dense { inner } => {
                    sum += linear(&[WeightKind::Gate, WeightKind::Up], inner)? + linear(&[WeightKind::Down], inner)?;
                }
                FeedForward::Experts { inner, .. } => {
                    sum += self.packed(self.loader.router(index)?);
                    for expert in self.loader.shards.experts.clone() {
                        let Gated { gate_up, down } = self.loader.expert(index, inner, expert)?;
                        sum += self.packed(gate_up) + self.packed(down);
                    }
                }
            }
        }
        Ok(sum)
    }

    fn packed(&self, stack: Stack<'_>) -> u64 {
        self.backend.packed_bytes(&stack.sources) as u64
    }

    fn kv(&self) -> u64 {
        let description = self.from.description();
        let shape = KvShape { kv_heads: self.loader.shards.kv_heads.len(), head_dim: description.head_dim };
        let layer = self.backend.kv_bytes(shape, self.options.limits.kv_pages) as u64;
        layer.saturating_mul(self.layers.len() as u64)
    }

    fn working(&self) -> u64 {
        let Self { part, .. } = self;
        let residual = self.backend.output_bytes(self.options.limits.step.rows, self.from.description().hidden);
        let block = if part.layers.is_some() { self.block_workspace() + self.ropes() } else { 0 };
        let head = if part.has_embedding_and_head { self.lm_head_workspace() } else { 0 };
        (residual + block + head) as u64
    }

    fn block_workspace(&self) -> usize {
        let (description, shards) = (self.from.description(), &self.loader.shards);
        let (hidden, dim, rows) = (description.hidden, description.head_dim, self.options.limits.step.rows);
        let heads = shards.heads.len() + 2 * shards.kv_heads.len();
        let (mut dense, mut experts) = (0, 0);
        for layer in self.layers {
            match layer.feed_forward {
                FeedForward::Dense { .. } => {
                    let own = shards.inner.len();
                    dense = self.backend.output_bytes(rows, 2 * own) + self.backend.buffer_bytes(rows, own);
                }
                FeedForward::Experts { inner, routing } => {
                    experts = self.backend.output_bytes(rows, routing.experts)
                        + self.backend.scratch_bytes(rows, hidden, inner, routing);
                }
            }
        }
        // The projection that is added to the residual stream, and the stacked q, k and v.
        let outputs = self.backend.output_bytes(rows, hidden) + self.backend.output_bytes(rows, heads * dim);
        let inputs =
            self.backend.buffer_bytes(rows, hidden) + self.backend.buffer_bytes(rows, shards.heads.len() * dim);
        outputs + inputs + dense + experts
    }

    fn lm_head_workspace(&self) -> usize {
        let (description, limits) = (self.from.description(), self.options.limits);
        let rows = limits.step.rows.max(limits.logit_rows);
        let mut logits = self.backend.output_bytes(limits.logit_rows, self.loader.shards.vocab.len());
        if self.rank.world() != WorldSize::ONE && self.rank.index() == 0 {
            logits += self.backend.output_bytes(limits.logit_rows, description.vocab);
        }
        let hidden = description.hidden;
        logits + self.backend.output_bytes(rows, hidden) + self.backend.buffer_bytes(rows, hidden)
    }

    fn ropes(&self) -> usize {
        let description = self.from.description();
        let mut distinct = Vec::new();
        for layer in self.layers {
            if !distinct.contains(&&layer.rope) {
                distinct.push(&layer.rope);
            }
        }
        distinct.len() * self.backend.rope_bytes(description.head_dim / 2, self.options.limits.positions)
    }
}
