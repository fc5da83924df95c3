//! The barrier on loom's atomics: loom tries every interleaving and every outcome that the memory model allows, up to a
//! number of preemptions. Parking has no timeout here, so a lost wake is a deadlock, which loom reports. A slot that is
//! written while another rank reads it is a data race, which loom reports too.
#![allow(unsafe_code)]

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use types::{Rank, WorldSize};

use super::barrier::{
    BarrierMember, Epoch, EpochCounter, SharedState, ShmAbortCause, Word, abort, atomics, begin_epoch, check,
};
use crate::comm::CommError;

atomics!(AtomicU64: u64, AtomicU32: u32);

struct Model {
    world: WorldSize,
    state: AtomicU64,
    arrived: Vec<AtomicU64>,
    asleep: Vec<AtomicU64>,
    futex: AtomicU32,
    /// Models the kernel's list of threads that sleep on the futex.
    list: Mutex<()>,
    woken: Condvar,
    slots: Vec<[UnsafeCell<u32>; 2]>,
}

impl Model {
    fn new(size: u16) -> Arc<Self> {
        let world = WorldSize::new(size).unwrap();
        Arc::new(Self {
            world,
            state: AtomicU64::new(EpochCounter { epoch: Epoch::FIRST, number: 0 }.word()),
            arrived: world.ranks().map(|_| AtomicU64::new(0)).collect(),
            asleep: world.ranks().map(|_| AtomicU64::new(0)).collect(),
            futex: AtomicU32::new(0),
            list: Mutex::new(()),
            woken: Condvar::new(),
            slots: world.ranks().map(|_| [UnsafeCell::new(0), UnsafeCell::new(0)]).collect(),
        })
    }

    fn rank(&self, index: u16) -> Rank {
        self.world.rank(index).unwrap()
    }

    /// The value that `rank` writes in a phase.
    fn value(rank: Rank, phase: u32) -> u32 {
        10 * phase + rank.index() as u32
    }

    /// As `ShmComm` does: write the own slot, pass the barrier, read all slots.
    fn exchange(&self, member: &mut BarrierMember, phases: u32) -> Result<(), CommError> {
        for phase in 0..phases {
            let parity = member.parity();
            // SAFETY: the barrier under test keeps other ranks from accessing the slot; loom reports it if they do.
            self.slots[member.rank().index()][parity]
                .with_mut(|slot| unsafe { *slot = Self::value(member.rank(), phase) });
            member.pass(self)?;
            for rank in self.world.ranks() {
                // SAFETY: as above.
                let value = self.slots[rank.index()][parity].with(|slot| unsafe { *slot });
                assert_eq!(value, Self::value(rank, phase));
            }
        }
        Ok(())
    }
}

impl SharedState for Model {
    type Word = AtomicU64;
    type Futex = AtomicU32;

    fn world(&self) -> WorldSize {
        self.world
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        match word {
            Word::State => &self.state,
            Word::Arrived(rank) => &self.arrived[rank.index()],
            Word::Asleep(rank) => &self.asleep[rank.index()],
            Word::ShmOp(..) => unreachable!("the barrier does not use it"),
        }
    }

    fn futex(&self) -> &AtomicU32 {
        &self.futex
    }

    fn fence(&self, order: Ordering) {
        loom::sync::atomic::fence(order);
    }

    fn pause(&self, _: u32) -> bool {
        false
    }

    fn park(&self, seen: u32) {
        let list = self.list.lock().unwrap();
        if self.futex.load(Ordering::Relaxed) == seen {
            drop(self.woken.wait(list).unwrap());
        }
    }

    fn wake(&self) {
        drop(self.list.lock().unwrap());
        self.woken.notify_all();
    }
}

fn explore(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(test);
}

/// Every rank runs `phases` phases in its own thread, rank 0 in this one.
fn all_pass(size: u16, phases: u32) {
    let model = Model::new(size);
    let run = |index: u16| {
        let model = Arc::clone(&model);
        move || {
            let mut member = BarrierMember::join(&*model, model.rank(index), Epoch::FIRST).unwrap();
            model.exchange(&mut member, phases).unwrap();
        }
    };
    let others: Vec<_> = (1..size).map(|index| thread::spawn(run(index))).collect();
    run(0)();
    others.into_iter().for_each(|other| other.join().unwrap());
}

#[test]
fn two_ranks_exchange_without_a_race_and_without_a_lost_wake() {
    explore(3, || all_pass(2, 3));
}

#[test]
fn three_ranks_exchange_without_a_race_and_without_a_lost_wake() {
    explore(1, || all_pass(3, 3));
    explore(2, || all_pass(3, 1));
}

#[test]
fn a_count_of_arrivals_that_overflows_goes_on() {
    explore(2, || {
        let model = Model::new(2);
        let [mut own, mut other] = [0, 1].map(|index| {
            let mut member = BarrierMember::join(&*model, model.rank(index), Epoch::FIRST).unwrap();
            member.skip_to(&*model, u32::MAX - 1);
            member
        });
        let peer = {
            let model = Arc::clone(&model);
            thread::spawn(move || model.exchange(&mut other, 3).unwrap())
        };
        model.exchange(&mut own, 3).unwrap();
        peer.join().unwrap();
    });
}

#[test]
fn an_abort_ends_every_wait() {
    explore(2, || {
        let model = Model::new(3);
        let waits: Vec<_> = (0..2)
            .map(|index| {
                let model = Arc::clone(&model);
                thread::spawn(move || {
                    let joined = BarrierMember::join(&*model, model.rank(index), Epoch::FIRST);
                    joined.and_then(|mut member| member.pass(&*model))
                })
            })
            .collect();
        let lost = model.rank(2);
        abort(&*model, Epoch::FIRST, ShmAbortCause::Lost(lost));
        for wait in waits {
            assert_eq!(wait.join().unwrap(), Err(CommError::Lost(lost)));
        }
    });
}

#[test]
fn a_rank_that_leaves_after_the_last_phase_disturbs_nobody() {
    explore(3, || {
        let model = Model::new(2);
        let leaver = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let mut member = BarrierMember::join(&*model, model.rank(1), Epoch::FIRST).unwrap();
                model.exchange(&mut member, 1).unwrap();
                abort(&*model, Epoch::FIRST, ShmAbortCause::Lost(member.rank()));
            })
        };
        let mut member = BarrierMember::join(&*model, model.rank(0), Epoch::FIRST).unwrap();
        model.exchange(&mut member, 1).unwrap();
        leaver.join().unwrap();
        assert_eq!(check(&*model, Epoch::FIRST), Err(CommError::Lost(model.rank(1))));
    });
}

#[test]
fn a_member_of_an_old_generation_fails_and_does_not_disturb_the_new_one() {
    explore(2, || {
        let model = Model::new(2);
        let mut stale = BarrierMember::join(&*model, model.rank(0), Epoch::FIRST).unwrap();
        let stale = {
            let model = Arc::clone(&model);
            thread::spawn(move || stale.pass(&*model))
        };
        // This breaks the contract of `reform`: the stale member may be anywhere in its wait now, or not have begun.
        let epoch = begin_epoch(&*model).unwrap();
        let peer = {
            let model = Arc::clone(&model);
            thread::spawn(move || {
                let mut member = BarrierMember::join(&*model, model.rank(1), epoch).unwrap();
                model.exchange(&mut member, 2).unwrap();
            })
        };
        let mut member = BarrierMember::join(&*model, model.rank(0), epoch).unwrap();
        model.exchange(&mut member, 2).unwrap();
        peer.join().unwrap();
        stale.join().unwrap().unwrap_err();
    });
}

#[test]
fn of_two_that_want_the_same_seat_one_gets_it() {
    explore(3, || {
        let model = Model::new(2);
        let rival = {
            let model = Arc::clone(&model);
            thread::spawn(move || BarrierMember::join(&*model, model.rank(0), Epoch::FIRST).is_ok())
        };
        let own = BarrierMember::join(&*model, model.rank(0), Epoch::FIRST).is_ok();
        assert!(own != rival.join().unwrap());
    });
}
