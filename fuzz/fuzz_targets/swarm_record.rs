//! Any bytes are a record of the swarm, or are refused; within bounded memory. What was read is written as the same bytes, and a
//! directory, a route and a choice of a block take whatever it claims.
#![no_main]

use std::collections::HashSet;

use directory::{
    BlockRecord, BlockUse, ClientView, Coordinate, Directory, ModelDigest, Neighbour, PeerCapacity, PeerId, Reach,
    Reputation, RouteLimits, RoutePlanner, RouteRequest, ServedBlock, ServiceState, SignedRecord, Signer, Speed,
    UnixTime, Verifier, choose_block, consider_move,
};
use libfuzzer_sys::fuzz_target;
use types::{DType, LayerRange};

/// A choice among the blocks of 1,024 layers compares up to 513 of 512 layers.
const BYTES_MAX: usize = 8 << 20;

fuzz_target!(
    init: fuzz::plant("swarm_record", &seeds()),
    |input: &[u8]| fuzz::within_bytes(BYTES_MAX, || read(input))
);

/// Takes any signature.
struct Anybody(PeerId);

impl Signer for Anybody {
    fn peer(&self) -> PeerId {
        self.0
    }

    fn sign(&self, _: &[u8]) -> Vec<u8> {
        vec![5; 64]
    }
}

impl Verifier for Anybody {
    fn verify(&self, _: &PeerId, _: &[u8], _: &[u8]) -> bool {
        true
    }
}

fn read(input: &[u8]) {
    let Ok(signed) = SignedRecord::decode(input) else { return };
    assert_eq!(signed.encode(), input);
    let record = signed.record().clone();
    assert_eq!(record.check(), Ok(()));
    let now = record.issued;
    // One that was issued at the end of time has expired.
    let Ok(verified) = signed.verify(&Anybody(record.peer), now) else { return assert!(record.expires() <= now) };
    let mut directory = Directory::new(1);
    directory.insert(verified, now).expect("there is room for one");

    // Its last layer is the model's.
    let layers = record.layers.end();
    let coverage = directory.coverage(&record.model, layers, now);
    let capacity = PeerCapacity { layers_max: record.layers.count(), layer_tokens_per_s: 1.0 };
    assert!(choose_block(&coverage, capacity, 0.5).is_some());
    consider_move(&coverage, ServedBlock { layers: record.layers, since: UnixTime(0) }, capacity, now, [0.5; 2]);
    let (reputation, client, excluded) = (Reputation::new(), ClientView::default(), HashSet::new());
    let planner = RoutePlanner {
        directory: &directory,
        reputation: &reputation,
        client: &client,
        now,
        limits: RouteLimits::default(),
    };
    let (model, kv_tokens, activation_bytes) = (record.model, 0, 8192);
    let request = RouteRequest { model, layers, dtype: None, kv_tokens, activation_bytes, excluded: &excluded };
    let serves_all = record.layers.start() == 0 && record.state == ServiceState::Serving;
    match planner.plan(&request) {
        Ok(chain) => assert!(serves_all && chain.token_seconds.is_finite()),
        Err(_) => assert!(!serves_all),
    }
    assert_eq!(directory.expire(record.expires()), 1);
}

fn seeds() -> Vec<Vec<u8>> {
    let layers = |start, end| LayerRange::new(start, end).expect("the range is not empty");
    let peer = |number: u8| PeerId::new(&[number; 38]).expect("it is short");
    let least = BlockRecord {
        peer: peer(1),
        sequence: 1,
        issued: UnixTime(1_700_000_000_000),
        lifetime_ms: 60_000,
        model: ModelDigest([3; 32]),
        layers: layers(0, 4),
        block_use: BlockUse::AnyRange,
        dtype: DType::Q8_0,
        state: ServiceState::Serving,
        reach: Reach::Direct,
        speed: Speed { layer_seconds: 0.01, layer_tokens_per_s: 400.0, queue_seconds: 0.0, bytes_per_s: 1e7 },
        kv_tokens_free: 1000,
        coordinate: None,
        neighbours: Vec::new(),
    };
    let full = BlockRecord {
        block_use: BlockUse::Whole,
        state: ServiceState::Draining { next: Some(layers(4, 8)) },
        reach: Reach::Relayed,
        coordinate: Some(Coordinate { position: [0.1, -0.2, 0.0], height: 0.01, error: 0.3 }),
        neighbours: (2..5).map(|number| Neighbour { peer: peer(number), round_trip_seconds: 0.03 }).collect(),
        ..least.clone()
    };
    let sign = |record: BlockRecord| SignedRecord::sign(record, &Anybody(peer(1))).expect("it is within the limits");
    [least, full].map(|record| sign(record).encode()).to_vec()
}
