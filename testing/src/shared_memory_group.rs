//! A group whose ranks are threads and the numbers that they sum.

use std::os::fd::OwnedFd;
use std::thread;

use collectives::shared_memory::{Epoch, GroupLimits, Segment, ShmComm};
use types::{Rank, WorldSize};

pub struct Group {
    pub segment: Segment,
    pub limits: GroupLimits,
    fd: OwnedFd,
}

impl Group {
    pub fn new(size: u16, elements_max: usize) -> Self {
        let limits = GroupLimits { world: WorldSize::new(size).unwrap(), elements_max };
        let (segment, fd) = Segment::create(limits).unwrap();
        Self { segment, limits, fd }
    }

    pub fn rank(&self, index: u16) -> Rank {
        self.limits.world.rank(index).unwrap()
    }

    pub fn fd(&self) -> OwnedFd {
        self.fd.try_clone().unwrap()
    }

    /// A communicator of the current epoch, over a new mapping.
    pub fn comm(&self, index: u16) -> ShmComm {
        self.comm_in(index, self.segment.epoch())
    }

    pub fn comm_in(&self, index: u16, epoch: Epoch) -> ShmComm {
        Segment::attach(self.fd(), self.limits).unwrap().join(self.rank(index), epoch).unwrap()
    }

    /// Runs `part` as every rank at once.
    pub fn all<T: Send>(&self, part: impl Fn(&mut ShmComm) -> T + Sync) -> Vec<T> {
        let comms: Vec<_> = self.limits.world.ranks().map(|rank| self.comm(rank.index() as u16)).collect();
        thread::scope(|scope| {
            let part = &part;
            let ranks: Vec<_> = comms.into_iter().map(|mut comm| scope.spawn(move || part(&mut comm))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// The values of `rank` in its `op`th operation: numbers of many magnitudes, whose sum depends on the order.
pub fn numbers(rank: Rank, op: usize, len: usize) -> Vec<f32> {
    let seed = (rank.index() as u64) << 48 ^ (op as u64) << 32;
    let number = |index: usize| {
        let bits = (seed ^ index as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bits = (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let magnitude = ((bits >> 60) as i32 - 8) as f32;
        ((bits >> 20) as u32 as f32 / u32::MAX as f32 - 0.5) * magnitude.exp2()
    };
    (0..len).map(number).collect()
}

/// The sum that all ranks must get, one rank after the other.
pub fn sum(ranks: impl Iterator<Item = Rank>, op: usize, len: usize) -> Vec<f32> {
    let add = |sums: Vec<f32>, terms: Vec<f32>| sums.iter().zip(&terms).map(|(sum, term)| sum + term).collect();
    ranks.map(|rank| numbers(rank, op, len)).reduce(add).unwrap()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
