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
    /// How many machines of other clusters were found.
    pub other_clusters: usize,
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

    /// The layers of the last chain whose nodes are not ready, and the nodes with the reasons; if all nodes are, all layers of
    /// nodes. As a range, it may have layers of other nodes between.
    pub(super) fn missing(&self) -> Option<(LayerRange, String)> {
        let stages = self.stages.iter().filter_map(|&(address, layers)| Some((address?, layers)));
        let (mut away, mut why) = (Vec::new(), Vec::new());
        for (address, layers) in stages.clone() {
            let node = self.nodes.iter().find(|node| node.address == address);
            let name = node.and_then(|node| node.name.clone()).unwrap_or_else(|| address.to_string());
            match node.map(|node| &node.state) {
                Some(NodeState::Ready) => continue,
                Some(NodeState::Failed { why: reason }) => why.push(format!("{name} with layers {layers}: {reason}")),
                Some(NodeState::Connecting) | None => why.push(format!("{name} with layers {layers} is not there")),
            }
            away.push(layers);
        }
        if away.is_empty() {
            away = stages.map(|(_, layers)| layers).collect();
            why.extend(self.waiting.clone());
        }
        let (first, last) = (away.first()?, away.last()?);
        let layers = LayerRange::new(u32::try_from(first.start()).ok()?, u32::try_from(last.end()).ok()?)?;
        Some((layers, if why.is_empty() { "another chain is formed".to_owned() } else { why.join("; ") }))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_of_nodes_that_are_away_are_missing() {
        let addresses: [SocketAddr; 3] = [1, 2, 3].map(|host| SocketAddr::from(([10, 0, 0, host], 7420)));
        let layers = |start, end| LayerRange::new(start, end).unwrap();
        let node = |index: usize, state| NodeReport {
            address: addresses[index],
            name: Some(format!("n{index}")),
            state,
            facts: None,
            not_used: None,
            link: None,
        };
        let why = "nothing came from it".to_owned();
        let mut report = ClusterReport {
            nodes: vec![node(0, NodeState::Ready), node(1, NodeState::Failed { why })],
            stages: vec![
                (None, layers(0, 2)),
                (Some(addresses[0]), layers(2, 4)),
                (Some(addresses[1]), layers(4, 7)),
                (Some(addresses[2]), layers(7, 8)),
            ],
            ..ClusterReport::default()
        };
        let why = "n1 with layers 4..7: nothing came from it; 10.0.0.3:7420 with layers 7..8 is not there";
        assert_eq!(report.missing(), Some((layers(4, 8), why.to_owned())));
        report.nodes = [0, 1, 2].map(|index| node(index, NodeState::Ready)).into();
        report.waiting = Some("no room".to_owned());
        assert_eq!(report.missing(), Some((layers(2, 8), "no room".to_owned())));
        report.stages.truncate(1);
        assert_eq!(report.missing(), None);
    }
}
