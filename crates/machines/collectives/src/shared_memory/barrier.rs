//! The barrier of a group, its abort and its epochs, on atomic words of a [`SharedState`]: a mapping, or a model
//! checker's atomics. It moves no data. The parent module argues why it is correct.

use std::fmt;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release, SeqCst};

use types::{Rank, WorldSize};

use crate::comm::CommError;

/// The number of times a group was formed on the same segment. It grows each time the group is formed anew.
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
    /// A [`Stamp`]: the current epoch, and 0 or why it ended.
    State,
    /// A [`Stamp`], written by this rank alone within an epoch: how many barriers it has arrived at.
    Arrived(Rank),
    /// The epoch in which this rank is parked or about to be; 0 while it is awake.
    Asleep(Rank),
    /// The operation of this rank in the phases of this parity.
    ShmOp(Rank, usize),
}

/// An atomic integer. The orderings are arguments, so that the model checker sees the ones that are used.
pub(super) trait Atomic<V> {
    fn load(&self, order: Ordering) -> V;
    fn swap(&self, value: V, order: Ordering) -> V;
    fn compare_exchange(&self, from: V, to: V, success: Ordering, failure: Ordering) -> Result<V, V>;
    fn fetch_add(&self, value: V, order: Ordering) -> V;
    fn fetch_max(&self, value: V, order: Ordering) -> V;
}

/// Implements the trait for the atomics of std or loom.
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

/// The words that the ranks of a group share, and how to wait for them.
pub(super) trait SharedState {
    type Word: Atomic<u64>;
    type Futex: Atomic<u32>;

    fn world(&self) -> WorldSize;
    fn word(&self, word: Word) -> &Self::Word;
    /// The futex that parked ranks sleep on. Its value changes whenever one of them may have to check again.
    fn futex(&self) -> &Self::Futex;
    fn fence(&self, order: Ordering);
    /// Waits for a moment, the `turn`th time: false when it is time to park instead.
    fn pause(&self, turn: u32) -> bool;
    /// Sleeps until woken if the futex still has the value `seen`. May return spuriously. Where a peer can corrupt the
    /// memory it must have a timeout, because a wake may be missing.
    fn park(&self, seen: u32);
    /// Wakes all parked ranks.
    fn wake(&self);

    fn notify(&self) {
        self.futex().fetch_add(1, Release);
        self.wake();
    }
}

/// Why an epoch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShmAbortCause {
    Aborted,
    Lost(Rank),
}

impl ShmAbortCause {
    fn number(self) -> u32 {
        match self {
            Self::Aborted => 1,
            Self::Lost(rank) => 2 + rank.index() as u32,
        }
    }

    /// An invalid number still ends the epoch.
    fn error(number: u32, world: WorldSize) -> CommError {
        let rank =
            number.checked_sub(2).and_then(|index| u16::try_from(index).ok()).and_then(|index| world.rank(index));
        rank.map_or(CommError::Aborted, CommError::Lost)
    }
}

/// An epoch and a number within it, in one word: a number of an old epoch is never taken for one of a new epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EpochCounter {
    pub epoch: Epoch,
    pub number: u32,
}

impl EpochCounter {
    pub fn word(self) -> u64 {
        u64::from(self.epoch.0) << 32 | u64::from(self.number)
    }

    pub fn from_word(word: u64) -> Self {
        Self { epoch: Epoch((word >> 32) as u32), number: word as u32 }
    }
}

pub(super) fn present(state: &impl SharedState) -> Epoch {
    EpochCounter::from_word(state.word(Word::State).load(Acquire)).epoch
}

/// Checks that `epoch` is the current one and has not ended.
pub(super) fn check(state: &impl SharedState, epoch: Epoch) -> Result<(), CommError> {
    let stamp = EpochCounter::from_word(state.word(Word::State).load(Acquire));
    if stamp.epoch != epoch {
        return Err(CommError::Stale { own: epoch.0, present: stamp.epoch.0 });
    }
    if stamp.number == 0 { Ok(()) } else { Err(ShmAbortCause::error(stamp.number, state.world())) }
}

/// Ends `epoch` unless it has ended: the first cause stays. Another epoch is not touched.
pub(super) fn abort(state: &impl SharedState, epoch: Epoch, cause: ShmAbortCause) {
    let going = EpochCounter { epoch, number: 0 };
    let ended = EpochCounter { epoch, number: cause.number() };
    // Notifies also if another process set the cause first: it may have died before it notified.
    let _ = state.word(Word::State).compare_exchange(going.word(), ended.word(), AcqRel, Relaxed);
    state.notify();
}

/// Ends the current epoch and begins the next. No rank may be in a collective.
pub(super) fn begin_epoch(state: &impl SharedState) -> Result<Epoch, CommError> {
    let old = present(state);
    abort(state, old, ShmAbortCause::Aborted);
    let epoch = Epoch(old.0.checked_add(1).ok_or(CommError::EpochsExhausted)?);
    for rank in state.world().ranks() {
        // A member of the old epoch that arrives nevertheless finds its word changed, and stops.
        state.word(Word::Arrived(rank)).swap(0, AcqRel);
    }
    state.word(Word::State).swap(EpochCounter { epoch, number: 0 }.word(), AcqRel);
    Ok(epoch)
}

/// The rank that the others wait for: it has arrived at the fewest barriers of `epoch`. `None` if all have arrived at as
/// many.
pub(super) fn last_to_arrive(state: &impl SharedState, epoch: Epoch) -> Option<Rank> {
    let arrived = |rank| EpochCounter::from_word(state.word(Word::Arrived(rank)).load(Acquire));
    let first = arrived(state.world().ranks().next()?).number;
    let progress = |rank| {
        let counter = arrived(rank);
        // Counters may overflow, so only their differences say which is ahead.
        if counter.epoch == epoch { counter.number.wrapping_sub(first) as i32 } else { i32::MIN }
    };
    let progress: Vec<_> = state.world().ranks().map(|rank| (progress(rank), rank)).collect();
    let (most, _) = progress.iter().max_by_key(|(progress, _)| *progress)?;
    progress.iter().filter(|(progress, _)| progress < most).min_by_key(|(progress, _)| *progress).map(|(_, rank)| *rank)
}

/// A rank in one epoch of a group.
#[derive(Debug)]
pub(super) struct BarrierMember {
    rank: Rank,
    /// The value of the rank's `Arrived` word.
    arrived: EpochCounter,
}

impl BarrierMember {
    /// Joins as `rank`. Only one member can do so in an epoch.
    pub fn join(state: &impl SharedState, rank: Rank, epoch: Epoch) -> Result<Self, CommError> {
        if rank.world() != state.world() {
            return Err(CommError::World(rank));
        }
        check(state, epoch)?;
        let (own, arrived) = (state.word(Word::Arrived(rank)), EpochCounter { epoch, number: 0 });
        let before = own.load(Relaxed);
        let is_free = EpochCounter::from_word(before).epoch < epoch;
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

    /// Which of its two slots the rank writes before it next passes the barrier.
    pub fn parity(&self) -> usize {
        (self.arrived.number & 1) as usize
    }

    /// Arrives and waits until all ranks have arrived.
    pub fn pass(&mut self, state: &impl SharedState) -> Result<(), CommError> {
        let next = EpochCounter { number: self.arrived.number.wrapping_add(1), ..self.arrived };
        let own = state.word(Word::Arrived(self.rank));
        if own.compare_exchange(self.arrived.word(), next.word(), AcqRel, Relaxed).is_err() {
            check(state, self.epoch())?;
            return Err(CommError::OutOfTurn(self.rank));
        }
        self.arrived = next;
        state.fence(SeqCst);
        if self.all_arrived(state)? {
            let is_asleep = |rank| state.word(Word::Asleep(rank)).load(Relaxed) >= self.asleep();
            if self.others().any(is_asleep) {
                state.notify();
            }
            return Ok(());
        }
        let mut turn = 0;
        while !self.is_complete(state)? {
            if state.pause(turn) {
                turn += 1;
            } else if self.park(state)? {
                break;
            }
        }
        Ok(())
    }

    /// To be called after reading slots: checks that they did not hold a later epoch's data.
    pub fn confirm(&self, state: &impl SharedState) -> Result<(), CommError> {
        state.fence(Acquire);
        let (own, present) = (self.epoch(), present(state));
        if own == present { Ok(()) } else { Err(CommError::Stale { own: own.0, present: present.0 }) }
    }

    /// Sets the number of arrivals.
    #[cfg(test)]
    pub fn skip_to(&mut self, state: &impl SharedState, number: u32) {
        self.arrived.number = number;
        state.word(Word::Arrived(self.rank)).swap(self.arrived.word(), AcqRel);
    }

    /// Sleeps once, unless a last check shows that all have arrived. Returns the result of that check.
    fn park(&self, state: &impl SharedState) -> Result<bool, CommError> {
        let asleep = state.word(Word::Asleep(self.rank));
        // The larger epoch wins, so a member of an old epoch that still waits does not hide its successor.
        asleep.fetch_max(self.asleep(), Relaxed);
        state.fence(SeqCst);
        let seen = state.futex().load(Acquire);
        let complete = self.is_complete(state);
        if complete == Ok(false) {
            state.park(seen);
        }
        let _ = asleep.compare_exchange(self.asleep(), 0, Relaxed, Relaxed);
        complete
    }

    fn asleep(&self) -> u64 {
        u64::from(self.epoch().0)
    }

    /// Whether all ranks have arrived. An error if they have not and the epoch is over.
    fn is_complete(&self, state: &impl SharedState) -> Result<bool, CommError> {
        if self.all_arrived(state)? {
            return Ok(true);
        }
        let Err(over) = check(state, self.epoch()) else { return Ok(false) };
        // A rank may have arrived and then left the group: this barrier is complete nevertheless.
        if self.all_arrived(state)? { Ok(true) } else { Err(over) }
    }

    fn all_arrived(&self, state: &impl SharedState) -> Result<bool, CommError> {
        let own = self.arrived;
        let mut all = true;
        for rank in self.others() {
            let theirs = EpochCounter::from_word(state.word(Word::Arrived(rank)).load(Acquire));
            // A rank that has not joined this epoch has not arrived. If it is in a later epoch, `check` returns the
            // error.
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
