//! `ShmComm`: one rank's communicator over shared memory. Each collective is one or two phases: copy into the own slot,
//! pass the barrier, read the slots of the other ranks.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use types::{Rank, WorldSize};

use super::barrier::{self, BarrierMember, Epoch, SharedState as _, Word};
use super::segment::{Abort, Segment};
use crate::comm::{CommError, Communicator};

/// Elements that a rank may read in excess of its shard of a sum, to save a barrier. With two ranks shards save no
/// reading.
const EXTRA_ELEMENTS_MAX: usize = 1 << 14;

/// Rows with fewer elements than this are summed by every rank: a barrier costs more.
const SCATTER_ELEMENTS_MIN: usize = 1 << 15;

/// Elements summed at a time: they stay in the first-level cache.
const SUM_ELEMENTS: usize = 1024;

#[derive(Debug)]
pub struct ShmComm {
    segment: Segment,
    member: BarrierMember,
}

impl ShmComm {
    pub(super) fn new(segment: Segment, member: BarrierMember) -> Self {
        Self { segment, member }
    }

    pub fn epoch(&self) -> Epoch {
        self.member.epoch()
    }

    /// Aborts the epoch on all ranks.
    pub fn abort(&self) -> Abort {
        self.segment.abort(self.epoch())
    }

    /// The rows that `rank` owns of `rows` rows of `cols` columns: all, if there are too few to scatter.
    fn rows_of(rank: Rank, rows: usize, cols: usize) -> Range<usize> {
        if Self::is_scattered(rank.world(), rows, cols) { rank.shard(rows) } else { 0..rows }
    }

    fn is_scattered(world: WorldSize, rows: usize, cols: usize) -> bool {
        world != WorldSize::ONE && rows >= world.get() && rows * cols >= SCATTER_ELEMENTS_MIN
    }

    /// Writes the own slot by `publish` and passes the barrier. Returns the parity of the slots, readable until the
    /// next phase.
    fn phase(&mut self, call: ShmOp, elements: usize, publish: impl FnOnce(&Self, usize)) -> Result<usize, CommError> {
        let elements_max = self.elements_max();
        if elements > elements_max {
            return Err(CommError::TooLarge { elements, elements_max });
        }
        barrier::check(self.segment.mapping(), self.epoch())?;
        let parity = self.member.parity();
        publish(self, parity);
        let passed = self.pass(call, elements, parity);
        if let Err(CommError::OutOfTurn(_) | CommError::Mismatch(_)) = passed {
            // The ranks run different operations, so all further results would be wrong.
            self.abort().stop();
        }
        passed.map(|()| parity)
    }

    fn pass(&mut self, call: ShmOp, elements: usize, parity: usize) -> Result<(), CommError> {
        let (state, call) = (self.segment.mapping(), call.word(elements));
        // The barrier's release makes it visible together with the slot.
        state.word(Word::ShmOp(self.member.rank(), parity)).store(call, Relaxed);
        self.member.pass(state)?;
        let is_other = |&rank: &Rank| state.word(Word::ShmOp(rank, parity)).load(Relaxed) != call;
        self.member.others().find(is_other).map_or(Ok(()), |rank| Err(CommError::Mismatch(rank)))
    }

    /// Replaces this rank's own `values` with the sum over all ranks, in their order. The other ranks have their values
    /// in their slots, from element `first` on.
    fn sum(&self, parity: usize, first: usize, values: &mut [f32]) {
        let (mapping, own_index) = (self.segment.mapping(), self.rank().index());
        // The sum of two terms does not depend on their order, so a separate sum is needed only if several ranks
        // precede this one.
        let (several, mut before) = (own_index > 1, [0.0; SUM_ELEMENTS]);
        for (index, own) in values.chunks_mut(SUM_ELEMENTS).enumerate() {
            let at = first + index * SUM_ELEMENTS;
            if several {
                let before = &mut before[..own.len()];
                for rank in self.member.others().take(own_index) {
                    match rank.index() {
                        0 => mapping.get(rank, parity, at, before),
                        _ => mapping.add(rank, parity, at, before),
                    }
                }
                own.iter_mut().zip(before).for_each(|(own, before)| *own += *before);
            }
            for rank in self.member.others().skip(if several { own_index } else { 0 }) {
                mapping.add(rank, parity, at, own);
            }
        }
    }
}

impl Communicator for ShmComm {
    fn rank(&self) -> Rank {
        self.member.rank()
    }

    fn elements_max(&self) -> usize {
        self.segment.mapping().layout().elements_max
    }

    fn leave(&self) {
        self.abort().lost(self.rank());
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let world = self.rank().world().get();
        let parity = self.phase(ShmOp::Sum, values.len(), |comm, parity| {
            comm.segment.mapping().put(comm.rank(), parity, 0, values);
        })?;
        if world.saturating_sub(2).saturating_mul(values.len()) <= EXTRA_ELEMENTS_MAX {
            self.sum(parity, 0, values);
        } else {
            let own = self.rank().shard(values.len());
            self.sum(parity, own.start, &mut values[own.clone()]);
            let parity = self.phase(ShmOp::Summed, values.len(), |comm, parity| {
                comm.segment.mapping().put(comm.rank(), parity, own.start, &values[own.clone()]);
            })?;
            for rank in self.member.others() {
                let shard = rank.shard(values.len());
                self.segment.mapping().get(rank, parity, shard.start, &mut values[shard]);
            }
        }
        self.member.confirm(self.segment.mapping())
    }

    fn reduce_scatter_rows(&mut self, cols: usize, values: &mut [f32]) -> Result<Range<usize>, CommError> {
        let rows = values.len().checked_div(cols).unwrap_or(0);
        if !Self::is_scattered(self.rank().world(), rows, cols) {
            return self.all_reduce(values).map(|()| 0..rows);
        }
        let elements = |rank: Rank| {
            let rows = Self::rows_of(rank, rows, cols);
            rows.start * cols..rows.end * cols
        };
        let parity = self.phase(ShmOp::Scatter, values.len(), |comm, parity| {
            for rank in comm.member.others() {
                comm.segment.mapping().put(comm.rank(), parity, elements(rank).start, &values[elements(rank)]);
            }
        })?;
        let own = elements(self.rank());
        self.sum(parity, own.start, &mut values[own.clone()]);
        self.member.confirm(self.segment.mapping())?;
        Ok(Self::rows_of(self.rank(), rows, cols))
    }

    fn all_gather_rows(&mut self, cols: usize, values: &mut [f32]) -> Result<(), CommError> {
        let rows = values.len().checked_div(cols).unwrap_or(0);
        if !Self::is_scattered(self.rank().world(), rows, cols) {
            return Ok(());
        }
        let elements = |rank: Rank| {
            let rows = Self::rows_of(rank, rows, cols);
            rows.start * cols..rows.end * cols
        };
        let own = elements(self.rank());
        let parity = self.phase(ShmOp::Rows, values.len(), |comm, parity| {
            comm.segment.mapping().put(comm.rank(), parity, own.start, &values[own.clone()]);
        })?;
        for rank in self.member.others() {
            let theirs = elements(rank);
            self.segment.mapping().get(rank, parity, theirs.start, &mut values[theirs]);
        }
        self.member.confirm(self.segment.mapping())
    }

    fn gather_columns(
        &mut self,
        [rows, cols]: [usize; 2],
        part: &[f32],
        whole: Option<&mut [f32]>,
    ) -> Result<(), CommError> {
        let own = self.rank().shard(cols);
        assert_eq!(part.len(), rows * own.len(), "{rows} rows of {own:?}");
        let parity = self.phase(ShmOp::Columns, rows * cols, |comm, parity| {
            comm.segment.mapping().put(comm.rank(), parity, 0, part);
        })?;
        for (row, values) in whole.into_iter().flat_map(|whole| whole.chunks_exact_mut(cols)).enumerate() {
            values[own.clone()].copy_from_slice(&part[row * own.len()..][..own.len()]);
            for rank in self.member.others() {
                let shard = rank.shard(cols);
                self.segment.mapping().get(rank, parity, row * shard.len(), &mut values[shard]);
            }
        }
        self.member.confirm(self.segment.mapping())
    }
}

impl Drop for ShmComm {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The operation of a phase. The ranks compare it, so that a disagreement is an error and not a wrong sum.
#[derive(Clone, Copy, Debug)]
enum ShmOp {
    Sum,
    Summed,
    Scatter,
    Rows,
    Columns,
}

impl ShmOp {
    /// The operation with its number of elements. It is never zero, which is the word of a rank without an operation so
    /// far.
    fn word(self, elements: usize) -> u64 {
        (self as u64 + 1) << 56 | elements as u64
    }
}
