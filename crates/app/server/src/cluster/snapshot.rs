//! `ChainSnapshot`: a chain of machines at one moment, as a [`super::ClusterMonitor`] tells it. The machines are those of a LAN, or
//! peers of a swarm, of which less is known, and some things more: `peer`, `swarm`.
//!
//! Names and reasons may come from other machines as they are; they are bounded where they are shown.

use types::LayerRange;

use super::swarm::{NodePeer, StagePeer, SwarmSnapshot};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChainSnapshot {
    /// The stages of the current chain in order, the coordinator first, also if it has no layers. Empty if there is no chain.
    pub stages: Vec<StageSnapshot>,
    /// Every machine that was found, besides the coordinator. Of a swarm, as many as are shown.
    pub nodes: Vec<NodeSnapshot>,
    /// How many chains were formed since the start.
    pub chains: u64,
    /// Why there is no chain.
    pub waiting: Option<String>,
    /// Why the chain in `stages` does not run any more, and another one is being formed.
    pub rebuilding: Option<String>,
    /// Of the plan of the current chain.
    pub prediction: Option<ChainPrediction>,
    pub bits: Option<ChainBits>,
    /// Steps that the current chain has run. Of a swarm, where every session has a chain: all steps since the start.
    pub steps: u64,
    /// A step from its submission to its result.
    pub step: StageTime,
    /// The part of steps in which no stage computed: the hops, and waiting for a stage that ran another step.
    pub between: StageTime,
    /// `None` for the machines of a LAN.
    pub swarm: Option<SwarmSnapshot>,
}

/// Seconds of the steps of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageTime {
    /// A running mean over the latest steps.
    pub mean_s: f64,
    /// The sum over all steps.
    pub total_s: f64,
}

/// A machine's part of a chain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageSnapshot {
    pub name: String,
    pub is_coordinator: bool,
    /// `None` for the coordinator, and for a peer without a connection.
    pub address: Option<String>,
    /// `None` if the coordinator has no layers.
    pub layers: Option<LayerRange>,
    /// Its CPU instructions. A peer of a swarm tells nothing of its machine.
    pub level: Option<String>,
    pub threads: Option<usize>,
    /// Processes that share the stage.
    pub ranks: Option<usize>,
    pub memory: Option<StageMemory>,
    pub compute: Option<StageTime>,
    /// The way to the next stage, from the last one back to the coordinator. `None` if the coordinator has all layers.
    pub hop: Option<HopSnapshot>,
    pub peer: Option<StagePeer>,
}

/// Memory in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageMemory {
    pub weights: u64,
    pub kv: u64,
    pub working: u64,
    /// What the machine has for all of that.
    pub available: u64,
}

impl StageMemory {
    pub fn used(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.working)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HopSnapshot {
    /// The hop's part of the time between stages.
    pub time: Option<StageTime>,
    pub round_trip_s: Option<f64>,
    /// Activations that were sent.
    pub bytes: u64,
    pub way: HopWay,
}

/// How activations get to the next stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HopWay {
    #[default]
    Direct,
    /// The coordinator carries them.
    Coordinator,
}

/// A machine that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSnapshot {
    /// `None` until it has told its name.
    pub name: Option<String>,
    /// `None` for a peer without a connection.
    pub address: Option<String>,
    pub usage: NodeUse,
    /// Known once it is connected.
    pub level: Option<String>,
    pub threads: Option<usize>,
    pub memory_bytes: Option<u64>,
    pub round_trip_s: Option<f64>,
    pub peer: Option<NodePeer>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeUse {
    /// It has layers of the current chain.
    Used,
    /// It could have layers, but the plan gives it none.
    Spare {
        why: String,
    },
    Connecting,
    /// It cannot be used, or could not when it was last tried.
    Failed {
        why: String,
    },
    /// It had layers, and is gone.
    Lost {
        why: String,
    },
}

/// Tokens per second of a chain, as planned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChainPrediction {
    /// Of one sequence that runs alone.
    pub tokens_per_s: f64,
    /// Of several sequences together.
    pub batch: Option<BatchPrediction>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchPrediction {
    pub tokens_per_s: f64,
    pub sequences: usize,
}

/// Whether the machines of a chain compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainBits {
    /// All machines do: neither the split nor the loss of one changes a bit.
    Same,
    /// Those of the chain do; one that is not used does not.
    SameWhileUsed,
    /// Those of the chain do not.
    Unlike,
}
