//! The directory and the coverage made from it.

use super::{MODEL, NOW, directory, layers, peer, record, verified};
use crate::{
    AddressBlock, BLOCKS_PER_PEER_MAX, BlockRecord, CROWD, Directory, DirectoryError, ModelDigest, PeerId, RECORDS_MAX,
    ServiceState, Speed, TRUSTED_SPEED_FACTOR,
};

#[test]
fn the_newest_record_of_a_peer_wins() {
    let mut directory = directory([]);
    let numbered = |sequence, block| verified(BlockRecord { sequence, ..record(1, block) });
    directory.insert(numbered(5, layers(0, 4)), NOW).unwrap();
    directory.insert(numbered(7, layers(4, 8)), NOW).unwrap();
    for sequence in [5, 6, 7] {
        let refused = directory.insert(numbered(sequence, layers(0, 4)), NOW);
        assert_eq!(refused, Err(DirectoryError::NotNewer { peer: peer(1), sequence, known: 7 }));
    }
    assert_eq!(directory.get(&MODEL, &peer(1)).unwrap().layers, layers(4, 8));
    assert_eq!(directory.len(), 1);
}

#[test]
fn records_expire() {
    let mut directory = directory([record(1, layers(0, 4))]);
    directory.insert(verified(BlockRecord { lifetime_ms: 90_000, ..record(2, layers(0, 4)) }), NOW).unwrap();
    assert_eq!(directory.expire(NOW.plus(59_999)), 0);
    assert_eq!(directory.expire(NOW.plus(60_000)), 1);
    assert_eq!(directory.get(&MODEL, &peer(1)), None);
    // One that was renewed lives on.
    let renewed = BlockRecord { sequence: 2, issued: NOW.plus(60_000), ..record(2, layers(0, 4)) };
    directory.insert(verified(renewed), NOW.plus(60_000)).unwrap();
    assert_eq!(directory.expire(NOW.plus(90_000)), 0);
    assert_eq!(directory.expire(NOW.plus(120_000)), 1);
    assert!(directory.is_empty());
    assert_eq!(directory.records(&MODEL).count(), 0);
    let late = directory.insert(verified(record(3, layers(0, 4))), NOW.plus(60_000));
    assert!(matches!(late, Err(DirectoryError::Record(_))), "{late:?}");
}

#[test]
fn a_peer_has_few_blocks_and_a_full_directory_keeps_what_it_has() {
    let mut directory = directory([]);
    let of_model = |number| BlockRecord { model: ModelDigest([number; 32]), ..record(1, layers(0, 4)) };
    for number in 0..BLOCKS_PER_PEER_MAX as u8 {
        directory.insert(verified(of_model(number)), NOW).unwrap();
    }
    let refused = directory.insert(verified(of_model(99)), NOW);
    assert_eq!(refused, Err(DirectoryError::TooManyBlocks { peer: peer(1) }));
    directory.remove(&ModelDigest([0; 32]), &peer(1));
    directory.insert(verified(of_model(99)), NOW).unwrap();

    let mut small = Directory::new(2);
    small.insert(verified(record(1, layers(0, 4))), NOW).unwrap();
    small.insert(verified(record(2, layers(0, 4))), NOW).unwrap();
    let refused = small.insert(verified(record(3, layers(0, 4))), NOW);
    assert_eq!(refused, Err(DirectoryError::Full { records_max: 2 }), "the others are of this process too");
    small.insert(verified(BlockRecord { sequence: 2, ..record(2, layers(4, 8)) }), NOW).unwrap();
    let later = NOW.plus(60_000);
    small.insert(verified(BlockRecord { issued: later, ..record(3, layers(0, 4)) }), later).unwrap();
    assert_eq!(small.len(), 1);
}

fn block(number: u8) -> AddressBlock {
    AddressBlock::of([203, 0, number, 1].into())
}

/// A peer of a large number.
fn stranger(number: u32) -> BlockRecord {
    let peer = PeerId::new(&[&[9, 9][..], &number.to_le_bytes()].concat()).unwrap();
    BlockRecord { peer, ..record(0, layers(0, 4)) }
}

#[test]
fn what_one_address_block_alone_tells_has_a_share() {
    let mut directory = Directory::new(1600);
    let mut now = NOW;
    let mut tell = |number: u32, teller: u8| {
        now = now.plus(1);
        let told = directory.insert_told(verified(stranger(number)), block(teller), now);
        told.map(|()| directory.len())
    };
    let taken = (0..10_000).filter(|number| tell(*number, 1).is_ok()).count();
    assert_eq!(taken, 100);
    assert_eq!(tell(10_000, 1), Err(DirectoryError::Share { share: 100 }));
    // Fifteen others fill it, and the next one displaces the latest of those that have most.
    for teller in 2..=16 {
        assert_eq!((0..100).filter(|number| tell(u32::from(teller) * 20_000 + number, teller).is_ok()).count(), 100);
    }
    assert_eq!(tell(1_000_000, 17), Ok(1600));
    directory.insert(verified(record(1, layers(0, 4))), NOW).unwrap();
    assert_eq!(directory.len(), 1600);
    assert!(directory.knows(&stranger(0).peer) && directory.knows(&stranger(1_000_000).peer));
    assert!(!directory.knows(&stranger(16 * 20_000 + 99).peer));
    // What is known is renewed in a full directory, too.
    let renewed = BlockRecord { sequence: 2, ..stranger(0) };
    directory.insert_told(verified(renewed), block(1), NOW).unwrap();
}

#[test]
fn who_was_reached_comes_first_then_who_many_know_then_who_is_known_for_longest() {
    let mut directory = Directory::new(RECORDS_MAX);
    for (number, tellers) in [(1, &[1][..]), (2, &[1]), (3, &[1, 2]), (4, &[1, 2, 3]), (5, &[2])] {
        let record = verified(stranger(number));
        for teller in tellers {
            if !directory.tell_again(record.signed(), block(*teller)) {
                directory.insert_told(record.clone(), block(*teller), NOW.plus(number.into())).unwrap();
            }
        }
    }
    directory.set_reached(&stranger(5).peer);
    let order: Vec<PeerId> = directory.by_trust(Some(&MODEL)).iter().map(|record| record.record().peer).collect();
    assert_eq!(order, [5, 4, 3, 1, 2].map(|number| stranger(number).peer));
}

#[test]
fn who_is_known_from_one_crowded_block_alone_is_doubtful() {
    let mut directory = Directory::new(RECORDS_MAX);
    let (crowd, model) = (CROWD as u32 + 1, Some(&MODEL));
    let renewed = |number| verified(BlockRecord { sequence: 2, ..stranger(number) });
    for number in 0..crowd {
        directory.insert_told(verified(stranger(number)), block(1), NOW).unwrap();
    }
    assert!(directory.is_doubtful(&MODEL, &stranger(0).peer) && directory.has_doubtful(&MODEL));
    // Others are not, nor are those that others know, and those that were reached.
    directory.insert_told(verified(stranger(crowd)), block(2), NOW).unwrap();
    assert!(!directory.is_doubtful(&MODEL, &stranger(crowd).peer));
    for number in crowd + 1..crowd + 4 {
        directory.insert_told(verified(stranger(number)), block(1), NOW).unwrap();
    }
    directory.insert_told(renewed(0), block(2), NOW).unwrap();
    assert!(directory.tell_again(verified(stranger(1)).signed(), block(2)));
    directory.set_reached(&stranger(2).peer);
    for number in 0..3 {
        assert!(!directory.is_doubtful(&MODEL, &stranger(number).peer), "{number}");
    }
    assert!(directory.is_doubtful(&MODEL, &stranger(3).peer));
    assert_eq!(directory.by_trust(model).len(), crowd as usize + 4);
    // One fewer is no crowd.
    directory.remove(&MODEL, &stranger(3).peer);
    assert!(!directory.has_doubtful(&MODEL));
}

#[test]
fn coverage_is_throughput_per_layer() {
    let joining = BlockRecord { state: ServiceState::Joining, ..record(2, layers(2, 4)) };
    let moving = BlockRecord { state: ServiceState::Draining { next: Some(layers(5, 6)) }, ..record(3, layers(0, 4)) };
    let leaving = BlockRecord { state: ServiceState::Draining { next: None }, ..record(4, layers(0, 4)) };
    let directory = directory([record(1, layers(0, 4)), joining, moving, leaving]);
    let coverage = directory.coverage(&MODEL, 6, NOW);
    assert_eq!(coverage.served(), [100.0, 100.0, 100.0, 100.0, 0.0, 0.0]);
    assert_eq!(coverage.planned(), [100.0, 100.0, 300.0, 300.0, 0.0, 400.0]);
    assert_eq!(coverage.planned_peers(), [1, 1, 2, 2, 0, 1]);
    assert_eq!(coverage.first_gap(), Some(layers(4, 6)));
    assert_eq!(coverage.balance(), 0.0);
    assert_eq!(directory.coverage(&MODEL, 3, NOW).served(), [100.0; 3]);
    assert_eq!(directory.coverage(&MODEL, 3, NOW.plus(60_000)).served(), [0.0; 3]);
}

#[test]
fn a_peer_that_claims_to_be_very_fast_counts_for_little_more() {
    let honest = (1..6).map(|number| record(number, layers(0, 4)));
    let liar = record(9, layers(4, 8));
    let liar = BlockRecord { speed: Speed { layer_tokens_per_s: 1e7, ..liar.speed }, ..liar };
    let coverage = directory(honest.chain([liar])).coverage(&MODEL, 8, NOW);
    assert_eq!(coverage.served()[0], 500.0);
    assert_eq!(coverage.served()[4], 100.0 * TRUSTED_SPEED_FACTOR);
}
