//! Aborts, old epochs, mismatched operations, garbage in the segment: an error each time, and no rank waits for ever.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::channel;
use std::thread;

use collectives::shared_memory::Epoch;
use collectives::{CommError, Communicator as _};

use testing::shared_memory_group::{Group, bits, numbers, sum};
use testing::watchdog::watched;

#[test]
fn an_abort_ends_the_waits_of_all_ranks() {
    watched(|| {
        for stop in [true, false] {
            let group = Group::new(3, 8);
            let lost = group.rank(2);
            let _absent = group.comm(2);
            let (waits, is_waiting) = channel();
            let ranks: Vec<_> = (0..2)
                .map(|index| {
                    let (mut comm, waits) = (group.comm(index), waits.clone());
                    thread::spawn(move || {
                        waits.send(()).unwrap();
                        [
                            comm.all_reduce(&mut [1.0; 8]),
                            comm.gather_columns([1, 8], &vec![1.0; comm.rank().shard(8).len()], None),
                        ]
                    })
                })
                .collect();
            is_waiting.iter().take(2).for_each(drop);
            while group.segment.last_to_arrive(group.segment.epoch()) != Some(lost) {
                thread::yield_now();
            }
            let abort = group.segment.abort(group.segment.epoch());
            assert_eq!(abort.cause(), None);
            if stop {
                abort.clone().stop()
            } else {
                abort.clone().lost(lost)
            }
            let error = if stop { CommError::Aborted } else { CommError::Lost(lost) };
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), [Err(error), Err(error)]);
            }
            abort.lost(group.rank(0));
            assert_eq!(abort.cause(), Some(error), "the first cause stays");
        }
    });
}

#[test]
fn a_seat_that_is_dropped_frees_the_others() {
    watched(|| {
        let group = Group::new(3, 8);
        let results = group.all(|comm| {
            comm.all_reduce(&mut [1.0; 8])?;
            if comm.rank().index() == 1 { Ok(()) } else { comm.all_reduce(&mut [1.0; 8]) }
        });
        assert_eq!(results[1], Ok(()));
        // Both other ranks report the rank that left first; the second rank to leave changes nothing.
        assert_eq!(results[0], Err(CommError::Lost(group.rank(1))));
        assert_eq!(results[2], Err(CommError::Lost(group.rank(1))));
    });
}

#[test]
fn a_panic_of_one_rank_frees_the_others() {
    watched(|| {
        let group = Group::new(2, 8);
        let (mut waiting, panicking) = (group.comm(0), group.comm(1));
        let waiter = thread::spawn(move || waiting.all_reduce(&mut [1.0; 8]));
        let panicked = thread::spawn(move || {
            let _seat = panicking;
            std::panic::resume_unwind(Box::new("a rank's bug"));
        });
        assert!(panicked.join().is_err());
        assert_eq!(waiter.join().unwrap(), Err(CommError::Lost(group.rank(1))));
    });
}

#[test]
fn a_group_that_is_formed_anew_works_and_knows_no_old_seat() {
    watched(|| {
        let group = Group::new(2, 100);
        let old = group.segment.epoch();
        let (mut stale, abort) = (group.comm(0), group.segment.abort(old));
        abort.lost(group.rank(1));
        let new = group.segment.begin_epoch().unwrap();
        assert!(new > old && group.segment.epoch() == new);

        let over = CommError::Stale { own: old.0, present: new.0 };
        assert_eq!(stale.all_reduce(&mut [1.0; 100]), Err(over));
        assert_eq!(group.segment.join(group.rank(0), old).unwrap_err(), over);
        assert_eq!(abort.cause(), Some(over));
        // Neither an abort of the old epoch nor dropping an old communicator affects the new epoch.
        abort.stop();
        group.all(|comm| {
            for op in 0..20 {
                let mut values = numbers(comm.rank(), op, 100);
                comm.all_reduce(&mut values).unwrap();
                assert_eq!(bits(&values), bits(&sum(comm.rank().world().ranks(), op, 100)));
                assert_eq!(comm.epoch(), new);
            }
        });
        assert_eq!(stale.all_reduce(&mut [0.0; 1]), Err(over));
    });
}

#[test]
fn a_seat_is_taken_once_in_a_generation_and_only_by_a_rank_of_the_group() {
    let group = Group::new(2, 1);
    let comm = group.comm(0);
    assert_eq!(group.segment.join(group.rank(0), comm.epoch()).unwrap_err(), CommError::Taken(group.rank(0)));
    let stranger = types::WorldSize::new(3).unwrap().rank(0).unwrap();
    assert_eq!(group.segment.join(stranger, comm.epoch()).unwrap_err(), CommError::World(stranger));
    let (own, present) = (Epoch(7), comm.epoch());
    assert_eq!(
        group.segment.join(group.rank(1), own).unwrap_err(),
        CommError::Stale { own: own.0, present: present.0 }
    );
}

#[test]
fn elements_beyond_the_limit_are_refused_and_the_group_goes_on() {
    watched(|| {
        let group = Group::new(2, 10);
        group.all(|comm| {
            let error = CommError::TooLarge { elements: 11, elements_max: 10 };
            assert_eq!(comm.all_reduce(&mut [1.0; 11]), Err(error));
            let part = vec![1.0; comm.rank().shard(11).len()];
            assert_eq!(comm.gather_columns([1, 11], &part, None), Err(error));
            let mut values = [1.0; 10];
            comm.all_reduce(&mut values).unwrap();
            assert_eq!(values, [2.0; 10]);
        });
    });
}

#[test]
fn ranks_that_disagree_get_an_error_and_no_sum() {
    watched(|| {
        let group = Group::new(2, 10);
        let results = group.all(|comm| {
            let len = 5 + comm.rank().index();
            comm.all_reduce(&mut vec![1.0; len])
        });
        assert_eq!(results, [Err(CommError::Mismatch(group.rank(1))), Err(CommError::Mismatch(group.rank(0)))]);

        let group = Group::new(2, 10);
        let results = group.all(|comm| {
            if comm.rank().index() == 0 {
                comm.all_reduce(&mut [1.0; 5])
            } else {
                comm.gather_columns([1, 5], &vec![1.0; comm.rank().shard(5).len()], None)
            }
        });
        assert!(results.iter().all(|result| matches!(result, Err(CommError::Mismatch(_)))), "{results:?}");
    });
}

/// The bytes of the futex and of the words of two ranks, which follow the segment's state.
const SPOILT: std::ops::Range<u64> = 256..640;

#[test]
fn nonsense_from_a_peer_neither_panics_nor_outlasts_an_abort() {
    watched(|| {
        let mut seed = 1_u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            seed >> 33
        };
        let mut errors = 0;
        for round in 0..300 {
            let group = Group::new(2, 64);
            let memory = File::from(group.fd());
            let (mut comm, abort) = (group.comm(0), group.segment.abort(group.segment.epoch()));
            let victim = thread::spawn(move || (0..50).try_for_each(|_| comm.all_reduce(&mut [1.0; 64])));
            for _ in 0..random() % 40 {
                let word = SPOILT.start + random() % ((SPOILT.end - SPOILT.start) / 8) * 8;
                // Small numbers of the right epoch are more dangerous than noise.
                let value = if round % 2 == 0 { (1 << 32) + random() % 4 } else { (random() << 32) + random() };
                memory.write_all_at(&value.to_le_bytes(), word).unwrap();
            }
            abort.stop();
            errors += usize::from(victim.join().unwrap().is_err());
        }
        assert!(errors > 0, "a rank alone cannot do fifty sums");
    });
}

#[test]
fn a_state_that_means_nothing_ends_the_group() {
    watched(|| {
        let group = Group::new(2, 64);
        let memory = File::from(group.fd());
        let mut comm = group.comm(0);
        memory.write_all_at(&(1_u64 << 32 | 0xdead_beef).to_le_bytes(), 128).unwrap();
        assert_eq!(comm.all_reduce(&mut [1.0; 64]), Err(CommError::Aborted));
        memory.write_all_at(&u64::MAX.to_le_bytes(), 128).unwrap();
        let over = CommError::Stale { own: 1, present: u32::MAX };
        assert_eq!(comm.all_reduce(&mut [1.0; 64]), Err(over));
        assert_eq!(group.segment.begin_epoch(), Err(CommError::EpochsExhausted));
    });
}
