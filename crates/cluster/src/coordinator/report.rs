//! What a coordinator tells about its cluster.

use std::net::SocketAddr;

use types::LayerRange;

use crate::wire::control::WireFacts;
use plan::Link;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClusterReport {
    pub nodes: Vec<NodeReport>,
    /// The layers of the coordinator and of each stage: the node's address, and `None` for the coordinator.
    pub stages: Vec<(Option<SocketAddr>, LayerRange)>,
    /// How many chains were formed.
    pub chains: u64,
    /// Why there is no chain.
    pub waiting: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct NodeReport {
    pub address: SocketAddr,
    pub name: Option<String>,
    pub state: NodeState,
    pub facts: Option<WireFacts>,
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
