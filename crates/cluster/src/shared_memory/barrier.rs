//! The barrier of a group, its abort and its epochs, on words that lie anywhere: in a mapping, or in a model
//! checker that tries their interleavings. It moves no data. See the parent module for the argument why it is right.

use std::fmt;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};

use types::{Rank, WorldSize};

use crate::comm::CommError;

/// Which forming of a group. It grows each time that the group is formed anew on the same segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u32);

impl Epoch {
    pub(super) const FIRST: Self = Self(1);
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The words of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// A [`Stamp`]: the present epoch, and 0 or why it ended.
    State,
    /// A [`Stamp`], written by this rank alone: how many barriers it has arrived at.
    Arrived(Rank),
    /// The epoch in which this rank is parked or about to be; 0 while it is awake.
    Asleep(Rank),
    /// What this rank does in the phases of this parity.
    Call(Rank, usize),
}

/// An atomic number. The orderings are arguments, so that a model checker sees those that are used.
pub(super) trait Atomic<V> {
    fn load(&self, order: Ordering) -> V;
    fn swap(&self, value: V, order: Ordering) -> V;
    fn compare_exchange(&self, from: V, to: V, success: Ordering, failure: Ordering) -> Result<V, V>;
    fn fetch_add(&self, value: V, order: Ordering) -> V;
    fn fetch_max(&self, value: V, order: Ordering) -> V;
}

/// Gives the atomics of a module the trait.
macro_rules! atomics {
    ($($atomic:ty: $value:ty),*) => {$(
        impl $crate::shared_memory::barrier::Atomic<$value> for $atomic {
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }
            fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(from, to, success, failure)
            }
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }
            fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                self.fetch_max(value, order)
            }
        }
    )*};
}
pub(super) use atomics;

/// Where the words of a group lie, and how to wait there.
pub(super) trait SharedState {
    type Word: Atomic<u64>;
    type Bell: Atomic<u32>;

    fn world(&self) -> WorldSize;
    fn word(&self, word: Word) -> &Self::Word;
    /// What parked ranks sleep on. It changes whenever one of them may have to look again.
    fn bell(&self) -> &Self::Bell;
    fn fence(&self, order: Ordering);
    /// One turn of waiting, the `turn`th: false when it is time to park instead.
    fn pause(&self, turn: u32) -> bool;
    /// Sleeps until woken if the bell still shows `seen`. May return for no reason, and must after a while if memory
    /// can be corrupted: then a wake may be missing.
    fn park(&self, seen: u32);
    /// Wakes all who are parked.
    fn wake(&self);

    fn ring(&self) {
        self.bell().fetch_add(1, Release);
        self.wake();
    }
}

/// Why an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Aborted,
    Lost(Rank),
}

impl Cause {
    fn number(self) -> u32 {
        match self {
            Self::Aborted => 1,
            Self::Lost(rank) => 2 + rank.index() as u32,
        }
    }

    /// A number that means nothing still ends the epoch.
    fn error(number: u32, world: WorldSize) -> CommError {
        let rank =
            number.checked_sub(2).and_then(|index| u16::try_from(index).ok()).and_then(|index| world.rank(index));
        rank.map_or(CommError::Aborted, CommError::Lost)
    }
}

/// A epoch and a number of it, in one word: what belongs to an old epoch is never taken for new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub epoch: Epoch,
    pub number: u32,
}

impl Stamp {
    pub fn word(self) -> u64 {
        u64::from(self.epoch.0) << 32 | u64::from(self.number)
    }

    pub fn from_word(word: u64) -> Self {
        Self { epoch: Epoch((word >> 32) as u32), number: word as u32 }
    }
}

pub(super) fn present(board: &impl SharedState) -> Epoch {
    Stamp::from_word(board.word(Word::State).load(Acquire)).epoch
}

/// That `epoch` is the present one and goes on.
pub(super) fn check(board: &impl SharedState, epoch: Epoch) -> Result<(), CommError> {
    let state = Stamp::from_word(board.word(Word::State).load(Acquire));
    if state.epoch != epoch {
        return Err(CommError::Stale { own: epoch.0, present: state.epoch.0 });
    }
    if state.number == 0 { Ok(()) } else { Err(Cause::error(state.number, board.world())) }
}

/// Ends `epoch` if it still goes on: the first cause stays. A epoch that is over is left alone.
pub(super) fn abort(board: &impl SharedState, epoch: Epoch, cause: Cause) {
    let going = Stamp { epoch, number: 0 };
    let ended = Stamp { epoch, number: cause.number() };
    // Rings also if another was first: it may have died before it rang.
    let _ = board.word(Word::State).compare_exchange(going.word(), ended.word(), AcqRel, Relaxed);
    board.ring();
}

/// Ends the present epoch and begins the next. Nobody may be within an exchange.
pub(super) fn reform(board: &impl SharedState) -> Result<Epoch, CommError> {
    let old = present(board);
    abort(board, old, Cause::Aborted);
    let epoch = Epoch(old.0.checked_add(1).ok_or(CommError::EpochsExhausted)?);
    for rank in board.world().ranks() {
        // A member of the old epoch that arrives all the same finds another word than it left, and stops.
        board.word(Word::Arrived(rank)).swap(0, AcqRel);
    }
    board.word(Word::State).swap(Stamp { epoch, number: 0 }.word(), AcqRel);
    Ok(epoch)
}

/// A rank in one epoch of a group.
#[derive(Debug)]
pub(super) struct Member {
    rank: Rank,
    /// As it stands in the rank's word.
    arrived: Stamp,
}

impl Member {
    /// Takes the place of `rank`, which only one can in an epoch.
    pub fn join(board: &impl SharedState, rank: Rank, epoch: Epoch) -> Result<Self, CommError> {
        if rank.world() != board.world() {
            return Err(CommError::World(rank));
        }
        check(board, epoch)?;
        let (own, arrived) = (board.word(Word::Arrived(rank)), Stamp { epoch, number: 0 });
        let before = own.load(Relaxed);
        let is_free = Stamp::from_word(before).epoch < epoch;
        if !is_free || own.compare_exchange(before, arrived.word(), AcqRel, Relaxed).is_err() {
            return Err(CommError::Taken(rank));
        }
        Ok(Self { rank, arrived })
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// All ranks of the group but this one, in order.
    pub fn others(&self) -> impl Iterator<Item = Rank> + use<> {
        let own = self.rank;
        own.world().ranks().filter(move |&rank| rank != own)
    }

    pub fn epoch(&self) -> Epoch {
        self.arrived.epoch
    }

    /// Which of its two slots a rank writes before it passes the barrier the next time.
    pub fn parity(&self) -> usize {
        (self.arrived.number & 1) as usize
    }

    /// Arrives and waits until all have.
    pub fn pass(&mut self, board: &impl SharedState) -> Result<(), CommError> {
        let next = Stamp { number: self.arrived.number.wrapping_add(1), ..self.arrived };
        let own = board.word(Word::Arrived(self.rank));
        if own.compare_exchange(self.arrived.word(), next.word(), AcqRel, Relaxed).is_err() {
            check(board, self.epoch())?;
            return Err(CommError::OutOfTurn(self.rank));
        }
        self.arrived = next;
        board.fence(SeqCst);
        if self.all_arrived(board)? {
            let is_asleep = |rank| board.word(Word::Asleep(rank)).load(Relaxed) >= self.asleep();
            if self.others().any(is_asleep) {
                board.ring();
            }
            return Ok(());
        }
        let mut turn = 0;
        while !self.is_complete(board)? {
            if board.pause(turn) {
                turn += 1;
            } else if self.park(board)? {
                break;
            }
        }
        Ok(())
    }

    /// After reading: that it was not a later epoch's data.
    pub fn confirm(&self, board: &impl SharedState) -> Result<(), CommError> {
        board.fence(Acquire);
        let (own, present) = (self.epoch(), present(board));
        if own == present { Ok(()) } else { Err(CommError::Stale { own: own.0, present: present.0 }) }
    }

    /// As if it had arrived `number` times.
    #[cfg(test)]
    pub fn skip_to(&mut self, board: &impl SharedState, number: u32) {
        self.arrived.number = number;
        board.word(Word::Arrived(self.rank)).swap(self.arrived.word(), AcqRel);
    }

    /// Sleeps once, unless a last look shows that all have arrived.
    fn park(&self, board: &impl SharedState) -> Result<bool, CommError> {
        let asleep = board.word(Word::Asleep(self.rank));
        // A member of an old epoch that still waits neither hides nor wakes its successor.
        asleep.fetch_max(self.asleep(), Relaxed);
        board.fence(SeqCst);
        let seen = board.bell().load(Acquire);
        let complete = self.is_complete(board);
        if complete == Ok(false) {
            board.park(seen);
        }
        let _ = asleep.compare_exchange(self.asleep(), 0, Relaxed, Relaxed);
        complete
    }

    fn asleep(&self) -> u64 {
        u64::from(self.epoch().0)
    }

    /// Whether all have arrived. An error if they have not and the epoch is over.
    fn is_complete(&self, board: &impl SharedState) -> Result<bool, CommError> {
        if self.all_arrived(board)? {
            return Ok(true);
        }
        let Err(over) = check(board, self.epoch()) else { return Ok(false) };
        // One that arrived and then left has not taken from this rank what it waited for.
        if self.all_arrived(board)? { Ok(true) } else { Err(over) }
    }

    fn all_arrived(&self, board: &impl SharedState) -> Result<bool, CommError> {
        let own = self.arrived;
        let mut all = true;
        for rank in self.others() {
            let theirs = Stamp::from_word(board.word(Word::Arrived(rank)).load(Acquire));
            // One that has not come to this epoch yet has not arrived; nor one of a later, as `check` will tell.
            all &= theirs.epoch == own.epoch
                && match theirs.number.wrapping_sub(own.number) {
                    0 | 1 => true,
                    u32::MAX => false,
                    _ => return Err(CommError::OutOfTurn(rank)),
                };
        }
        Ok(all)
    }
}
