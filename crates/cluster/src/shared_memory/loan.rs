//! A rank that waits long for the others lends them its CPU. Ranks have equal parts of the work, but CPUs are not always equally fast:
//! then a guest of the slower rank works on the CPU of the faster one, in the slower one's process, and both are done sooner.
//!
//! The loan is a word of the lender: on offer, taken by one guest, or over. Nothing depends on it but who works where: a guest that
//! finds no work gives way, and the lender waits at the barrier as ever. It parks while a guest is there, because it would be in its way.

use std::cell::Cell;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use kernels::cpu::Loan;
use types::{Rank, WorldSize};

use super::barrier::{self, Board, Generation, Stamp, Word};
use super::mapping::Mapping;
use super::segment::Segment;

/// Turns of a wait after which the CPU is lent: a guest has to wake up first, so a short wait is not worth one.
const TURNS: u32 = 400;

/// Set in the number of a stamp: a guest has it.
const TAKEN: u32 = 1;

/// The board of a rank that lends its CPU while it waits.
pub(super) struct Lender<'a> {
    mapping: &'a Mapping,
    rank: Rank,
    /// Not zero, and not that of another loan of late.
    offer: Stamp,
    /// Since when it is there.
    offered: Cell<Option<Instant>>,
}

impl<'a> Lender<'a> {
    pub fn new(mapping: &'a Mapping, rank: Rank, generation: Generation, number: u32) -> Self {
        let offer = Stamp { generation, number: (number << 1).max(2) };
        Self { mapping, rank, offer, offered: Cell::new(None) }
    }

    /// The wait is over. Returns how long others have worked meanwhile, by their word, but not longer than they could.
    pub fn end(self) -> Duration {
        let Some(offered) = self.offered.get() else { return Duration::ZERO };
        self.mapping.word(Word::Loan(self.rank)).swap(0, AcqRel);
        Duration::from_micros(self.mapping.word(Word::Lent(self.rank)).swap(0, AcqRel)).min(offered.elapsed())
    }

    fn is_taken(&self) -> bool {
        self.mapping.word(Word::Loan(self.rank)).load(Relaxed) == self.offer.word() | u64::from(TAKEN)
    }
}

impl Board for Lender<'_> {
    type Word = AtomicU64;
    type Bell = AtomicU32;

    fn world(&self) -> WorldSize {
        self.mapping.world()
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        self.mapping.word(word)
    }

    fn bell(&self) -> &AtomicU32 {
        self.mapping.bell()
    }

    fn fence(&self, order: Ordering) {
        self.mapping.fence(order);
    }

    fn pause(&self, turn: u32) -> bool {
        if turn >= TURNS && self.offered.get().is_none() {
            self.offered.set(Some(Instant::now()));
            self.mapping.word(Word::Loan(self.rank)).store(self.offer.word(), Release);
            self.mapping.ring_loans();
        }
        !(self.offered.get().is_some() && self.is_taken()) && self.mapping.pause(turn)
    }

    fn park(&self, seen: u32) {
        self.mapping.park(seen);
    }

    fn wake(&self) {
        self.mapping.wake();
    }
}

/// Takes what the other ranks lend, in one generation of a group.
#[derive(Clone, Debug)]
pub struct Borrower {
    segment: Segment,
    rank: Rank,
    generation: Generation,
}

impl Borrower {
    pub(super) fn new(segment: Segment, rank: Rank, generation: Generation) -> Self {
        Self { segment, rank, generation }
    }

    /// Waits for a loan. `None`: the generation is over, or `is_over` says so.
    pub fn wait(&self, is_over: &dyn Fn() -> bool) -> Option<Borrowed<'_>> {
        let mapping = self.segment.mapping();
        loop {
            let seen = mapping.loan_bell().load(Acquire);
            if is_over() || barrier::check(mapping, self.generation).is_err() {
                return None;
            }
            if let Some(borrowed) = self.take() {
                return Some(borrowed);
            }
            mapping.rest(seen);
        }
    }

    /// Lets those who wait for a loan look up.
    pub fn disturb(&self) {
        self.segment.mapping().ring_loans();
    }

    fn take(&self) -> Option<Borrowed<'_>> {
        let mapping = self.segment.mapping();
        self.rank.world().ranks().filter(|&rank| rank != self.rank).find_map(|lender| {
            let loan = mapping.word(Word::Loan(lender));
            let offered = loan.load(Acquire);
            let Stamp { generation, number } = Stamp::from_word(offered);
            let is_free = generation == self.generation && number & TAKEN == 0 && number != 0;
            let word = offered | u64::from(TAKEN);
            let is_taken = is_free && loan.compare_exchange(offered, word, AcqRel, Relaxed).is_ok();
            is_taken.then_some(Borrowed { borrower: self, lender, word })
        })
    }
}

/// The CPU of another rank.
#[derive(Debug)]
pub struct Borrowed<'a> {
    borrower: &'a Borrower,
    lender: Rank,
    word: u64,
}

impl Loan for Borrowed<'_> {
    fn lasts(&self) -> bool {
        let mapping = self.borrower.segment.mapping();
        // A lender that is gone ends nothing itself.
        mapping.word(Word::Loan(self.lender)).load(Acquire) == self.word
            && barrier::check(mapping, self.borrower.generation).is_ok()
    }

    fn worked(&self, time: Duration) {
        self.borrower.segment.mapping().word(Word::Lent(self.lender)).fetch_add(time.as_micros() as u64, AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::super::{GroupLimits, Seat};
    use super::*;

    const COLS: usize = 1024;
    const ROWS: usize = 64;
    const HOUR: Duration = Duration::from_secs(3600);

    fn two_seats() -> [Seat; 2] {
        let world = WorldSize::new(2).unwrap();
        let (segment, _fd) = Segment::create(GroupLimits { world, elements_max: ROWS * COLS }).unwrap();
        [0, 1].map(|index| segment.seat(world.rank(index).unwrap(), segment.generation()).unwrap())
    }

    #[test]
    fn who_waits_for_rows_or_logits_lends_its_cpu_until_they_come() {
        let rows = |seat: &mut Seat| {
            seat.bring_rows(0, COLS, &mut [1.0; ROWS * COLS]).unwrap();
        };
        let logits = |seat: &mut Seat| {
            let part = [1.0; COLS / 2];
            seat.gather_columns([1, COLS], |rank| rank.share(COLS), &part, None).unwrap();
        };
        for exchange in [&rows as &(dyn Fn(&mut Seat) + Sync), &logits] {
            let [mut first, mut second] = two_seats();
            let (borrower, never) = (second.borrower(), || false);
            let lent = thread::scope(|scope| {
                let lender = scope.spawn(move || {
                    exchange(&mut first);
                    first.take_lent()
                });
                let loan = borrower.wait(&never).expect("a loan");
                assert!(loan.lasts());
                assert!(borrower.take().is_none(), "it can be taken once");
                loan.worked(HOUR);
                exchange(&mut second);
                let lent = lender.join().unwrap();
                assert!(!loan.lasts());
                lent
            });
            assert!(lent > Duration::ZERO && lent < HOUR, "what a guest says is believed within reason: {lent:?}");
        }
    }

    #[test]
    fn the_loan_of_a_rank_that_is_lost_ends() {
        let [mut first, second] = two_seats();
        let (borrower, abort) = (second.borrower(), second.abort());
        thread::scope(|scope| {
            scope.spawn(move || first.bring_rows(0, COLS, &mut [1.0; ROWS * COLS]).unwrap_err());
            let loan = borrower.wait(&|| false).expect("a loan");
            // As if the lender had been killed there, it ends nothing itself: the supervisor does.
            abort.stop();
            assert!(!loan.lasts());
        });
        assert!(borrower.wait(&|| false).is_none(), "the generation is over");
    }

    #[test]
    fn few_rows_are_not_worth_a_loan() {
        let [mut first, mut second] = two_seats();
        let (borrower, is_over) = (second.borrower(), AtomicBool::new(false));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| borrower.wait(&|| is_over.load(Relaxed)).is_some());
            let lender = scope.spawn(move || first.all_reduce(&mut [1.0; 8]).unwrap());
            thread::sleep(Duration::from_millis(30));
            second.all_reduce(&mut [2.0; 8]).unwrap();
            lender.join().unwrap();
            is_over.store(true, Relaxed);
            borrower.disturb();
            assert!(!waiting.join().unwrap());
        });
    }
}
