//! `RankShards`: the shard of each model dimension that one rank holds, and the resulting slice of every tensor. The shards
//! of all ranks cover everything. They overlap only if there are more ranks than KV heads; then several ranks hold the same
//! KV head.

use std::ops::Range;

use types::{Rank, WorldSize};

use crate::architecture::{Axis, Split};
use crate::description::{Description, FeedForward};

#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    #[error(
        "{heads} query heads over {kv_heads} key/value heads, in blocks of {block} elements, cannot be shared by {world} ranks"
    )]
    Heads { heads: usize, kv_heads: usize, block: usize, world: usize },
    #[error("{inner} inner features in blocks of {block} cannot be shared by {world} ranks")]
    Inner { inner: usize, block: usize, world: usize },
}

/// Block sizes of the number formats, in elements of a row. A shard must not start or end within a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowBlocks {
    /// Of the attention's output projection.
    pub output: usize,
    /// Of the down projection of dense layers.
    pub down: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankShards {
    head_dim: usize,
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    /// Inner features of the dense layers; empty if there are none.
    pub inner: Range<usize>,
    /// May be empty: if there are no experts, or fewer than ranks.
    pub experts: Range<usize>,
    /// Rows of the embedding and of the head. May be empty if there are fewer rows than ranks.
    pub vocab: Range<usize>,
}

/// Rows and columns of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl RankShards {
    pub fn new(description: &Description, blocks: RowBlocks, rank: Rank) -> Result<Self, SplitError> {
        let Description { heads, kv_heads, head_dim, vocab, .. } = *description;
        let world = rank.world().get();
        let (mut inner, mut experts) = (0, 0);
        for layer in &description.layers {
            match layer.feed_forward {
                FeedForward::Dense { inner: dense } => inner = dense,
                FeedForward::Experts { routing, .. } => experts = routing.experts,
            }
        }
        let (heads, kv_heads) = shard_heads(heads, kv_heads, head_dim, blocks.output, rank)
            .ok_or(SplitError::Heads { heads, kv_heads, block: blocks.output, world })?;
        if inner > 0 && world > inner.div_ceil(blocks.down) {
            return Err(SplitError::Inner { inner, block: blocks.down, world });
        }
        let inner = shard_units(rank, inner, blocks.down);
        Ok(Self { head_dim, heads, kv_heads, inner, experts: rank.shard(experts), vocab: rank.shard(vocab) })
    }

    /// This rank's slice of a `[rows, cols]` matrix (or of a vector: one column).
    pub fn slice(&self, split: Split, [rows, cols]: [usize; 2]) -> Slice {
        match split {
            Split::Column(axis) => Slice { rows: self.features(axis), cols: 0..cols },
            Split::Row(axis) => Slice { rows: 0..rows, cols: self.features(axis) },
            Split::Experts | Split::Replicated => Slice { rows: 0..rows, cols: 0..cols },
        }
    }

    fn features(&self, axis: Axis) -> Range<usize> {
        let heads = |range: &Range<usize>| range.start * self.head_dim..range.end * self.head_dim;
        match axis {
            Axis::Heads => heads(&self.heads),
            Axis::KvHeads => heads(&self.kv_heads),
            Axis::Inner => self.inner.clone(),
        }
    }
}

pub(crate) fn least_common_multiple(a: usize, b: usize) -> usize {
    a / greatest_common_divisor(a, b) * b
}

/// The query heads of a rank, and the KV heads that they read: whole groups if there are enough KV heads, else parts of a
/// group. `None` if some rank would have no head, or a block would be split between two ranks.
fn shard_heads(
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block: usize,
    rank: Rank,
) -> Option<(Range<usize>, Range<usize>)> {
    let (world, group) = (rank.world().get(), heads / kv_heads);
    if world == 1 {
        return Some((0..heads, 0..kv_heads));
    }
    let unit = block / greatest_common_divisor(block, head_dim); // query heads that are whole blocks
    let kv_unit = unit / greatest_common_divisor(unit, group);
    if world <= kv_heads.div_ceil(kv_unit) {
        let kv = shard_units(rank, kv_heads, kv_unit);
        return Some((kv.start * group..kv.end * group, kv));
    }
    // All ranks must decide the same, so the check is for the KV head that most ranks share.
    if world <= kv_heads || kv_unit > 1 || world.div_ceil(kv_heads) > group / unit {
        return None;
    }
    let groups = WorldSize::new(u16::try_from(kv_heads).ok()?)?;
    let (kv, ranks) = groups.ranks().map(|g| (g.index(), g.shard(world))).find(|(_, r)| r.contains(&rank.index()))?;
    let seats = WorldSize::new(u16::try_from(ranks.len()).ok()?)?;
    let own = seats.rank(u16::try_from(rank.index() - ranks.start).ok()?)?.shard(group / unit);
    let first = kv * group;
    Some((first + own.start * unit..first + own.end * unit, kv..kv + 1))
}

/// A rank's shard of `total` in whole units; the last unit may be incomplete.
fn shard_units(rank: Rank, total: usize, unit: usize) -> Range<usize> {
    let units = rank.shard(total.div_ceil(unit));
    (units.start * unit).min(total)..(units.end * unit).min(total)
}

fn greatest_common_divisor(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn description(model_type: &str) -> Description {
        let config = json!({
            "model_type": model_type, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 100, "vocab_size": 10,
            "max_position_embeddings": 64, "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "mlp_only_layers": [1],
        });
        Description::from_config(&config).unwrap()
    }

    /// Every element of every tensor is on some rank; on more than one only if it is replicated, or if it belongs to a KV
    /// head and there are more ranks than KV heads.
    #[test]
    fn the_slices_of_all_ranks_make_up_every_tensor() {
        for model_type in ["qwen2", "qwen3", "mistral", "qwen3_moe", "gemma3"] {
            let description = description(model_type);
            for (tensor, world) in description.architecture.tensors.iter().flat_map(|t| (1..=6).map(move |w| (t, w))) {
                let shape = crate::load::shape_of(&description, tensor.role, 100);
                let mut holders = vec![0usize; shape[0] * shape[1]];
                let world = WorldSize::new(world).unwrap();
                for rank in world.ranks() {
                    let shards = RankShards::new(&description, RowBlocks { output: 1, down: 4 }, rank).unwrap();
                    let Slice { rows, cols } = shards.slice(tensor.split, shape);
                    rows.for_each(|row| holders[row * shape[1]..][cols.clone()].iter_mut().for_each(|h| *h += 1));
                }
                let right = |held: usize| match tensor.split {
                    Split::Replicated | Split::Experts => held == world.get(),
                    Split::Column(Axis::KvHeads) if world.get() > description.kv_heads => held >= 1,
                    _ => held == 1,
                };
                assert!(holders.iter().all(|held| right(*held)), "{model_type} {tensor:?} over {}", world.get());
            }
        }
    }

    #[test]
    fn experts_are_dealt_out_whole_and_once() {
        let description = description("qwen3_moe");
        let world = WorldSize::new(4).unwrap();
        let blocks = RowBlocks { output: 1, down: 1 };
        let dealt = world.ranks().flat_map(|rank| RankShards::new(&description, blocks, rank).unwrap().experts);
        assert!(dealt.eq(0..7));
    }

    fn heads(
        heads: usize,
        kv: usize,
        dim: usize,
        block: usize,
        world: u16,
    ) -> Option<Vec<(Range<usize>, Range<usize>)>> {
        WorldSize::new(world).unwrap().ranks().map(|rank| shard_heads(heads, kv, dim, block, rank)).collect()
    }

    /// Checks that the ranks cover the query heads once and in order, that each rank's query heads read exactly its KV
    /// heads in equal groups, and that no block is split.
    fn check(total: usize, kv: usize, dim: usize, block: usize, world: u16) {
        let Some(shards) = heads(total, kv, dim, block, world) else { return };
        let (group, mut next) = (total / kv, 0);
        for (query, keys) in &shards {
            assert_eq!(query.start, next, "{total}/{kv} world {world}");
            assert!(!query.is_empty());
            assert_eq!((query.start / group, (query.end - 1) / group + 1), (keys.start, keys.end));
            assert!(query.len().is_multiple_of(keys.len()));
            assert!((query.start * dim).is_multiple_of(block));
            next = query.end;
        }
        assert_eq!(next, total);
    }

    #[test]
    fn the_ranks_cover_all_heads_once_and_read_only_their_own_keys() {
        for (kv, group) in [(1, 1), (1, 7), (2, 4), (3, 3), (4, 2), (8, 4), (5, 1)] {
            for dim in [16, 64, 128] {
                for block in [1, 32, 256] {
                    (1..=12).for_each(|world| check(kv * group, kv, dim, block, world));
                }
            }
        }
    }

    #[test]
    fn plain_formats_can_be_shared_by_as_many_ranks_as_there_are_query_heads() {
        assert!((1..=8).all(|world| heads(8, 2, 64, 1, world).is_some()));
        assert!(heads(8, 2, 64, 1, 9).is_none());
    }

    #[test]
    fn a_split_is_refused_on_every_rank_or_on_none() {
        for (world, kv, group, block) in [(5, 2, 2, 1), (9, 2, 4, 1), (7, 3, 3, 32), (3, 8, 1, 256), (5, 2, 8, 256)] {
            let ranks = WorldSize::new(world).unwrap();
            let verdicts = ranks.ranks().map(|rank| shard_heads(kv * group, kv, 64, block, rank).is_some());
            let verdicts: Vec<bool> = verdicts.collect();
            assert!(verdicts.windows(2).all(|pair| pair[0] == pair[1]), "{world} ranks: {verdicts:?}");
        }
    }

    #[test]
    fn key_heads_are_replicated_when_there_are_fewer_than_ranks() {
        let shards = heads(4, 2, 64, 1, 4).unwrap();
        assert_eq!(shards, [(0..1, 0..1), (1..2, 0..1), (2..3, 1..2), (3..4, 1..2)]);
    }

    #[test]
    fn a_share_that_would_cut_a_block_is_refused() {
        assert!(heads(8, 8, 64, 256, 2).is_some());
        assert!(heads(8, 8, 64, 256, 3).is_none());
    }

    #[test]
    fn an_uneven_inner_dimension_is_cut_between_blocks() {
        let world = WorldSize::new(3).unwrap();
        let shards: Vec<_> = world.ranks().map(|rank| shard_units(rank, 1536 + 32, 32)).collect();
        assert_eq!(shards, [0..544, 544..1056, 1056..1568]);
    }
}
