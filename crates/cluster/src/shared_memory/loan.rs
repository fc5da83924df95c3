//! A rank that waits for the others lends them its CPU. Ranks have equal parts of the work, but CPUs are not always equally fast:
//! then a guest of the slower rank works on the CPU of the faster one, in the slower one's process, and both are done sooner.
//!
//! The loan is a word of the lender: on offer, taken by one guest, or over. Nothing depends on it but who works where. The lender wakes the
//! guest of one rank that is late, on its own CPU, and sleeps while that works. A guest that finds nothing more to do gives the CPU back,
//! mostly before its rank arrives: so nobody has to be woken on another CPU, which takes long. Then the lender waits as ever, and may lend
//! again.

use std::cell::Cell;
use std::sync::atomic::Ordering::{self, AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use kernels::cpu::Loan;
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use types::{Rank, WorldSize};

use super::barrier::{self, Board, Generation, Stamp, Word};
use super::mapping::{Bell, Mapping};
use super::segment::Segment;

/// Turns of a wait after which the CPU is lent, about twelve microseconds: that it changes hands twice takes as long, because weights have
/// driven the system's code out of the caches, so a short wait is not worth it.
const TURNS: u32 = 200;

/// Set in the number of a loan: it is one, and a guest has it. Above them is how often the lender has arrived.
const OFFERED: u32 = 2;
const TAKEN: u32 = 1;

/// The board of a rank that lends its CPU while it waits.
pub(super) struct Lender<'a> {
    mapping: &'a Mapping,
    rank: Rank,
    /// What the word of a rank shows that has arrived where this one waits.
    arrived: Stamp,
    /// Since when the CPU was lent in this wait, if it was.
    since: Cell<Option<Instant>>,
    is_offered: Cell<bool>,
    /// The turn from which it is offered again.
    next: Cell<u32>,
}

impl<'a> Lender<'a> {
    pub fn new(mapping: &'a Mapping, rank: Rank, arrived: Stamp) -> Self {
        Self { mapping, rank, arrived, since: Cell::new(None), is_offered: Cell::new(false), next: Cell::new(TURNS) }
    }

    /// The wait is over. Returns how long others have worked meanwhile, by their word, but not longer than they could.
    pub fn end(self) -> Duration {
        let Some(since) = self.since.get() else { return Duration::ZERO };
        self.loan().swap(0, AcqRel);
        Duration::from_nanos(self.mapping.word(Word::Lent(self.rank)).swap(0, AcqRel)).min(since.elapsed())
    }

    fn loan(&self) -> &AtomicU64 {
        self.mapping.word(Word::Loan(self.rank))
    }

    /// The word of the loan on offer.
    fn offer(&self) -> u64 {
        offer_at(self.arrived)
    }

    /// Offers the CPU to the next rank that has not arrived.
    fn lend(&self) {
        let before = Stamp { number: self.arrived.number.wrapping_sub(1), ..self.arrived }.word();
        let is_late = |rank: &Rank| self.mapping.word(Word::Arrived(*rank)).load(Relaxed) == before;
        let (world, own) = (self.rank.world(), self.rank.index());
        let (after, until) = (world.ranks().skip(own + 1), world.ranks().take(own));
        let Some(late) = after.chain(until).find(is_late) else { return };
        self.since.set(self.since.get().or_else(|| Some(Instant::now())));
        self.mapping.word(Word::Cpu(self.rank)).store(sched_getcpu() as u64, Relaxed);
        self.loan().store(self.offer(), Release);
        self.is_offered.set(true);
        self.mapping.ring_at(Bell::Guest(late));
    }

    /// Sleeps while a guest is there, because it would be in its way.
    fn give_way(&self) {
        let bell = Bell::Lender(self.rank);
        let seen = self.mapping.bell_of(bell).load(Acquire);
        match self.loan().load(Acquire) {
            0 => self.is_offered.set(false),
            word if word == self.offer() => {}
            _ => self.mapping.sleep(bell, seen),
        }
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
        if self.is_offered.get() {
            self.give_way();
        } else if turn >= self.next.get() {
            self.lend();
            self.next.set(turn.saturating_add(TURNS));
        }
        self.mapping.pause(turn)
    }

    fn park(&self, seen: u32) {
        self.mapping.park(seen);
    }

    fn wake(&self) {
        self.mapping.wake();
    }
}

/// The word of a loan on offer by a rank that has arrived so often.
fn offer_at(arrived: Stamp) -> u64 {
    Stamp { number: arrived.number << 2 | OFFERED, ..arrived }.word()
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

    /// Waits for a loan, and goes to its CPU. `None`: the generation is over, or `is_over` says so.
    pub fn wait(&self, is_over: &dyn Fn() -> bool) -> Option<Borrowed<'_>> {
        let (mapping, bell) = (self.segment.mapping(), Bell::Guest(self.rank));
        loop {
            let seen = mapping.bell_of(bell).load(Acquire);
            if is_over() || barrier::check(mapping, self.generation).is_err() {
                return None;
            }
            if let Some(borrowed) = self.take() {
                go_to(mapping.word(Word::Cpu(borrowed.lender)).load(Relaxed));
                return Some(borrowed);
            }
            mapping.sleep(bell, seen);
        }
    }

    /// Lets who waits for a loan look up.
    pub fn disturb(&self) {
        self.segment.mapping().ring_at(Bell::Guest(self.rank));
    }

    fn take(&self) -> Option<Borrowed<'_>> {
        let mapping = self.segment.mapping();
        self.rank.world().ranks().filter(|&rank| rank != self.rank).find_map(|lender| {
            let loan = mapping.word(Word::Loan(lender));
            let offered = loan.load(Acquire);
            let Stamp { generation, number } = Stamp::from_word(offered);
            let is_free = generation == self.generation && number & (OFFERED | TAKEN) == OFFERED;
            let word = offered | u64::from(TAKEN);
            let is_taken = is_free && loan.compare_exchange(offered, word, AcqRel, Relaxed).is_ok();
            is_taken.then_some(Borrowed { borrower: self, lender, word })
        })
    }
}

/// Has the calling thread run on this CPU, if the system lets it: only there it is in nobody's way.
fn go_to(cpu: u64) {
    let Some(cpu) = usize::try_from(cpu).ok().filter(|&cpu| cpu < CpuSet::MAX_CPU) else { return };
    if sched_getcpu() != cpu {
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        let _ = sched_setaffinity(None, &cpus);
    }
}

/// The CPU of another rank. Dropped, it is given back.
#[derive(Debug)]
pub struct Borrowed<'a> {
    borrower: &'a Borrower,
    lender: Rank,
    word: u64,
}

impl Loan for Borrowed<'_> {
    fn lasts(&self) -> bool {
        let mapping = self.borrower.segment.mapping();
        let own = Stamp::from_word(mapping.word(Word::Arrived(self.borrower.rank)).load(Relaxed));
        // Who has arrived has no more to do for which the lender waits, and a lender that is gone ends nothing itself.
        self.word != (offer_at(own) | u64::from(TAKEN))
            && mapping.word(Word::Loan(self.lender)).load(Acquire) == self.word
            && barrier::check(mapping, self.borrower.generation).is_ok()
    }

    fn worked(&self, time: Duration) {
        self.borrower.segment.mapping().word(Word::Lent(self.lender)).fetch_add(time.as_nanos() as u64, AcqRel);
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        let mapping = self.borrower.segment.mapping();
        if mapping.word(Word::Loan(self.lender)).compare_exchange(self.word, 0, AcqRel, Relaxed).is_ok() {
            mapping.ring_at(Bell::Lender(self.lender));
        }
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
            let lent = thread::scope(move |scope| {
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
            let _second = second; // whose end ends the wait of the first, if this fails
            scope.spawn(move || first.bring_rows(0, COLS, &mut [1.0; ROWS * COLS]).unwrap_err());
            let loan = borrower.wait(&|| false).expect("a loan");
            // As if the lender had been killed there, it ends nothing itself: the supervisor does.
            abort.stop();
            assert!(!loan.lasts());
        });
        assert!(borrower.wait(&|| false).is_none(), "the generation is over");
    }

    #[test]
    fn who_gets_its_cpu_back_and_still_waits_lends_it_again() {
        let [mut first, mut second] = two_seats();
        let borrower = second.borrower();
        thread::scope(move |scope| {
            let lender = scope.spawn(move || first.all_reduce(&mut [1.0; 8]).unwrap());
            for _ in 0..3 {
                assert!(borrower.wait(&|| false).expect("a loan").lasts());
            }
            let loan = borrower.wait(&|| false).expect("a loan");
            // As if its guest had not noticed yet that the rank is there.
            second.all_reduce(&mut [2.0; 8]).unwrap();
            assert!(!loan.lasts());
            lender.join().unwrap();
        });
    }

    #[test]
    fn who_waits_for_a_loan_can_be_called_away() {
        let [_first, second] = two_seats();
        let (borrower, is_over) = (second.borrower(), AtomicBool::new(false));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| borrower.wait(&|| is_over.load(Relaxed)).is_some());
            is_over.store(true, Relaxed);
            borrower.disturb();
            assert!(!waiting.join().unwrap());
        });
    }
}
