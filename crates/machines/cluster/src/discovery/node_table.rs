//! `NodeTable`: the nodes that are announced now, within limits, and the events that their changes cause. No I/O.

use std::net::SocketAddr;

use net::KeyFingerprint;

use super::announcement::{Announcement, NodeName};
use super::browser::DiscoveryEvent;
use net::PeerAddress;
use plan::NODES_MAX;

/// The most nodes with this machine's key that are known at a time.
pub const NODES_FOUND_MAX: usize = NODES_MAX;
/// The most other nodes. They are known only so that people learn why they are not used.
pub const STRANGERS_FOUND_MAX: usize = 32;
/// The most addresses of a node.
pub const ADDRESSES_MAX: usize = 16;
/// Names in DNS are not longer.
const ID_BYTES_MAX: usize = 255;

/// Tells nodes apart: the name of a service in DNS, or a given address.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(String);

impl NodeId {
    /// The service with this name, with its type and domain. `None` if no service can have it.
    pub fn of_service(fullname: &str) -> Option<Self> {
        (fullname.len() <= ID_BYTES_MAX).then(|| Self(fullname.to_owned()))
    }

    pub(super) fn of_peer(address: &PeerAddress) -> Self {
        Self(address.to_string())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A node that was announced, or that a person named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveredNode {
    pub id: NodeId,
    /// `None` for a given address: what is there is known when it is connected.
    pub name: Option<NodeName>,
    /// Where it may be reached, best first. At least one.
    pub addresses: Vec<PeerAddress>,
    /// Set if a connection would be in vain.
    pub unusable: Option<Unusable>,
}

/// Why a node that is seen is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    #[error("it has another cluster key")]
    OtherKey,
    #[error("it speaks protocol version {theirs}, this build speaks {}", net::VERSION)]
    OtherVersion { theirs: u16 },
}

impl Unusable {
    fn new(announcement: &Announcement, own: KeyFingerprint) -> Option<Self> {
        match announcement {
            // Another version may make its fingerprint in another way.
            Announcement { version, .. } if *version != net::VERSION => Some(Self::OtherVersion { theirs: *version }),
            Announcement { fingerprint, .. } if *fingerprint != own => Some(Self::OtherKey),
            _ => None,
        }
    }
}

pub(super) struct NodeTable {
    fingerprint: KeyFingerprint,
    nodes: Vec<DiscoveredNode>,
}

impl NodeTable {
    pub fn new(fingerprint: KeyFingerprint) -> Self {
        Self { fingerprint, nodes: Vec::new() }
    }

    /// Enters a node or its new announcement. Appends what changed to `events`. A node beyond the limits is ignored.
    pub fn found(
        &mut self,
        id: NodeId,
        announcement: &Announcement,
        addresses: &[SocketAddr],
        events: &mut Vec<DiscoveryEvent>,
    ) {
        let addresses = ordered(addresses);
        let unusable = Unusable::new(announcement, self.fingerprint);
        if addresses.is_empty() {
            return self.lost(&id, events);
        }
        let node = DiscoveredNode { id, name: Some(announcement.name.clone()), addresses, unusable };
        if self.nodes.contains(&node) {
            return;
        }
        // A node that was started again has a new id, but listens where it did.
        let same = |other: &DiscoveredNode| other.id != node.id && other.addresses[0] == node.addresses[0];
        if let Some(before) = self.nodes.iter().find(|other| same(other)).map(|other| other.id.clone()) {
            self.lost(&before, events);
        }
        self.nodes.retain(|other| other.id != node.id);
        let (usable, limit) = match node.unusable {
            None => (true, NODES_FOUND_MAX),
            Some(_) => (false, STRANGERS_FOUND_MAX),
        };
        if self.nodes.iter().filter(|other| other.unusable.is_none() == usable).count() < limit {
            self.nodes.push(node.clone());
            events.push(DiscoveryEvent::Found(node));
        }
    }

    pub fn lost(&mut self, id: &NodeId, events: &mut Vec<DiscoveryEvent>) {
        if let Some(index) = self.nodes.iter().position(|node| node.id == *id) {
            let node = self.nodes.remove(index);
            events.push(DiscoveryEvent::Lost(node.id));
        }
    }
}

/// IPv4 first, because an address of one link is always unambiguous there; then IPv6, those of one link last.
pub(super) fn ordered(addresses: &[SocketAddr]) -> Vec<PeerAddress> {
    let rank = |address: &SocketAddr| match address {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(v6) if !v6.ip().is_unicast_link_local() => 1,
        SocketAddr::V6(_) => 2,
    };
    let mut usable: Vec<&SocketAddr> =
        addresses.iter().filter(|address| !address.ip().is_unspecified() && address.port() != 0).collect();
    usable.sort_by_key(|address| (rank(address), **address));
    usable.dedup();
    usable.into_iter().take(ADDRESSES_MAX).map(|address| PeerAddress::from(*address)).collect()
}

#[cfg(test)]
mod tests {
    use net::ClusterKey;

    use super::*;

    fn key(byte: u8) -> KeyFingerprint {
        ClusterKey::from_bytes([byte; 32]).fingerprint()
    }

    fn announcement(fingerprint: KeyFingerprint) -> Announcement {
        Announcement::new(fingerprint, "kitchen".parse().unwrap())
    }

    fn id(text: &str) -> NodeId {
        NodeId::of_service(text).unwrap()
    }

    fn at(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, host], port))
    }

    /// The events of one call, in short.
    fn events(act: impl FnOnce(&mut Vec<DiscoveryEvent>)) -> Vec<String> {
        let mut events = Vec::new();
        act(&mut events);
        let short = |event| match event {
            DiscoveryEvent::Found(node) => {
                format!("+{} {:?} {:?}", node.id.as_str(), node.addresses[0].as_str(), node.unusable)
            }
            DiscoveryEvent::Lost(id) => format!("-{}", id.as_str()),
        };
        events.into_iter().map(short).collect()
    }

    #[test]
    fn a_node_comes_changes_and_goes() {
        let mut table = NodeTable::new(key(1));
        let ours = announcement(key(1));
        assert_eq!(events(|e| table.found(id("a"), &ours, &[at(1, 7)], e)), ["+a \"10.0.0.1:7\" None"]);
        assert!(events(|e| table.found(id("a"), &ours, &[at(1, 7)], e)).is_empty());
        assert_eq!(events(|e| table.found(id("a"), &ours, &[at(2, 7)], e)), ["+a \"10.0.0.2:7\" None"]);
        assert_eq!(events(|e| table.lost(&id("a"), e)), ["-a"]);
        assert!(events(|e| table.lost(&id("a"), e)).is_empty());
    }

    #[test]
    fn a_node_that_was_started_again_replaces_itself() {
        let mut table = NodeTable::new(key(1));
        let ours = announcement(key(1));
        events(|e| table.found(id("a"), &ours, &[at(1, 7)], e));
        assert_eq!(events(|e| table.found(id("b"), &ours, &[at(1, 7)], e)), ["-a", "+b \"10.0.0.1:7\" None"]);
    }

    #[test]
    fn another_key_or_version_is_said() {
        let mut table = NodeTable::new(key(1));
        let other = announcement(key(2));
        assert_eq!(events(|e| table.found(id("a"), &other, &[at(1, 7)], e)), ["+a \"10.0.0.1:7\" Some(OtherKey)"]);
        let newer = Announcement { version: net::VERSION + 1, ..other };
        let theirs = net::VERSION + 1;
        let expected = format!("+b \"10.0.0.2:7\" Some(OtherVersion {{ theirs: {theirs} }})");
        assert_eq!(events(|e| table.found(id("b"), &newer, &[at(2, 7)], e)), [expected]);
    }

    #[test]
    fn strangers_take_no_place_of_our_nodes() {
        let mut table = NodeTable::new(key(1));
        let mut count = |key, first: u8, nodes: usize| {
            let found = |index: usize| {
                let (name, address) = (format!("{first}-{index}"), SocketAddr::from(([10, 0, first, index as u8], 7)));
                events(|e| table.found(id(&name), &announcement(key), &[address], e)).len()
            };
            (0..nodes).map(found).sum::<usize>()
        };
        assert_eq!(count(key(2), 1, 100), STRANGERS_FOUND_MAX);
        assert_eq!(count(key(1), 2, 100), NODES_FOUND_MAX);
        let first = id("1-0");
        assert_eq!(events(|e| table.lost(&first, e)).len(), 1);
    }

    #[test]
    fn addresses_are_few_and_ordered() {
        let v6: SocketAddr = "[2001:db8::1]:7".parse().unwrap();
        let link: SocketAddr = "[fe80::1%3]:7".parse().unwrap();
        let mut given = vec![link, v6, at(9, 7), at(9, 7), "0.0.0.0:7".parse().unwrap()];
        let texts = |given: &[SocketAddr]| ordered(given).iter().map(|address| address.to_string()).collect::<Vec<_>>();
        assert_eq!(texts(&given), ["10.0.0.9:7", "[2001:db8::1]:7", "[fe80::1%3]:7"]);
        given.extend((0..100).map(|host| at(host, 7)));
        assert_eq!(texts(&given).len(), ADDRESSES_MAX);
        assert_eq!(NodeId::of_service(&"x".repeat(256)), None);
    }
}
