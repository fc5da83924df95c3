//! Messages between a coordinator and a node, in JSON: what the node is, which stage it loads, and how it is linked.
//!
//! The coordinator sends requests; the node replies to each with the request's id, and reports progress and faults on its
//! own.

use std::net::SocketAddr;

use model::Manifest;
use ranks::protocol::shard::{CpuLevel, WireDecodeMath, WireKvType, WireLimits, WirePrefillMath};
use serde::{Deserialize, Serialize};
use types::LayerRange;

use chains::WireError;

/// Bytes of the largest message: a manifest names every tensor of a model.
pub const CONTROL_BYTES_MAX: usize = 64 << 20;
/// Bytes of one probe of a link.
pub const PROBE_BYTES_MAX: usize = 4 << 20;

/// The id of a reply that nobody asked for.
pub const UNASKED: u64 = 0;

/// The kind of a message on a control connection, in the byte before its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ControlKind {
    /// A [`ControlRequest`] or a [`ControlReply`].
    Json = 1,
    /// Bytes that measure a link. The node drops them.
    Probe = 2,
}

impl ControlKind {
    pub fn parse(byte: u8) -> Result<Self, WireError> {
        match byte {
            1 => Ok(Self::Json),
            2 => Ok(Self::Probe),
            found => Err(WireError::Unknown { what: "the kind of a message", found: found.into() }),
        }
    }

    pub fn bytes_max(self) -> usize {
        match self {
            Self::Json => CONTROL_BYTES_MAX,
            Self::Probe => PROBE_BYTES_MAX,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ControlRequest {
    /// What the node is and has: [`ControlReply::Facts`]. From then on it describes itself again, [`UNASKED`], whenever its memory
    /// has changed.
    Describe { id: u64 },
    /// Answered at once, with [`ControlReply::Pong`]. After probes it says that they have arrived.
    Ping { id: u64 },
    /// Loads a stage, instead of the one that this connection has loaded: [`ControlReply::Missing`], then
    /// [`ControlReply::Progress`], then [`ControlReply::Loaded`].
    Load { id: u64, stage: Box<StageSpec> },
    /// Receives the tensors of a stage that is to be loaded later, beside one that runs: [`ControlReply::Missing`], then
    /// [`ControlReply::Progress`], then [`ControlReply::Fetched`]. It ends when something else is to be loaded.
    Fetch { id: u64, stage: Box<StageSpec> },
    /// Measures the way to another node: [`ControlReply::RoundTrip`].
    Reach { id: u64, address: SocketAddr },
    /// Makes the loaded stage a part of a chain. It accepts the connection of the stage before it, and connects to `next`,
    /// or waits for the coordinator if it is the last one. [`ControlReply::Linked`].
    Link { id: u64, chain: u64, index: u16, next: Option<SocketAddr> },
    /// Frees the stage: [`ControlReply::Unloaded`].
    Unload { id: u64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ControlReply {
    Facts {
        id: u64,
        facts: WireFacts,
    },
    Pong {
        id: u64,
    },
    /// So many bytes of tensors are missing. The node will ask for them on connections for weights, which name `transfer`.
    Missing {
        id: u64,
        transfer: u64,
        bytes: u64,
    },
    /// Bytes received and layers loaded so far.
    Progress {
        id: u64,
        bytes: u64,
        layers: u32,
    },
    Loaded {
        id: u64,
        weight_bytes: u64,
        kv_bytes: u64,
    },
    Fetched {
        id: u64,
    },
    RoundTrip {
        id: u64,
        us: u64,
    },
    Linked {
        id: u64,
    },
    Unloaded {
        id: u64,
    },
    /// The request with this id failed.
    Failed {
        id: u64,
        why: String,
    },
    /// The chain broke at this node.
    Fault {
        chain: u64,
        fault: WireFault,
    },
}

impl ControlReply {
    /// The request that this answers.
    pub fn id(&self) -> Option<u64> {
        match *self {
            Self::Facts { id, .. }
            | Self::Pong { id }
            | Self::Missing { id, .. }
            | Self::Progress { id, .. }
            | Self::Loaded { id, .. }
            | Self::Fetched { id }
            | Self::RoundTrip { id, .. }
            | Self::Linked { id }
            | Self::Unloaded { id }
            | Self::Failed { id, .. } => Some(id),
            Self::Fault { .. } => None,
        }
    }
}

/// What broke.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireFault {
    /// The stage itself failed.
    Stage { why: String },
    /// The stage lost a part of its processes. Asked to load the same stage again, the node replaces them.
    Lost { why: String },
    /// The connection from the stage before.
    Previous { why: String },
    /// The connection to the next stage, or to the coordinator.
    Next { why: String },
}

impl WireFault {
    pub fn why(&self) -> &str {
        match self {
            Self::Stage { why } | Self::Lost { why } | Self::Previous { why } | Self::Next { why } => why,
        }
    }
}

/// What a node is and has, as it measured itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireFacts {
    /// For people. Never used as a path.
    pub name: String,
    /// The version of the program.
    pub version: String,
    /// The best CPU instructions.
    pub level: CpuLevel,
    pub threads: u32,
    /// Ranks over which it splits its layers.
    pub ranks: u16,
    pub memory_bytes: u64,
    /// Bytes of weights that it reads in a second.
    pub weight_bytes_per_s: f64,
    /// Multiplications with an addition, of a prompt, in a second.
    pub multiply_adds_per_s: f64,
    /// What every step costs beside its layers.
    pub step_seconds: f64,
}

/// A stage that a node is to load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageSpec {
    /// The name of the model, for people. Never used as a path.
    pub model: String,
    pub manifest: Manifest,
    pub layer_start: u32,
    pub layer_end: u32,
    /// The format to keep weights in: see [`model::LoadOptions::keep`].
    pub keep: Option<String>,
    /// One arithmetic on all machines: these CPU instructions, and one process. `None`: as is best for each machine.
    pub exact: Option<CpuLevel>,
    pub kv: WireKvType,
    pub decode: WireDecodeMath,
    pub prompt: WirePrefillMath,
    pub limits: WireLimits,
}

impl StageSpec {
    pub fn layers(&self) -> Option<LayerRange> {
        LayerRange::new(self.layer_start, self.layer_end)
    }
}

/// Writes a message as JSON.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("these messages have no keys that are not strings")
}

/// Reads a message from JSON.
pub fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, WireError> {
    serde_json::from_slice(bytes).map_err(|error| WireError::Json(error.to_string()))
}
