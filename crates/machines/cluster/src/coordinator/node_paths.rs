//! `NodePaths`: the ways between nodes, as the nodes measure them when they are asked to.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use plan::Link;

use super::node_link::NodeId;
use super::standing::{Failure, Standing};

/// How long a chain waits for a measurement.
const PATIENCE: Duration = Duration::from_secs(3);
/// The way to a node that cannot be reached. No plan uses it if there is another.
const UNREACHABLE: Link = Link { round_trip_seconds: 100.0, bytes_per_s: 1.0 };

#[derive(Debug, Default)]
pub(super) struct NodePaths {
    /// Measurements that were asked for, by the node that measures and its request.
    asked: HashMap<(NodeId, u64), (NodeId, Instant)>,
    ways: HashMap<(NodeId, NodeId), Way>,
}

#[derive(Debug)]
enum Way {
    RoundTrip(Duration),
    /// One does not reach the other. It is asked again at this time.
    None {
        standing: Standing,
        retry_at: Instant,
    },
}

impl NodePaths {
    pub fn ask(&mut self, node: NodeId, request: u64, other: NodeId) {
        self.asked.insert((node, request), (other, Instant::now()));
    }

    /// Takes the reply of a node. Returns whether it was asked for.
    pub fn answer(&mut self, node: NodeId, request: u64, round_trip: Option<Duration>) -> bool {
        let Some((other, _)) = self.asked.remove(&(node, request)) else { return false };
        match round_trip {
            Some(time) => drop(self.ways.insert(pair(node, other), Way::RoundTrip(time))),
            None => self.broken(node, other),
        }
        true
    }

    /// One could not connect to the other.
    pub fn broken(&mut self, node: NodeId, other: NodeId) {
        let now = Instant::now();
        let mut standing = match self.ways.get(&pair(node, other)) {
            Some(Way::None { standing, .. }) => *standing,
            _ => Standing::default(),
        };
        let retry_at = standing.failed(Failure::NoPath, now);
        self.ways.insert(pair(node, other), Way::None { standing, retry_at });
    }

    /// The nodes that do not reach each other and are to be asked again.
    pub fn due(&self, now: Instant) -> Vec<(NodeId, NodeId)> {
        let is_asked =
            |a: NodeId, b: NodeId| self.asked.iter().any(|((node, _), (other, _))| pair(*node, *other) == (a, b));
        let is_due = |way: &Way| matches!(way, Way::None { retry_at, .. } if *retry_at <= now);
        let due = self.ways.iter().filter(|(pair, way)| is_due(way) && !is_asked(pair.0, pair.1));
        due.map(|(pair, _)| *pair).collect()
    }

    pub fn forget(&mut self, node: NodeId) {
        self.asked.retain(|(asked, _), (other, _)| *asked != node && *other != node);
        self.ways.retain(|(a, b), _| *a != node && *b != node);
    }

    /// Whether no measurement is worth waiting for. One that is repeated is not.
    pub fn is_settled(&self) -> bool {
        let is_first = |node: NodeId, other: NodeId| !self.ways.contains_key(&pair(node, other));
        let mut first = self.asked.iter().filter(|((node, _), (other, _))| is_first(*node, *other));
        first.all(|(_, (_, since))| since.elapsed() > PATIENCE)
    }

    /// The way between two nodes, if it was measured. `links` are their ways to the coordinator: nothing between nodes is
    /// sent to measure bandwidth, so the slower of the two counts.
    pub fn link(&self, (a, b): (NodeId, NodeId), links: (Link, Link)) -> Option<Link> {
        let bytes_per_s = links.0.bytes_per_s.min(links.1.bytes_per_s);
        let of = |time: Duration| Link { round_trip_seconds: time.as_secs_f64(), bytes_per_s };
        Some(match self.ways.get(&pair(a, b))? {
            Way::RoundTrip(time) => of(*time),
            Way::None { .. } => UNREACHABLE,
        })
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
        // The verdict is looked at again, and forming a chain does not wait for that.
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(600));
        assert_eq!((paths.due(now), paths.due(later)), (vec![], vec![(b, c)]));
        paths.ask(b, 8, c);
        assert!(paths.due(later).is_empty() && paths.is_settled());
        assert!(paths.answer(b, 8, Some(Duration::from_millis(2))));
        assert!(paths.due(later).is_empty() && paths.link((b, c), links) != Some(UNREACHABLE));
        paths.broken(c, b);
        paths.ask(c, 1, a);
        paths.forget(b);
        assert_eq!((paths.link((b, c), links), paths.is_settled()), (None, false));
        paths.forget(a);
        assert!(paths.is_settled(), "nobody waits for a node that is gone");
    }
}
