//! What a peer announces: the block it serves, how fast, and where it is in the network. A record is signed and
//! expires.
//!
//! A record is a claim. [`BlockRecord::check`] bounds what it can claim; a client prefers what it measured itself, and
//! [`Coverage`](crate::Coverage) bounds what one peer counts for.

mod signed;
mod wire;

use types::{DType, LayerRange};

pub use signed::{RECORD_BYTES_MAX, SIGNATURE_BYTES_MAX, SignedRecord, Signer, VerifiedRecord, Verifier};

use crate::coordinate::Coordinate;
use crate::identity::{ModelDigest, PeerId, UnixTime};

/// The most layers of a model.
pub const LAYERS_MAX: usize = 1024;
/// The most neighbours that a record lists.
pub const NEIGHBOURS_MAX: usize = 16;
/// The longest life of a record.
pub const LIFETIME_MS_MAX: u32 = 15 * 60 * 1000;
/// A record may be issued this far in the future of whoever reads it: what clocks that are set by NTP never differ by.
pub const CLOCK_SKEW_MS: u64 = 15 * 1000;

const LAYER_SECONDS: std::ops::RangeInclusive<f32> = 1e-6..=60.0;
const LAYER_TOKENS_PER_S: std::ops::RangeInclusive<f32> = 1e-3..=1e7;
const QUEUE_SECONDS: std::ops::RangeInclusive<f32> = 0.0..=600.0;
const BYTES_PER_S: std::ops::RangeInclusive<f32> = 1e2..=1e11;
const ROUND_TRIP_SECONDS: std::ops::RangeInclusive<f32> = 0.0..=60.0;
const KV_TOKENS_MAX: u32 = 1 << 30;

/// One block of one peer.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockRecord {
    pub peer: PeerId,
    /// A later record of a peer has a higher number.
    pub sequence: u64,
    pub issued: UnixTime,
    pub lifetime_ms: u32,
    pub model: ModelDigest,
    pub layers: LayerRange,
    pub block_use: BlockUse,
    /// Of the weights.
    pub dtype: DType,
    pub state: ServiceState,
    pub reach: Reach,
    pub speed: Speed,
    /// Tokens whose keys and values still fit, for all layers of the block.
    pub kv_tokens_free: u32,
    pub coordinate: Option<Coordinate>,
    /// At most [`NEIGHBOURS_MAX`], each another peer.
    pub neighbours: Vec<Neighbour>,
}

/// Which layers of a block a chain may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockUse {
    /// Any range within the block: a consort peer.
    AnyRange,
    /// The whole block: a KwaaiNet server.
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceState {
    /// The weights are on their way. The block counts when other peers choose theirs, but takes no sessions.
    Joining,
    Serving,
    /// Open sessions go on, new ones are refused. `next` is the block that the peer moves to.
    Draining {
        next: Option<LayerRange>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Others can connect to it.
    Direct,
    /// Only over a relay, or by a connection of its own.
    Relayed,
}

/// Measured by the peer itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// The time of one layer in a step of one token.
    pub layer_seconds: f32,
    /// Tokens times layers per second, with as many sessions as the peer takes.
    pub layer_tokens_per_s: f32,
    /// How long a step waits at present.
    pub queue_seconds: f32,
    /// Of its access to the network.
    pub bytes_per_s: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Neighbour {
    pub peer: PeerId,
    pub round_trip_seconds: f32,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RecordError {
    #[error("a record of {bytes} bytes; at most {RECORD_BYTES_MAX} are read")]
    TooLong { bytes: usize },
    #[error("a record of version {theirs}; this build reads version {ours}")]
    Version { ours: u8, theirs: u8 },
    #[error("the record ends early, or goes on after its end")]
    Length,
    #[error("no valid {field} in a record")]
    Field { field: &'static str },
    #[error("{field} of {value} in a record")]
    Limit { field: &'static str, value: f64 },
    #[error("the record was issued {by_ms} ms in the future")]
    Future { by_ms: u64 },
    #[error("the record expired {ago_ms} ms ago")]
    Expired { ago_ms: u64 },
    #[error("the signature is not that of peer {peer}")]
    Signature { peer: PeerId },
}

impl BlockRecord {
    pub fn expires(&self) -> UnixTime {
        self.issued.plus(self.lifetime_ms.into())
    }

    /// Every value is within its limits.
    pub fn check(&self) -> Result<(), RecordError> {
        if !(1..=LIFETIME_MS_MAX).contains(&self.lifetime_ms) {
            return Err(RecordError::Limit { field: "lifetime", value: self.lifetime_ms.into() });
        }
        let next = match self.state {
            ServiceState::Draining { next } => next,
            ServiceState::Joining | ServiceState::Serving => None,
        };
        if let Some(layers) = [Some(self.layers), next].into_iter().flatten().find(|layers| layers.end() > LAYERS_MAX) {
            return Err(RecordError::Limit { field: "last layer", value: layers.end() as f64 });
        }
        if self.kv_tokens_free > KV_TOKENS_MAX {
            return Err(RecordError::Limit { field: "free K/V tokens", value: self.kv_tokens_free.into() });
        }
        self.speed.check()?;
        if self.coordinate.is_some_and(|coordinate| !coordinate.is_valid()) {
            return Err(RecordError::Field { field: "coordinate" });
        }
        self.check_neighbours()
    }

    /// The record is neither expired nor from the future.
    pub fn check_time(&self, now: UnixTime) -> Result<(), RecordError> {
        if self.issued > now.plus(CLOCK_SKEW_MS) {
            return Err(RecordError::Future { by_ms: self.issued.since(now) });
        }
        if self.expires() <= now {
            return Err(RecordError::Expired { ago_ms: now.since(self.expires()) });
        }
        Ok(())
    }

    fn check_neighbours(&self) -> Result<(), RecordError> {
        let count = self.neighbours.len();
        if count > NEIGHBOURS_MAX {
            return Err(RecordError::Limit { field: "number of neighbours", value: count as f64 });
        }
        for (index, neighbour) in self.neighbours.iter().enumerate() {
            let is_again = self.neighbours[..index].iter().any(|other| other.peer == neighbour.peer);
            if is_again || neighbour.peer == self.peer {
                return Err(RecordError::Field { field: "neighbour" });
            }
            within("round trip", neighbour.round_trip_seconds, ROUND_TRIP_SECONDS)?;
        }
        Ok(())
    }
}

impl Speed {
    fn check(&self) -> Result<(), RecordError> {
        within("time per layer", self.layer_seconds, LAYER_SECONDS)?;
        within("layers per second", self.layer_tokens_per_s, LAYER_TOKENS_PER_S)?;
        within("queue", self.queue_seconds, QUEUE_SECONDS)?;
        within("bytes per second", self.bytes_per_s, BYTES_PER_S)
    }
}

/// A value that is not a number is in no range.
fn within(field: &'static str, value: f32, range: std::ops::RangeInclusive<f32>) -> Result<(), RecordError> {
    match range.contains(&value) {
        true => Ok(()),
        false => Err(RecordError::Limit { field, value: value.into() }),
    }
}
