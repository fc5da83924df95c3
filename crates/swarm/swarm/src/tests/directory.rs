//! The directory and the coverage made from it.

use super::{MODEL, NOW, directory, layers, peer, record, verified};
use crate::{
    BLOCKS_PER_PEER_MAX, BlockRecord, Directory, DirectoryError, ModelDigest, ServiceState, Speed, TRUSTED_SPEED_FACTOR,
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
    assert_eq!(refused, Err(DirectoryError::Full { records_max: 2 }));
    small.insert(verified(BlockRecord { sequence: 2, ..record(2, layers(4, 8)) }), NOW).unwrap();
    let later = NOW.plus(60_000);
    small.insert(verified(BlockRecord { issued: later, ..record(3, layers(0, 4)) }), later).unwrap();
    assert_eq!(small.len(), 1);
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
