//! `Seat`: one rank's place in a group, and the collectives on plain slices. Each is one or two phases of: publish in
//! the own slot, pass the barrier, read the slots of the others.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use kernels::{Form, HostWork};
use model::Rooms;
use types::{Rank, WorldSize};

use super::barrier::{self, Board as _, Generation, GroupError, Member, Word};
use super::loan::{Borrower, Lender};
use super::mapping::{Place, Room};
use super::segment::{Abort, Segment};
use crate::exchange::{BUNDLE, Runs, joint};

/// Elements that every rank may read beyond what sharing the sum would have it read, to save a barrier. With two ranks
/// sharing saves no reading at all.
const EXTRA_ELEMENTS_MAX: usize = 1 << 14;

/// Rows with fewer elements than this are summed and worked on by every rank: a barrier costs more.
const SHARED_ELEMENTS_MIN: usize = 1 << 15;

/// Elements of a long row that one thread copies at a time.
const COPY_ELEMENTS: usize = 1 << 14;

/// Elements summed at a time: they stay in the nearest cache.
const PIECE_ELEMENTS: usize = 1024;

/// All ranks call the same operations in the same order. After an error, what the slices hold is undefined. Dropped, a
/// seat ends its generation: the others shall not wait for a rank that is gone.
#[derive(Debug)]
pub struct Seat {
    segment: Segment,
    member: Member,
    has_rooms: bool,
    brought: Option<Brought>,
    /// How long others have worked on this rank's CPU.
    lent: Duration,
}

/// Where the others have brought rows that are to be summed.
#[derive(Clone, Copy, Debug)]
struct Brought {
    parity: usize,
    /// The element of a room that the rows begin at.
    at: usize,
}

impl Seat {
    pub(super) fn new(segment: Segment, member: Member) -> Self {
        Self { segment, member, has_rooms: true, brought: None, lent: Duration::ZERO }
    }

    /// Memory for the rows of [`Seat::bring_rows`] and of [`Seat::gather_rows`], which are read there then.
    pub fn rooms(&mut self) -> Option<Rooms> {
        std::mem::take(&mut self.has_rooms).then(|| self.segment.rooms(self.rank()))
    }

    pub fn rank(&self) -> Rank {
        self.member.rank()
    }

    pub fn generation(&self) -> Generation {
        self.member.generation()
    }

    /// What ends this seat's generation for all its ranks.
    pub fn abort(&self) -> Abort {
        self.segment.abort(self.generation())
    }

    /// What takes the CPUs that the others lend.
    pub fn borrower(&self) -> Borrower {
        Borrower::new(self.segment.clone(), self.rank(), self.generation())
    }

    /// How long others have worked on this rank's CPU, since the last call.
    pub fn take_lent(&mut self) -> Duration {
        std::mem::take(&mut self.lent)
    }

    /// The most elements of one exchange.
    pub fn elements_max(&self) -> usize {
        self.segment.mapping().layout().elements_max
    }

    /// Every rank's `values` become the sum of all, taken in the order of the ranks.
    pub fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), GroupError> {
        let world = self.rank().world().get();
        if world.saturating_sub(2).saturating_mul(values.len()) <= EXTRA_ELEMENTS_MAX {
            let parity = self.publish_all(Call::Sum, values)?;
            self.sum(|rank| (Place::Slot(rank, parity), 0), values);
        } else {
            let parity = self.publish_all(Call::Sum, values)?;
            let own = self.rank().share(values.len());
            self.sum(|rank| (Place::Slot(rank, parity), own.start), &mut values[own.clone()]);
            let parity = self.phase(Call::Summed, values.len(), |seat, parity| {
                seat.segment.mapping().put(seat.rank(), parity, own.start, &values[own.clone()]);
            })?;
            for rank in self.member.others() {
                let share = rank.share(values.len());
                self.segment.mapping().get(Place::Slot(rank, parity), share.start, &mut values[share]);
            }
        }
        self.member.confirm(self.segment.mapping())
    }

    /// Shows the others these rows of `cols` columns, which begin `at` elements after the first of a buffer. Returns the rows that this
    /// rank is to work on: its share, to be summed by [`Seat::sum_brought`]. If sharing does not pay, all of them are summed.
    pub fn bring_rows(
        &mut self,
        at: usize,
        cols: usize,
        values: &mut [f32],
    ) -> Result<Option<Range<usize>>, GroupError> {
        self.brought = None;
        let rows = values.len().checked_div(cols).unwrap_or(0);
        let Some(share) = self.row_shares(rows, cols) else { return self.all_reduce(values).map(|()| None) };
        let in_room = self.segment.mapping().is_in_room(self.rank(), Room::Brought, at, values);
        let parity = self.phase(Call::Scatter { in_room }, values.len(), |seat, parity| {
            for rank in seat.member.others().filter(|_| !in_room) {
                let rows = share(rank);
                let elements = rows.start * cols..rows.end * cols;
                seat.segment.mapping().put(seat.rank(), parity, elements.start, &values[elements]);
            }
        })?;
        self.brought = Some(Brought { parity, at });
        Ok(Some(share(self.rank())))
    }

    /// Adds to some of the values that it has brought, from the `start`th on, what the others have. Whether that was there is known
    /// when the rows have been gathered.
    pub fn sum_brought(&self, start: usize, values: &mut [f32]) {
        let Some(Brought { parity, at }) = self.brought else { return };
        let fits = self.segment.mapping().has_room(at + start, values.len());
        let brought = |rank| match fits && self.is_in_room(rank, parity) {
            true => (Place::Room(rank, Room::Brought), at + start),
            false => (Place::Slot(rank, parity), start),
        };
        self.sum(brought, values);
    }

    /// Whether the rows that `rank` shows are in its room.
    fn is_in_room(&self, rank: Rank, parity: usize) -> bool {
        self.segment.mapping().word(Word::Call(rank, parity)).load(Relaxed) & IN_ROOM != 0
    }

    /// Each rank has made what [`Seat::bring_rows`] gave it of these `rows`; afterwards it has all of them. `runs` copies.
    pub fn gather_rows(
        &mut self,
        rows: Range<usize>,
        cols: usize,
        made: Form<'_>,
        runs: &Runs<'_>,
    ) -> Result<(), GroupError> {
        let Some(share) = self.row_shares(rows.len(), cols) else { return Ok(()) };
        let Form { values, strips } = made;
        let place = |rank| {
            let share = share(rank);
            strips.place(rows.start + share.start..rows.start + share.end)
        };
        let in_room = self.segment.mapping().is_in_room(self.rank(), Room::Made, 0, values);
        self.gather(Call::Rows { in_room }, strips.len, place, values, runs)
    }

    /// The rows that each rank works on, if there are enough of them to be shared.
    fn row_shares(&self, rows: usize, cols: usize) -> Option<impl Fn(Rank) -> Range<usize> + use<>> {
        let (world, bundles) = (self.rank().world(), rows.div_ceil(BUNDLE));
        let pays = world != WorldSize::ONE && bundles >= world.get() && rows * cols >= SHARED_ELEMENTS_MIN;
        let share = move |rank: Rank| {
            let bundles = rank.share(bundles);
            bundles.start * BUNDLE..rows.min(bundles.end * BUNDLE)
        };
        pays.then_some(share)
    }

    /// `values` are rows of `cols` columns, of which each rank has filled its `share`; afterwards it has all of them.
    pub fn all_gather(
        &mut self,
        cols: usize,
        share: impl Fn(Rank) -> Range<usize> + Sync,
        values: &mut [f32],
    ) -> Result<(), GroupError> {
        let runs = |values: &mut [f32], length: usize, work: &HostWork<'_>| {
            values.chunks_mut(length).enumerate().for_each(|(run, values)| work(run, values));
        };
        self.gather(Call::Gather, cols, share, values, &runs)
    }

    /// Each rank has made its `share` of the `cols` columns of every row; afterwards it has all shares.
    fn gather(
        &mut self,
        call: Call,
        cols: usize,
        share: impl Fn(Rank) -> Range<usize> + Sync,
        values: &mut [f32],
        runs: &Runs<'_>,
    ) -> Result<(), GroupError> {
        assert!(cols > 0 && values.len().is_multiple_of(cols), "{} elements in rows of {cols}", values.len());
        let made: usize = self.rank().world().ranks().map(|rank| share(rank).len()).sum();
        let in_room = matches!(call, Call::Rows { in_room: true });
        let parity = self.phase(call, values.len() / cols * made, |seat, parity| {
            let (own, mapping) = (seat.rank(), seat.segment.mapping());
            let put = |_: Rank, at: Spot, values: &mut [f32]| mapping.put(own, parity, at.of_share, values);
            if !in_room {
                for_shares(cols, || std::iter::once(own), &share, values, runs, &put);
            }
        })?;
        let (member, mapping) = (&self.member, self.segment.mapping());
        let fits = mapping.has_room(0, values.len());
        let get = |rank: Rank, at: Spot, values: &mut [f32]| match fits && self.is_in_room(rank, parity) {
            true => mapping.get(Place::Room(rank, Room::Made), at.of_all, values),
            false => mapping.get(Place::Slot(rank, parity), at.of_share, values),
        };
        for_shares(cols, || member.others(), &share, values, runs, &get);
        member.confirm(mapping)
    }

    /// Each rank brings `rows` rows of its `share` of `cols` columns. Who has a `whole` gets all of them there.
    pub fn gather_columns(
        &mut self,
        [rows, cols]: [usize; 2],
        share: impl Fn(Rank) -> Range<usize>,
        part: &[f32],
        whole: Option<&mut [f32]>,
    ) -> Result<(), GroupError> {
        let own = share(self.rank());
        assert_eq!(part.len(), rows * own.len(), "{rows} rows of {own:?}");
        let parity = self.phase(Call::Columns, rows * cols, |seat, parity| {
            seat.segment.mapping().put(seat.rank(), parity, 0, part);
        })?;
        for (row, values) in whole.into_iter().flat_map(|whole| whole.chunks_exact_mut(cols)).enumerate() {
            values[own.clone()].copy_from_slice(&part[row * own.len()..][..own.len()]);
            for rank in self.member.others() {
                let share = share(rank);
                self.segment.mapping().get(Place::Slot(rank, parity), row * share.len(), &mut values[share]);
            }
        }
        self.member.confirm(self.segment.mapping())
    }

    /// Every rank's `values` become those of `root`.
    pub fn broadcast(&mut self, root: Rank, values: &mut [f32]) -> Result<(), GroupError> {
        if root.world() != self.rank().world() {
            return Err(GroupError::World(root));
        }
        let parity = self.phase(Call::Broadcast(root), values.len(), |seat, parity| {
            if seat.rank() == root {
                seat.segment.mapping().put(root, parity, 0, values);
            }
        })?;
        if self.rank() != root {
            self.segment.mapping().get(Place::Slot(root, parity), 0, values);
        }
        self.member.confirm(self.segment.mapping())
    }

    fn publish_all(&mut self, call: Call, values: &[f32]) -> Result<usize, GroupError> {
        self.phase(call, values.len(), |seat, parity| seat.segment.mapping().put(seat.rank(), parity, 0, values))
    }

    /// Publishes and passes the barrier. Returns the parity of the slots that can be read until the next phase.
    fn phase(&mut self, call: Call, elements: usize, publish: impl FnOnce(&Self, usize)) -> Result<usize, GroupError> {
        let elements_max = self.elements_max();
        if elements > elements_max {
            return Err(GroupError::TooLarge { elements, elements_max });
        }
        barrier::check(self.segment.mapping(), self.generation())?;
        let parity = self.member.parity();
        publish(self, parity);
        let passed = self.pass(call, elements, parity);
        if let Err(GroupError::OutOfTurn(_) | GroupError::Mismatch(_)) = passed {
            // The ranks disagree about where they are: nothing good can follow for any of them.
            self.abort().stop();
        }
        passed.map(|()| parity)
    }

    fn pass(&mut self, call: Call, elements: usize, parity: usize) -> Result<(), GroupError> {
        let (board, call) = (self.segment.mapping(), call.word(elements));
        // The barrier publishes it with the slot.
        board.word(Word::Call(self.member.rank(), parity)).store(call, Relaxed);
        let lender = Lender::new(board, self.member.rank(), self.member.next());
        let passed = self.member.pass(&lender);
        self.lent += lender.end();
        passed?;
        let is_other = |&rank: &Rank| (board.word(Word::Call(rank, parity)).load(Relaxed) ^ call) & !IN_ROOM != 0;
        self.member.others().find(is_other).map_or(Ok(()), |rank| Err(GroupError::Mismatch(rank)))
    }

    /// Replaces `values`, which are this rank's own, with the sum over all ranks in their order. `brought` says where another rank has
    /// them, and which element there is the first.
    fn sum(&self, brought: impl Fn(Rank) -> (Place, usize), values: &mut [f32]) {
        let (mapping, own_index) = (self.segment.mapping(), self.rank().index());
        // Two terms may change places, so that only several before this rank's own need be summed apart.
        let (several, mut before) = (own_index > 1, [0.0; PIECE_ELEMENTS]);
        for (piece, own) in values.chunks_mut(PIECE_ELEMENTS).enumerate() {
            let first = piece * PIECE_ELEMENTS;
            if several {
                let before = &mut before[..own.len()];
                for rank in self.member.others().take(own_index) {
                    let (place, at) = brought(rank);
                    match rank.index() {
                        0 => mapping.get(place, at + first, before),
                        _ => mapping.add(place, at + first, before),
                    }
                }
                own.iter_mut().zip(before).for_each(|(own, before)| *own += *before);
            }
            for rank in self.member.others().skip(if several { own_index } else { 0 }) {
                let (place, at) = brought(rank);
                mapping.add(place, at + first, own);
            }
        }
    }
}

/// Where some of a rank's values are: after so many of its own, and of all.
#[derive(Clone, Copy)]
struct Spot {
    of_share: usize,
    of_all: usize,
}

/// Calls `work` with what each of these ranks has of every row of `cols` columns, and where that is. If there is but one row, what a
/// rank has of it goes in pieces.
fn for_shares<I: Iterator<Item = Rank>>(
    cols: usize,
    ranks: impl Fn() -> I + Sync,
    share: &(impl Fn(Rank) -> Range<usize> + Sync),
    values: &mut [f32],
    runs: &Runs<'_>,
    work: &(impl Fn(Rank, Spot, &mut [f32]) + Sync),
) {
    if values.len() > cols {
        runs(values, cols, &|row, values| {
            for rank in ranks() {
                let share = share(rank);
                let at = Spot { of_share: row * share.len(), of_all: row * cols + share.start };
                work(rank, at, &mut values[share]);
            }
        });
    } else {
        for rank in ranks() {
            let share = share(rank);
            let first = share.start;
            runs(&mut values[share], COPY_ELEMENTS, &|piece, values| {
                let of_share = piece * COPY_ELEMENTS;
                work(rank, Spot { of_share, of_all: first + of_share }, values);
            });
        }
    }
}

joint!(Seat, GroupError);

impl Drop for Seat {
    fn drop(&mut self) {
        self.abort().lost(self.rank());
    }
}

/// What a phase does. The ranks compare it, so that a disagreement is an error and not a wrong sum.
#[derive(Clone, Copy, Debug)]
enum Call {
    Sum,
    Summed,
    Scatter { in_room: bool },
    Rows { in_room: bool },
    Gather,
    Columns,
    Broadcast(Rank),
}

/// Set in the word of a rank whose rows are in one of its rooms. The others' need not be.
const IN_ROOM: u64 = 1 << 63;

impl Call {
    /// Together with the number of elements. Zero, the word of who has called nothing yet, is none of them.
    fn word(self, elements: usize) -> u64 {
        let in_room = matches!(self, Self::Scatter { in_room: true } | Self::Rows { in_room: true });
        let in_room = if in_room { IN_ROOM } else { 0 };
        let (kind, root) = match self {
            Self::Sum => (1, 0),
            Self::Summed => (2, 0),
            Self::Gather => (3, 0),
            Self::Columns => (5, 0),
            Self::Scatter { .. } => (6, 0),
            Self::Rows { .. } => (7, 0),
            Self::Broadcast(root) => (4, root.index() as u64),
        };
        in_room | kind << 56 | root << 40 | elements as u64
    }
}
