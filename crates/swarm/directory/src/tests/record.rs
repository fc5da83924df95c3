//! Records: their bytes, their limits, their signatures.

use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

use super::{NOW, Random, layers, peer, record};
use crate::{
    BlockRecord, BlockUse, CLOCK_SKEW_MS, Coordinate, LIFETIME_MS_MAX, NEIGHBOURS_MAX, Neighbour, PEER_ID_BYTES_MAX,
    PeerId, RECORD_BYTES_MAX, Reach, RecordError, ServiceState, SignedRecord, Signer, Verifier,
};
use types::DType;

/// An ed25519 key. The peer id holds the public key after six bytes, as libp2p's does.
struct Ed25519(Ed25519KeyPair);

const PREFIX: [u8; 6] = [0x00, 0x24, 0x08, 0x01, 0x12, 0x20];

impl Ed25519 {
    fn new(seed: u8) -> Self {
        Self(Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("any 32 bytes are a seed"))
    }
}

impl Signer for Ed25519 {
    fn peer(&self) -> PeerId {
        PeerId::new(&[&PREFIX, self.0.public_key().as_ref()].concat()).expect("38 bytes")
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.0.sign(message).as_ref().to_vec()
    }
}

struct PublicKeys;

impl Verifier for PublicKeys {
    fn verify(&self, peer: &PeerId, message: &[u8], signature: &[u8]) -> bool {
        let key = peer.as_bytes().strip_prefix(&PREFIX);
        key.is_some_and(|key| UnparsedPublicKey::new(&ED25519, key).verify(message, signature).is_ok())
    }
}

/// With everything that a record can have.
fn full(id: PeerId) -> BlockRecord {
    let neighbour = |number| Neighbour {
        peer: PeerId::new(&[number; PEER_ID_BYTES_MAX]).expect("it is the longest"),
        round_trip_seconds: 0.03,
    };
    BlockRecord {
        peer: id,
        block_use: BlockUse::Whole,
        dtype: DType::BF16,
        state: ServiceState::Draining { next: Some(layers(7, 9)) },
        reach: Reach::Relayed,
        coordinate: Some(Coordinate { position: [0.1, -0.2, 0.0], height: 0.01, error: 0.3 }),
        neighbours: (0..NEIGHBOURS_MAX as u8).map(neighbour).collect(),
        ..record(0, layers(4, 12))
    }
}

#[test]
fn a_signed_record_is_read_and_verified() {
    let key = Ed25519::new(1);
    for record in [full(key.peer()), BlockRecord { peer: key.peer(), ..record(0, layers(0, 1)) }] {
        let bytes = SignedRecord::sign(record.clone(), &key).unwrap().encode();
        assert!(bytes.len() <= RECORD_BYTES_MAX);
        let signed = SignedRecord::decode(&bytes).unwrap();
        assert_eq!(signed.encode(), bytes);
        assert_eq!(*signed.verify(&PublicKeys, NOW).unwrap().record(), record);
    }
}

#[test]
fn every_number_format_state_and_use_is_read_back() {
    let key = Ed25519::new(1);
    let states = [
        ServiceState::Joining,
        ServiceState::Serving,
        ServiceState::Draining { next: None },
        ServiceState::Draining { next: Some(layers(1, 3)) },
    ];
    let each = DType::ALL.into_iter().flat_map(|dtype| states.map(|state| (dtype, state)));
    for (dtype, state) in each {
        let record = BlockRecord { dtype, state, ..full(key.peer()) };
        let signed = SignedRecord::sign(record, &key).unwrap();
        assert_eq!(SignedRecord::decode(&signed.encode()), Ok(signed));
    }
}

#[test]
fn a_record_of_another_peer_or_with_any_changed_bit_is_refused() {
    let key = Ed25519::new(1);
    let bytes = SignedRecord::sign(full(key.peer()), &key).unwrap().encode();
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let verified = SignedRecord::decode(&changed).and_then(|signed| signed.verify(&PublicKeys, NOW));
        assert!(verified.is_err(), "bit {bit}");
    }
    let others = full(Ed25519::new(2).peer());
    assert_eq!(SignedRecord::sign(others, &key), Err(RecordError::Field { field: "peer" }));
}

#[test]
fn cut_extended_and_random_bytes_are_refused() {
    let key = Ed25519::new(1);
    let bytes = SignedRecord::sign(full(key.peer()), &key).unwrap().encode();
    for end in 0..bytes.len() {
        assert!(SignedRecord::decode(&bytes[..end]).is_err(), "{end} bytes");
    }
    assert_eq!(SignedRecord::decode(&[&bytes[..], &[0]].concat()), Err(RecordError::Length));
    let long = vec![1; RECORD_BYTES_MAX + 1];
    assert_eq!(SignedRecord::decode(&long), Err(RecordError::TooLong { bytes: long.len() }));
    assert_eq!(SignedRecord::decode(&[9]), Err(RecordError::Version { ours: 1, theirs: 9 }));
    let mut random = Random(1);
    for _ in 0..10_000 {
        let mut changed = bytes.clone();
        for _ in 0..4 {
            changed[random.below(bytes.len() as u64) as usize] = random.below(256) as u8;
        }
        if let Ok(signed) = SignedRecord::decode(&changed) {
            assert_eq!(signed.encode(), changed);
        }
    }
}

#[test]
fn values_beyond_their_limits_are_refused() {
    let check = |change: &dyn Fn(&mut BlockRecord)| {
        let mut changed = full(peer(1));
        assert_eq!(changed.check(), Ok(()));
        change(&mut changed);
        assert!(changed.check().is_err(), "{changed:?}");
    };
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        check(&|record| record.speed.layer_seconds = value);
        check(&|record| record.speed.layer_tokens_per_s = value);
        check(&|record| record.speed.queue_seconds = value);
        check(&|record| record.speed.bytes_per_s = value);
        check(&|record| record.neighbours[3].round_trip_seconds = value);
        check(&|record| record.coordinate.as_mut().unwrap().height = value);
        check(&|record| record.coordinate.as_mut().unwrap().error = value);
    }
    check(&|record| record.coordinate.as_mut().unwrap().position[2] = f32::NAN);
    check(&|record| record.coordinate.as_mut().unwrap().position[2] = -1e6);
    check(&|record| record.speed.layer_tokens_per_s = 1e8);
    check(&|record| record.speed.layer_seconds = 0.0);
    check(&|record| record.kv_tokens_free = u32::MAX);
    check(&|record| record.lifetime_ms = 0);
    check(&|record| record.lifetime_ms = LIFETIME_MS_MAX + 1);
    check(&|record| record.layers = layers(0, 5000));
    check(&|record| record.state = ServiceState::Draining { next: Some(layers(0, 5000)) });
    check(&|record| record.neighbours.push(Neighbour { peer: peer(77), round_trip_seconds: 0.1 }));
    check(&|record| record.neighbours[1] = record.neighbours[0]);
    check(&|record| record.neighbours[1].peer = record.peer);
}

#[test]
fn a_record_is_valid_from_its_issue_until_it_expires() {
    let record = record(1, layers(0, 4));
    let lifetime: u64 = record.lifetime_ms.into();
    assert_eq!(record.check_time(NOW), Ok(()));
    assert_eq!(record.check_time(NOW.plus(lifetime - 1)), Ok(()));
    assert_eq!(record.check_time(NOW.plus(lifetime)), Err(RecordError::Expired { ago_ms: 0 }));
    let early = BlockRecord { issued: NOW.plus(CLOCK_SKEW_MS), ..record.clone() };
    assert_eq!(early.check_time(NOW), Ok(()));
    let future = BlockRecord { issued: NOW.plus(CLOCK_SKEW_MS + 1), ..record };
    assert_eq!(future.check_time(NOW), Err(RecordError::Future { by_ms: CLOCK_SKEW_MS + 1 }));
}

#[test]
fn a_peer_id_has_1_to_44_bytes() {
    assert_eq!(PeerId::new(&[]), None);
    assert_eq!(PeerId::new(&[1; PEER_ID_BYTES_MAX + 1]), None);
    assert_eq!(PeerId::new(&[1; PEER_ID_BYTES_MAX]).unwrap().as_bytes(), [1; PEER_ID_BYTES_MAX]);
    assert_eq!(PeerId::new(&[0, 0xAB]).unwrap().to_string(), "00ab");
}
