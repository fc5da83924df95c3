//! What is known of a swarm and its peers beside what every chain of machines has: as a snapshot, and in `/v1/cluster`.

use serde::Serialize;
use types::LayerRange;
use utoipa::ToSchema;

use super::body::LayersBody;
use super::snapshot::StageTime;
use super::text::bounded_name;

/// This process as a client of a swarm.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SwarmSnapshot {
    /// All layers of the model.
    pub layers: usize,
    /// Peers that are known, also those that are not shown.
    pub peers: usize,
    /// Open sessions, each with a chain of its own.
    pub sessions: u64,
    /// Spans whose peer was replaced by others, and how long sessions looked for these.
    pub replaced: u64,
    pub replacing: StageTime,
    /// Spot checks, and those that found a difference.
    pub checks: u64,
    pub differences: u64,
    /// Checks in which every bit was the same.
    pub identical: u64,
    pub reach: PeerReach,
}

/// How a peer is connected, or how it can be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerReach {
    #[default]
    Unknown,
    Direct,
    Relayed,
}

/// What this process did with a peer, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerRecord {
    /// Sessions that it did not open, or that ended by its fault.
    pub failures: u64,
    /// Spot checks of its results, and those that found a difference.
    pub checks: u64,
    pub differences: u64,
}

/// A peer that is a stage of a chain. Counts are since the start, of all chains with it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StagePeer {
    /// In full.
    pub id: String,
    pub reach: PeerReach,
    /// Between this machine and the peer.
    pub round_trip_s: Option<f64>,
    /// Rows that waited there for those of others.
    pub queue: Option<StageTime>,
    pub runs: u64,
    /// Activations from this machine to the peer, and back.
    pub sent_bytes: u64,
    pub returned_bytes: u64,
    pub record: PeerRecord,
}

/// A peer that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePeer {
    /// In full.
    pub id: String,
    /// `None` if it serves no layers of the model.
    pub block: Option<PeerBlock>,
    pub reach: PeerReach,
    /// What it did lately that it should not, fading with time: 0 for a peer that did nothing.
    pub score: f64,
    /// It misbehaved, so no chain has it.
    pub is_avoided: bool,
    pub record: PeerRecord,
}

/// As the peer announces it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerBlock {
    pub layers: LayerRange,
    pub service: PeerService,
    /// Tokens for which its K/V cache has room.
    pub tokens_free: u64,
    /// The time of one layer in a step of one token.
    pub layer_s: f64,
    /// Tokens times layers per second, with many sessions.
    pub layer_tokens_per_s: f64,
    /// How long a step waits.
    pub queue_s: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerService {
    Loading,
    Serving,
    /// It goes on with the sessions that it has, and takes no others.
    Leaving,
}

/// The swarm, as this server uses it. Counts are since the start
#[derive(Serialize, ToSchema)]
#[schema(as = Swarm)]
pub struct SwarmBody {
    /// Peers that are known; `nodes` has 256 of them at most
    peers: usize,
    /// Open sessions, each with a chain of its own
    sessions: u64,
    /// Times that a part of a chain was taken over by other peers while a session went on
    replaced: u64,
    /// How long that takes, as a running mean
    replace_s: Option<f64>,
    /// Results that other peers recomputed (`--verify`)
    checks: u64,
    /// Checks that found a difference
    differences: u64,
    /// Checks in which every bit was the same, as on like CPUs
    identical: u64,
    /// How others reach this server: `unknown`, `direct` or `relayed`
    #[schema(value_type = String)]
    reach: &'static str,
}

/// A peer of a swarm that is a stage. Counts are since the start, of all chains with it
#[derive(Serialize, ToSchema)]
#[schema(as = StagePeer)]
pub struct StagePeerBody {
    /// Its whole id; `name` is the end of it
    id: String,
    /// How it is connected: `unknown` while it is not, `direct` or `relayed`
    #[schema(value_type = String)]
    reach: &'static str,
    /// Between the serving machine and the peer
    round_trip_s: Option<f64>,
    /// How long rows wait there for those of others, as a running mean
    queue_s: Option<f64>,
    /// Parts of steps that it ran; a reply that came after the last peer's is not counted
    runs: u64,
    /// Activations from the serving machine to the peer
    sent_bytes: u64,
    /// Activations from the peer to the serving machine, also copies of what it passed on
    returned_bytes: u64,
    /// Sessions that it did not open, or that ended by its fault
    failures: u64,
    /// Results of it that others recomputed
    checks: u64,
    /// Checks that found a difference
    differences: u64,
}

/// A peer of a swarm
#[derive(Serialize, ToSchema)]
#[schema(as = NodePeer)]
pub struct NodePeerBody {
    /// Its whole id; `name` is the end of it
    id: String,
    /// Null if it serves no layers of this model
    block: Option<PeerBlockBody>,
    /// `unknown`, `direct` or `relayed`: how it is connected, or else how it says that it can be reached
    #[schema(value_type = String)]
    reach: &'static str,
    /// Grows with everything that it does wrong, and halves every ten minutes
    score: f64,
    /// It returned malformed messages or wrong results, so no chain has it until its score has fallen
    avoided: bool,
    /// Sessions that it did not open, or that ended by its fault
    failures: u64,
    /// Results of it that others recomputed
    checks: u64,
    /// Checks that found a difference
    differences: u64,
}

/// Layers that a peer serves. It measured the times itself
#[derive(Serialize, ToSchema)]
#[schema(as = PeerBlock)]
pub struct PeerBlockBody {
    layers: LayersBody,
    /// `loading`, `serving`, or `leaving`: it goes on with its sessions and takes no others
    #[schema(value_type = String)]
    state: &'static str,
    /// Tokens for which its KV cache has room
    tokens_free: u64,
    /// The time of one layer for one token
    layer_s: f64,
    /// Tokens times layers per second, with many sessions
    layer_tokens_per_s: f64,
    /// How long rows wait there for those of others
    queue_s: f64,
}

impl PeerReach {
    fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Direct => "direct",
            Self::Relayed => "relayed",
        }
    }
}

impl PeerService {
    fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Serving => "serving",
            Self::Leaving => "leaving",
        }
    }
}

impl From<&SwarmSnapshot> for SwarmBody {
    fn from(swarm: &SwarmSnapshot) -> Self {
        let SwarmSnapshot { peers, sessions, replaced, replacing, checks, differences, identical, reach, .. } = *swarm;
        let replace_s = (replaced > 0).then_some(replacing.mean_s);
        Self { peers, sessions, replaced, replace_s, checks, differences, identical, reach: reach.name() }
    }
}

impl From<&StagePeer> for StagePeerBody {
    fn from(peer: &StagePeer) -> Self {
        let PeerRecord { failures, checks, differences } = peer.record;
        Self {
            id: bounded_name(&peer.id),
            reach: peer.reach.name(),
            round_trip_s: peer.round_trip_s,
            queue_s: peer.queue.map(|queue| queue.mean_s),
            runs: peer.runs,
            sent_bytes: peer.sent_bytes,
            returned_bytes: peer.returned_bytes,
            failures,
            checks,
            differences,
        }
    }
}

impl From<&NodePeer> for NodePeerBody {
    fn from(peer: &NodePeer) -> Self {
        let PeerRecord { failures, checks, differences } = peer.record;
        Self {
            id: bounded_name(&peer.id),
            block: peer.block.map(PeerBlockBody::from),
            reach: peer.reach.name(),
            score: peer.score,
            avoided: peer.is_avoided,
            failures,
            checks,
            differences,
        }
    }
}

impl From<PeerBlock> for PeerBlockBody {
    fn from(block: PeerBlock) -> Self {
        let PeerBlock { layers, service, tokens_free, layer_s, layer_tokens_per_s, queue_s } = block;
        Self { layers: layers.into(), state: service.name(), tokens_free, layer_s, layer_tokens_per_s, queue_s }
    }
}
