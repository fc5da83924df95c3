#![allow(clippy::unwrap_used)] // a panic is how a test fails

use types::WorldSize;

use super::*;
use collectives::shared_memory::GroupLimits;

/// Never passes in a test.
const LONG: Duration = Duration::from_secs(1 << 20);
const SHORT: Duration = Duration::from_millis(100);
const STEP: RequestDigest = [7; 32];

fn group(world: u16, timeout: Duration) -> Vec<Peers> {
    let world = WorldSize::new(world).unwrap();
    let (segment, _) = Segment::create(GroupLimits { world, elements_max: 1 }).unwrap();
    let ranks: Vec<_> = world.ranks().collect();
    let pairs = ranks[1..].iter().map(|_| UnixStream::pair().unwrap());
    let (to_others, to_rank_zero): (Vec<_>, Vec<_>) = pairs.unzip();
    let to_others = ranks[1..].iter().copied().zip(to_others).collect();
    let connections = [to_others].into_iter().chain(to_rank_zero.into_iter().map(|stream| vec![(ranks[0], stream)]));
    let new = |(&rank, connections)| Peers::new(rank, segment.clone(), connections, timeout, || 0).unwrap();
    ranks.iter().zip(connections).map(new).collect()
}

/// All ranks at once, each with its own digest, or `None` if it rejects.
fn agree(peers: &mut [Peers], digests: &[Option<RequestDigest>]) -> Vec<Result<(), PeerError>> {
    thread::scope(|scope| {
        let agree = |(peers, digest): (_, &Option<RequestDigest>)| {
            let (peers, digest): (&mut Peers, _) = (peers, *digest);
            scope.spawn(move || {
                // A rank keeps its communicator for the whole epoch: dropping it would end the epoch.
                std::mem::forget(peers.renew(&|| false)?);
                peers.agree(digest.unwrap_or(STEP), digest.is_some())
            })
        };
        let ranks: Vec<_> = peers.iter_mut().zip(digests).map(agree).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn rank(peers: &[Peers], index: usize) -> Rank {
    peers[index].rank
}

#[test]
fn all_run_a_step_or_none() {
    let mut peers = group(3, LONG);
    for refusing in 0..3 {
        assert_eq!(agree(&mut peers, &[Some(STEP); 3]), [Ok(()); 3]);
        let mut digests = [Some(STEP); 3];
        digests[refusing] = None;
        let mut expected = [Err(PeerError::Refused(rank(&peers, refusing))); 3];
        expected[refusing] = Ok(());
        assert_eq!(agree(&mut peers, &digests), expected);
    }
    assert_eq!(agree(&mut peers, &[None; 3]), [Ok(()); 3], "each has its own reason");
    assert_eq!(agree(&mut peers, &[Some(STEP); 3]), [Ok(()); 3]);
}

#[test]
fn another_step_ends_the_epoch_and_the_next_one_begins_when_all_have_left_it() {
    let mut peers = group(3, LONG);
    for epoch in 1..4 {
        assert!(peers.iter().all(|peers| peers.epoch.0 == epoch));
        let different = agree(&mut peers, &[Some(STEP), Some(STEP), Some([8; 32])]);
        assert_eq!(different[0], Err(PeerError::OutOfStep(rank(&peers, 2))));
        assert!(different.iter().all(Result::is_err), "{different:?}");
        let again = agree(&mut peers, &[Some(STEP); 3]);
        assert_eq!(again, [Err(PeerError::Ended(CommError::Aborted)); 3]);
        peers.iter_mut().for_each(Peers::leave_epoch);
        assert_eq!(agree(&mut peers, &[Some(STEP); 3]), [Ok(()); 3]);
    }
}

#[test]
fn a_rank_that_does_not_come_ends_the_epoch() {
    for missing in 0..3 {
        let mut peers = group(3, SHORT);
        let mut present: Vec<_> = peers.iter_mut().collect();
        present.remove(missing);
        thread::scope(|scope| {
            for peers in present {
                scope.spawn(|| assert!(peers.agree(STEP, true).is_err()));
            }
        });
        assert!(matches!(peers[missing].agree(STEP, true), Err(PeerError::Ended(_))));
        // The next epoch does not begin before all ranks have left this one.
        peers[1].leave_epoch();
        assert!(matches!(peers[1].renew(&|| false), Err(PeerError::NotRenewed { .. })));
        assert!(matches!(peers[1].renew(&|| true), Err(PeerError::NoLeader)));
    }
}

#[test]
fn a_rank_that_is_gone_ends_the_group_for_good() {
    for gone in 0..3 {
        let mut peers = group(3, LONG);
        let expected = rank(&peers, gone);
        drop(peers.remove(gone));
        for peers in &mut peers {
            // The rank waits for the others, or finds that they are gone.
            let error = peers.agree(STEP, true).unwrap_err();
            assert!(matches!(error, PeerError::Gone(_) | PeerError::Ended(_)), "{error}");
            peers.leave_epoch();
        }
        for peers in &peers {
            while peers.shared.lock().gone.is_none() {
                thread::yield_now();
            }
            assert_eq!(peers.check(), Err(PeerError::Gone(expected)));
        }
    }
}

#[test]
fn a_step_whose_collectives_do_not_get_on_ends_the_epoch() {
    let peers = group(2, SHORT);
    let abort = peers[0].segment.abort(peers[0].epoch);
    assert_eq!(abort.cause(), None);
    let stepping = peers[0].stepping();
    while abort.cause().is_none() {
        thread::yield_now();
    }
    drop(stepping);
    assert!(!peers[0].shared.lock().is_stepping);
}

#[test]
fn messages_read_back_and_others_are_none() {
    for kind in KINDS {
        let message = PeerMessage { kind, rank: 3, epoch: 9, round: u64::MAX, digest: STEP };
        assert_eq!(PeerMessage::decode(&message.encode()), Some(message));
    }
    assert_eq!(PeerMessage::decode(&[0xff; MESSAGE_BYTES]), None);
}
