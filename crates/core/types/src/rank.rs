//! Ranks of a tensor-parallel group. World size 1 is an ordinary value.

use std::fmt;
use std::num::NonZeroU16;
use std::ops::Range;

/// The number of processes that run one model by tensor parallelism. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorldSize(NonZeroU16);

/// The index of a process in a tensor-parallel group, always below its `WorldSize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    index: u16,
    world: WorldSize,
}

impl WorldSize {
    pub const ONE: Self = Self(NonZeroU16::MIN);

    pub fn new(size: u16) -> Option<Self> {
        NonZeroU16::new(size).map(Self)
    }

    pub fn get(self) -> usize {
        usize::from(self.0.get())
    }

    pub fn rank(self, index: u16) -> Option<Rank> {
        (index < self.0.get()).then_some(Rank { index, world: self })
    }

    pub fn ranks(self) -> impl Iterator<Item = Rank> {
        (0..self.0.get()).map(move |index| Rank { index, world: self })
    }
}

impl Rank {
    /// The only rank of a world of one.
    pub const SINGLE: Self = Self { index: 0, world: WorldSize::ONE };

    pub fn index(self) -> usize {
        usize::from(self.index)
    }

    pub fn world(self) -> WorldSize {
        self.world
    }

    /// This rank's shard of `total` units. The shards of all ranks are in order, disjoint, cover `0..total`, and differ in
    /// length by at most one unit; the first ranks have the longer ones.
    pub fn shard(self, total: usize) -> Range<usize> {
        let (world, index) = (self.world.get(), self.index());
        let (each, extra) = (total / world, total % world);
        let start = index * each + index.min(extra);
        start..start + each + usize::from(index < extra)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.world.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_always_below_its_world() {
        let world = WorldSize::new(3).unwrap();
        assert_eq!(world.rank(3), None);
        assert_eq!(world.ranks().count(), 3);
        assert_eq!(WorldSize::new(0), None);
    }

    #[test]
    fn shares_cover_everything_in_order_without_overlap() {
        for size in 1..6 {
            for total in 0..20 {
                let world = WorldSize::new(size).unwrap();
                let mut next = 0;
                for rank in world.ranks() {
                    let shard = rank.shard(total);
                    assert_eq!(shard.start, next);
                    assert!(shard.len() <= total / world.get() + 1);
                    next = shard.end;
                }
                assert_eq!(next, total);
            }
        }
    }
}
