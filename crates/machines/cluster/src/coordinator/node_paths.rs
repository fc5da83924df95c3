//! `NodePaths`: the ways between nodes, as the nodes measure them when they are asked to.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use plan::Link;

use super::node_link::NodeId;

/// How long a chain waits for a measurement.
const PATIENCE: Duration = Duration::from_secs(3);
/// The way to a node that cannot be reached. No plan uses it if there is another.
const UNREACHABLE: Link = Link { round_trip_seconds: 100.0, bytes_per_s: 1.0 };

#[derive(Debug, Default)]
pub(super) struct NodePaths {
    /// Measurements that were asked for, by the node that measures and its request.
    asked: HashMap<(NodeId, u64), (NodeId, Instant)>,
    /// `None`: one does not reach the other.
    round_trips: HashMap<(NodeId, NodeId), Option<Duration>>,
}

impl NodePaths {
    pub fn ask(&mut self, node: NodeId, request: u64, other: NodeId) {
        self.asked.insert((node, request), (other, Instant::now()));
    }

    /// Takes the reply of a node. Returns whether it was asked for.
    pub fn answer(&mut self, node: NodeId, request: u64, round_trip: Option<Duration>) -> bool {
        let Some((other, _)) = self.asked.remove(&(node, request)) else { return false };
        self.round_trips.insert(pair(node, other), round_trip);
        true
    }

    /// One could not connect to the other.
    pub fn broken(&mut self, node: NodeId, other: NodeId) {
        self.round_trips.insert(pair(node, other), None);
    }

    pub fn forget(&mut self, node: NodeId) {
        self.asked.retain(|(asked, _), (other, _)| *asked != node && *other != node);
        self.round_trips.retain(|(a, b), _| *a != node && *b != node);
    }

    /// Whether no measurement is worth waiting for.
    pub fn is_settled(&self) -> bool {
        self.asked.values().all(|(_, since)| since.elapsed() > PATIENCE)
    }

    /// The way between two nodes, if it was measured. `links` are their ways to the coordinator: nothing between nodes is
    /// sent to measure bandwidth, so the slower of the two counts.
    pub fn link(&self, (a, b): (NodeId, NodeId), links: (Link, Link)) -> Option<Link> {
        let bytes_per_s = links.0.bytes_per_s.min(links.1.bytes_per_s);
        let of = |time: Duration| Link { round_trip_seconds: time.as_secs_f64(), bytes_per_s };
        Some(self.round_trips.get(&pair(a, b))?.map_or(UNREACHABLE, of))
    }
}

fn pair(a: NodeId, b: NodeId) -> (NodeId, NodeId) {
    (a.min(b), a.max(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_measured_once_and_forgotten_with_its_node() {
        let [a, b, c] = [1, 2, 3].map(NodeId);
        let link = |bytes_per_s| Link { round_trip_seconds: 1.0, bytes_per_s };
        let links = (link(5.0), link(3.0));
        let mut paths = NodePaths::default();
        paths.ask(b, 7, a);
        assert!(!paths.is_settled() && paths.link((a, b), links).is_none());
        assert!(!paths.answer(a, 7, None), "another node was asked");
        assert!(paths.answer(b, 7, Some(Duration::from_millis(2))) && paths.is_settled());
        assert_eq!(paths.link((a, b), links), Some(Link { round_trip_seconds: 2e-3, bytes_per_s: 3.0 }));
        paths.broken(c, b);
        assert_eq!(paths.link((b, c), links), Some(UNREACHABLE));
        paths.ask(c, 1, a);
        paths.forget(b);
        assert_eq!((paths.link((b, c), links), paths.is_settled()), (None, false));
        paths.forget(a);
        assert!(paths.is_settled(), "nobody waits for a node that is gone");
    }
}
