//! Ranks that leave, stall or disagree, and aborts: an error each time, and no rank waits for ever.

use std::sync::mpsc::channel;
use std::thread;

use collectives::tcp::TcpCommOptions;
use collectives::{CommError, Communicator as _};

use crate::group::{ENOUGH, Group, LONG, OPTIONS, all, each};
use testing::watchdog::watched;

#[test]
fn an_abort_of_one_rank_ends_the_waits_of_all_and_says_why() {
    watched(|| {
        for is_stop in [true, false] {
            let group = Group::new(3);
            let mut comms = group.comms(OPTIONS);
            let (abort, absent) = (comms[0].abort(), comms.pop().unwrap());
            let (waits, is_waiting) = channel();
            let ranks: Vec<_> = comms
                .into_iter()
                .map(|mut comm| {
                    let waits = waits.clone();
                    thread::spawn(move || {
                        waits.send(()).unwrap();
                        [comm.all_reduce(&mut [1.0; 8]), comm.all_reduce(&mut [1.0; 8])]
                    })
                })
                .collect();
            is_waiting.iter().take(2).for_each(drop);
            if is_stop {
                abort.clone().stop()
            } else {
                abort.clone().lost(group.rank(2))
            }
            let error = if is_stop { CommError::Aborted } else { CommError::Lost(group.rank(2)) };
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), [Err(error), Err(error)]);
            }
            abort.lost(group.rank(0));
            assert_eq!(abort.cause(), Some(error), "the first cause stays");
            drop(absent);
        }
    });
}

#[test]
fn an_abort_while_nobody_exchanges_reaches_those_who_wait_elsewhere() {
    watched(|| {
        let mut comms = Group::new(2).comms(OPTIONS);
        let idle = comms.pop().unwrap();
        let waiter = thread::spawn({
            let mut comm = comms.pop().unwrap();
            move || comm.all_reduce(&mut [1.0; 8])
        });
        idle.abort().stop();
        assert_eq!(waiter.join().unwrap(), Err(CommError::Aborted));
        assert_eq!(idle.abort().cause(), Some(CommError::Aborted));
    });
}

#[test]
fn a_rank_that_leaves_is_named_to_all_others() {
    watched(|| {
        let group = Group::new(4);
        let results = each(group.comms(OPTIONS), |comm| {
            comm.all_reduce(&mut [1.0; 8])?;
            if comm.rank().index() == 1 { Ok(()) } else { comm.all_reduce(&mut [1.0; 8]) }
        });
        assert_eq!(results[1], Ok(()));
        for index in [0, 2, 3] {
            assert_eq!(results[index], Err(CommError::Lost(group.rank(1))));
        }
    });
}

#[test]
fn a_rank_that_leaves_after_the_last_exchange_breaks_nothing() {
    watched(|| {
        for _ in 0..50 {
            all(4, OPTIONS, |comm| {
                comm.all_reduce(&mut vec![1.0; 20_000]).unwrap();
                comm.all_reduce(&mut [1.0; 100]).unwrap();
            });
        }
    });
}

#[test]
fn a_rank_that_dies_within_a_large_exchange_is_lost() {
    watched(|| {
        let group = Group::new(3);
        let results = each(group.comms(OPTIONS), |comm| {
            let mut values = vec![1.0; 1 << 20];
            if comm.rank().index() == 2 {
                // Its operation differs from the others': they fill their buffers, then it leaves.
                return comm.all_reduce(&mut values[..1]);
            }
            comm.all_reduce(&mut values)
        });
        assert!(results.iter().all(Result::is_err), "{results:?}");
    });
}

#[test]
fn a_panic_of_one_rank_frees_the_others() {
    watched(|| {
        let group = Group::new(2);
        let mut comms = group.comms(OPTIONS);
        let panicking = comms.pop().unwrap();
        let mut waiting = comms.pop().unwrap();
        let waiter = thread::spawn(move || waiting.all_reduce(&mut [1.0; 8]));
        let panicked = thread::spawn(move || {
            let _mesh = panicking;
            std::panic::resume_unwind(Box::new("a rank's bug"));
        });
        assert!(panicked.join().is_err());
        assert_eq!(waiter.join().unwrap(), Err(CommError::Lost(group.rank(1))));
    });
}

#[test]
fn a_rank_that_is_silent_for_too_long_is_lost_for_all() {
    watched(|| {
        let group = Group::new(3);
        let patient = TcpCommOptions { stall_deadline: LONG, ..OPTIONS };
        // Before it ends, the patient rank has sent its numbers.
        let hasty = TcpCommOptions { stall_deadline: ENOUGH, ..OPTIONS };
        let comms = thread::scope(|scope| {
            let group = &group;
            let ranks = [(0, hasty), (1, patient), (2, patient)]
                .map(|(index, options)| scope.spawn(move || group.connect(index, options, LONG).unwrap()));
            ranks.map(|rank| rank.join().unwrap())
        });
        let [mut hasty, mut patient, silent] = comms;
        let patient = thread::spawn(move || patient.all_reduce(&mut [1.0; 8]));
        let Err(CommError::Stalled { rank, .. }) = hasty.all_reduce(&mut [1.0; 8]) else { panic!("it stalls") };
        assert_eq!(rank, group.rank(2));
        assert_eq!(patient.join().unwrap(), Err(CommError::Lost(group.rank(2))), "as the first to notice says");
        drop(silent);
    });
}

#[test]
fn ranks_that_disagree_get_an_error_and_not_a_wrong_sum() {
    watched(|| {
        let lengths = all(2, OPTIONS, |comm| comm.all_reduce(&mut vec![1.0; 8 + comm.rank().index()]));
        let operations = all(2, OPTIONS, |comm| {
            if comm.rank().index() == 1 {
                comm.gather_columns([1, 8], &vec![1.0; comm.rank().shard(8).len()], None)?;
            }
            comm.all_reduce(&mut [1.0; 8])
        });
        for results in [lengths, operations] {
            assert!(results.iter().all(Result::is_err), "{results:?}");
            assert!(results.iter().any(|result| matches!(result, Err(CommError::Mismatch(_)))), "{results:?}");
        }
    });
}
