//! What the tests of this crate share: peers, records and keys.

mod balance;
mod coordinate;
mod directory;
mod record;
mod reputation;
mod route;

use types::{DType, LayerRange};

use crate::{
    BlockRecord, BlockUse, Directory, ModelDigest, PeerId, RECORDS_MAX, Reach, ServiceState, SignedRecord, Signer,
    Speed, UnixTime, VerifiedRecord, Verifier,
};

pub const MODEL: ModelDigest = ModelDigest([3; 32]);
pub const NOW: UnixTime = UnixTime(1_700_000_000_000);

pub fn peer(number: u8) -> PeerId {
    PeerId::new(&[0, 36, number]).expect("it is short")
}

pub fn layers(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).expect("the range is not empty")
}

/// A peer without coordinates that can be reached, with 10 ms per layer.
pub fn record(number: u8, block: LayerRange) -> BlockRecord {
    BlockRecord {
        peer: peer(number),
        sequence: 1,
        issued: NOW,
        lifetime_ms: 60_000,
        model: MODEL,
        layers: block,
        block_use: BlockUse::AnyRange,
        dtype: DType::Q8_0,
        state: ServiceState::Serving,
        reach: Reach::Direct,
        speed: Speed { layer_seconds: 0.01, layer_tokens_per_s: 400.0, queue_seconds: 0.0, bytes_per_s: 1e9 },
        kv_tokens_free: 1000,
        coordinate: None,
        neighbours: Vec::new(),
    }
}

pub fn verified(record: BlockRecord) -> VerifiedRecord {
    let (peer, issued) = (record.peer, record.issued);
    let signed = SignedRecord::sign(record, &Trusted(peer)).expect("the values are within limits");
    signed.verify(&Trusted(peer), issued).expect("everything is trusted")
}

pub fn directory(records: impl IntoIterator<Item = BlockRecord>) -> Directory {
    let mut directory = Directory::new(RECORDS_MAX);
    records.into_iter().for_each(|record| directory.insert(verified(record), NOW).expect("there is room"));
    directory
}

/// Signs nothing and believes everything.
struct Trusted(PeerId);

impl Signer for Trusted {
    fn peer(&self) -> PeerId {
        self.0
    }

    fn sign(&self, _: &[u8]) -> Vec<u8> {
        Vec::new()
    }
}

impl Verifier for Trusted {
    fn verify(&self, _: &PeerId, _: &[u8], _: &[u8]) -> bool {
        true
    }
}

/// Splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (bits ^ (bits >> 31)) % end
    }

    pub fn uniform(&mut self) -> f64 {
        self.below(1 << 53) as f64 / (1u64 << 53) as f64
    }
}
