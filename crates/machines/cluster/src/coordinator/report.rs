//! What a coordinator tells about its cluster.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kernels::cpu::Level;
use types::LayerRange;

use super::plan_report::PlanReport;
use crate::wire::control::WireFacts;
use plan::Link;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterReport {
    pub nodes: Vec<NodeReport>,
    /// The layers of the coordinator and of each stage: the node's address, and `None` for the coordinator.
    pub stages: Vec<(Option<SocketAddr>, LayerRange)>,
    /// The level with which all machines compute, if they have to compute the same bits.
    pub exact: Option<Level>,
    /// How many chains were formed.
    pub chains: u64,
    /// Why there is no chain.
    pub waiting: Option<String>,
    /// Why the chain that was formed last does not run any more.
    pub rebuilding: Option<String>,
    /// The plan of the chain that was formed last.
    pub plan: Option<PlanReport>,
    /// Weights that nodes lack for the chain that is being formed, or was formed last.
    pub weights: Vec<MissingWeights>,
}

/// Weights that a node has to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingWeights {
    pub address: SocketAddr,
    pub bytes: u64,
    /// How many of them have come.
    pub received: u64,
}

impl ClusterReport {
    /// Bytes of weights that have come to nodes, and all that have to.
    pub fn weight_bytes(&self) -> (u64, u64) {
        let sum = |of: fn(&MissingWeights) -> u64| self.weights.iter().map(of).fold(0, u64::saturating_add);
        (sum(|weights| weights.received.min(weights.bytes)), sum(|weights| weights.bytes))
    }

    /// A node says that it has received so many bytes of what it lacked.
    pub(super) fn received(&mut self, address: SocketAddr, bytes: u64) {
        if let Some(weights) = self.weights.iter_mut().find(|weights| weights.address == address) {
            weights.received = weights.received.max(bytes);
        }
    }
}

/// The report of a coordinator, at any time. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct ClusterWatch(Arc<Mutex<ClusterReport>>);

impl ClusterWatch {
    pub fn get(&self) -> ClusterReport {
        self.lock().clone()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ClusterReport> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    pub address: SocketAddr,
    pub name: Option<String>,
    pub state: NodeState,
    pub facts: Option<WireFacts>,
    /// Why no plan can use it, or the current one does not, although it is ready.
    pub not_used: Option<String>,
    /// The way from the coordinator.
    pub link: Option<Link>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    Connecting,
    Ready,
    /// It cannot be used, or could not when it was last tried.
    Failed {
        why: String,
    },
}
