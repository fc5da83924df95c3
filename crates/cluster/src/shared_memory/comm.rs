//! `ShmComm`: one rank's membership in a group on shared memory. Each collective is one or two phases of: copy into the own slot, pass the
//! barrier, read the slots of the others.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use types::{Rank, WorldSize};

use super::barrier::{self, Epoch, Member, SharedState as _, Word};
use super::segment::{Abort, Segment};
use crate::comm::{CommError, Communicator};

/// Elements that every rank may read beyond its shard of a sum, to save a barrier. With two ranks a shard saves no reading at all.
const EXTRA_ELEMENTS_MAX: usize = 1 << 14;

/// Rows with fewer elements than this are summed by every rank: a barrier costs more.
const SCATTER_ELEMENTS_MIN: usize = 1 << 15;

/// Elements summed at a time: they stay in the first-level cache.
const SUM_ELEMENTS: usize = 1024;

#[derive(Debug)]
pub struct ShmComm {
    segment: Segment,
    member: Member,
}

impl ShmComm {
    pub(super) fn new(segment: Segment, member: Member) -> Self {
        Self { segment, member }
    }

    pub fn epoch(&self) -> Epoch {
        self.member.epoch()
    }

    /// What ends this group's epoch for all its ranks.
    pub fn abort(&self) -> Abort {
        self.segment.abort(self.epoch())
    }

    /// The rows that `rank` owns of `rows` rows of `cols` columns: all, if they are not worth scattering.
    fn rows_of(rank: Rank, rows: usize, cols: usize) -> Range<usize> {
        if Self::is_scattered(rank.world(), rows, cols) { rank.shard(rows) } else { 0..rows }
    }

    fn is_scattered(world: WorldSize, rows: usize, cols: usize) -> bool {
        world != WorldSize::ONE && rows >= world.get() && rows * cols >= SCATTER_ELEMENTS_MIN
    }

    /// Publishes and passes the barrier. Returns the parity of the slots that can be read until the next phase.
    fn phase(&mut self, call: Call, elements: usize, publish: impl FnOnce(&Self, usize)) -> Result<usize, CommError> {
        let elements_max = self.elements_max();
        if elements > elements_max {
            return Err(CommError::TooLarge { elements, elements_max });
        }
        barrier::check(self.segment.mapping(), self.epoch())?;
        let parity = self.member.parity();
        publish(self, parity);
        let passed = self.pass(call, elements, parity);
        if let Err(CommError::OutOfTurn(_) | CommError::Mismatch(_)) = passed {
            // The ranks disagree about where they are: nothing good can follow for any of them.
            self.abort().stop();
        }
        passed.map(|()| parity)
    }

    fn pass(&mut self, call: Call, elements: usize, parity: usize) -> Result<(), CommError> {
        let (board, call) = (self.segment.mapping(), call.word(elements));
        // The barrier publishes it with the slot.
        board.word(Word::Call(self.member.rank(), parity)).store(call, Relaxed);
        self.member.pass(board)?;
        let is_other = |&rank: &Rank| board.word(Word::Call(rank, parity)).load(Relaxed) != call;
        self.member.others().find(is_other).map_or(Ok(()), |rank| Err(CommError::Mismatch(rank)))
    }

    /// Replaces `values`, which are this rank's own, with the sum over all ranks in their order. The other ranks have them in their slots,
    /// from element `first` on.
    fn sum(&self, parity: usize, first: usize, values: &mut [f32]) {
        let (mapping, own_index) = (self.segment.mapping(), self.rank().index());
        // The sum of two terms does not depend on their order, so only the terms of several ranks before this one are summed apart.
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
        let parity = self.phase(Call::Sum, values.len(), |comm, parity| {
            comm.segment.mapping().put(comm.rank(), parity, 0, values);
        })?;
        if world.saturating_sub(2).saturating_mul(values.len()) <= EXTRA_ELEMENTS_MAX {
            self.sum(parity, 0, values);
        } else {
            let own = self.rank().shard(values.len());
            self.sum(parity, own.start, &mut values[own.clone()]);
            let parity = self.phase(Call::Summed, values.len(), |comm, parity| {
                comm.segment.mapping().put(comm.rank(), parity, own.start, &values[own.clone()]);
            })?;
            for rank in self.member.others() {
                let share = rank.shard(values.len());
                self.segment.mapping().get(rank, parity, share.start, &mut values[share]);
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
        let parity = self.phase(Call::Scatter, values.len(), |comm, parity| {
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
        let parity = self.phase(Call::Rows, values.len(), |comm, parity| {
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
        let parity = self.phase(Call::Columns, rows * cols, |comm, parity| {
            comm.segment.mapping().put(comm.rank(), parity, 0, part);
        })?;
        for (row, values) in whole.into_iter().flat_map(|whole| whole.chunks_exact_mut(cols)).enumerate() {
            values[own.clone()].copy_from_slice(&part[row * own.len()..][..own.len()]);
            for rank in self.member.others() {
                let share = rank.shard(cols);
                self.segment.mapping().get(rank, parity, row * share.len(), &mut values[share]);
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

/// What a phase does. The ranks compare it, so that a disagreement is an error and not a wrong sum.
#[derive(Clone, Copy, Debug)]
enum Call {
    Sum,
    Summed,
    Scatter,
    Rows,
    Columns,
}

impl Call {
    /// Together with the number of elements. Zero, the word of a rank that has called nothing yet, is none of them.
    fn word(self, elements: usize) -> u64 {
        (self as u64 + 1) << 56 | elements as u64
    }
}
