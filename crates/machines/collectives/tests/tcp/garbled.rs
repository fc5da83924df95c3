//! Bytes that were altered, held back or cut in transit: typed errors, no panic, no hang, and never a wrong sum.

use std::thread;

use collectives::tcp::TcpCommOptions;
use collectives::{CommError, Communicator as _};

use crate::group::{Group, LONG, OPTIONS, SHORT};
use testing::proxy::{TransitFault, proxy};
use testing::watchdog::watched;

/// The bytes of a handshake and of the first phase, sent by the initiator and by the responder.
const INITIATOR_BYTES: usize = 25 + 48 + 18 + 34;
const RESPONDER_BYTES: usize = 1 + 48 + 34;

const LEN: usize = 100_000;

/// A rank's result: `Err(None)` if it did not connect.
type RankResult = Result<(), Option<CommError>>;

/// How long the ranks wait: for each other to form a group, and for bytes.
#[derive(Clone, Copy)]
enum JoinTimeouts {
    /// Where the other side detects the fault and reports it.
    Long,
    /// Where nothing arrives, or nothing that can be parsed.
    ShortForming,
    ShortStall,
}

/// Runs sums of ones on two ranks whose connection goes through a proxy. Returns the result of each rank.
fn run(timeouts: JoinTimeouts, there: TransitFault, back: TransitFault) -> [RankResult; 2] {
    let mut group = Group::new(2);
    group.addresses[0] = proxy(group.addresses[0], there, back);
    let (forming, stall_deadline) = match timeouts {
        JoinTimeouts::Long => (LONG, LONG),
        JoinTimeouts::ShortForming => (SHORT, LONG),
        JoinTimeouts::ShortStall => (LONG, SHORT),
    };
    let options = TcpCommOptions { stall_deadline, ..OPTIONS };
    let part = |index| {
        let mut comm = group.connect(index, options, forming).map_err(|_| None)?;
        for _ in 0..3 {
            let mut values = vec![1.0; LEN];
            comm.all_reduce(&mut values).map_err(Some)?;
            assert!(values.iter().all(|&value| value == 2.0), "a wrong sum");
        }
        Ok(())
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|index| scope.spawn(move || part(index)));
        ranks.map(|rank| rank.join().unwrap())
    })
}

/// Runs `check` for all offsets in parallel.
fn at_each<const N: usize>(places: [usize; N], check: impl Fn(usize) + Sync) {
    thread::scope(|scope| {
        let check = &check;
        places.map(|at| scope.spawn(move || check(at))).into_iter().for_each(|checked| checked.join().unwrap());
    });
}

#[test]
fn a_proxy_that_only_forwards_does_no_harm() {
    watched(|| assert_eq!(run(JoinTimeouts::Long, TransitFault::None, TransitFault::None), [Ok(()), Ok(())]));
}

#[test]
fn a_handshake_with_an_altered_byte_forms_no_group() {
    watched(|| {
        at_each([0, 8, 10, 11, 13, 15, 17, 21, 25, 72, 73, 74, 75, 90], |at| {
            let found = run(JoinTimeouts::ShortForming, TransitFault::Flip(at), TransitFault::None);
            assert_eq!(found, [Err(None), Err(None)], "the caller's byte {at}");
        });
        at_each([0, 1, 33, 48], |at| {
            let found = run(JoinTimeouts::ShortForming, TransitFault::None, TransitFault::Flip(at));
            assert_eq!(found, [Err(None), Err(None)], "the byte {at} of the called");
        });
    });
}

#[test]
fn an_altered_byte_of_a_message_is_an_error_for_who_gets_it_and_ends_the_group() {
    watched(|| {
        // Within a message, its tag, and within a later record.
        at_each([2, 100, 65_536, 70_000, 200_000], |at| {
            let found = run(JoinTimeouts::Long, TransitFault::Flip(INITIATOR_BYTES + at), TransitFault::None);
            assert!(matches!(found[0], Err(Some(CommError::Forged(rank))) if rank.index() == 1), "{at}: {found:?}");
            assert!(found[1].is_err(), "{at}: {found:?}");
            let found = run(JoinTimeouts::Long, TransitFault::None, TransitFault::Flip(RESPONDER_BYTES + at));
            assert!(matches!(found[1], Err(Some(CommError::Forged(rank))) if rank.index() == 0), "{at}: {found:?}");
            assert!(found[0].is_err(), "{at}: {found:?}");
        });
        // A length that is too large or too small.
        at_each([0, 1], |at| {
            let found = run(JoinTimeouts::ShortStall, TransitFault::Flip(INITIATOR_BYTES + at), TransitFault::None);
            assert!(found.iter().all(|found| matches!(found, Err(Some(_)))), "{at}: {found:?}");
        });
    });
}

#[test]
fn a_connection_that_is_cut_loses_the_peer() {
    watched(|| {
        at_each([0, 5, 1000, 66_000, 300_000], |at| {
            let found = run(JoinTimeouts::Long, TransitFault::Cut(INITIATOR_BYTES + at), TransitFault::None);
            for (index, found) in found.iter().enumerate() {
                assert!(matches!(found, Err(Some(CommError::Lost(rank))) if rank.index() != index), "{at}: {found:?}");
            }
        });
    });
}

#[test]
fn bytes_that_are_held_back_are_a_stall() {
    watched(|| {
        at_each([0, 5, 1000, 66_000], |at| {
            let found = run(JoinTimeouts::ShortStall, TransitFault::None, TransitFault::Hold(RESPONDER_BYTES + at));
            let Err(Some(CommError::Stalled { rank, waited })) = found[1] else { panic!("{at}: {found:?}") };
            assert!(rank.index() == 0 && waited >= SHORT);
        });
        at_each([0, 60, RESPONDER_BYTES - 1], |at| {
            let found = run(JoinTimeouts::ShortForming, TransitFault::None, TransitFault::Hold(at));
            assert_eq!(found[1], Err(None), "held in the handshake at {at}");
        });
    });
}
