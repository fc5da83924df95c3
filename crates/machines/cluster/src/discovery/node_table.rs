//! `NodeTable`: the nodes that are announced now, within limits, and the events that their changes cause. No I/O.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::announcement::{Announcement, NodeName};
use super::browser::DiscoveryEvent;
use net::PeerAddress;
use plan::NODES_MAX;

/// The most nodes that are known at a time, of whatever cluster: which are of this one is known when they are connected. When
/// another is found, the one that was found longest ago gives way, of those with the address that has announced most.
pub const NODES_FOUND_MAX: usize = 2 * NODES_MAX;
/// The most nodes that speak another version. They are known only so that people learn why they are not used.
pub const OTHER_VERSIONS_FOUND_MAX: usize = 32;
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
    #[error("it {}", net::other_version(*theirs))]
    OtherVersion { theirs: u16 },
}

impl Unusable {
    fn new(announcement: &Announcement) -> Option<Self> {
        let theirs = announcement.version;
        (theirs != net::VERSION).then_some(Self::OtherVersion { theirs })
    }
}

/// In the order in which they were found.
#[derive(Default)]
pub(super) struct NodeTable {
    nodes: Vec<DiscoveredNode>,
}

impl NodeTable {
    /// Enters a node or its new announcement. Appends what changed to `events`.
    pub fn found(
        &mut self,
        id: NodeId,
        announcement: &Announcement,
        addresses: &[SocketAddr],
        events: &mut Vec<DiscoveryEvent>,
    ) {
        let addresses = ordered(addresses);
        let unusable = Unusable::new(announcement);
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
        self.make_room(node.unusable.is_none(), events);
        self.nodes.push(node.clone());
        events.push(DiscoveryEvent::Found(node));
    }

    /// Room for one more node that can be used, or cannot.
    fn make_room(&mut self, is_usable: bool, events: &mut Vec<DiscoveryEvent>) {
        let limit = if is_usable { NODES_FOUND_MAX } else { OTHER_VERSIONS_FOUND_MAX };
        let same = || self.nodes.iter().filter(|node| node.unusable.is_none() == is_usable);
        if same().count() < limit {
            return;
        }
        let mut counts = HashMap::<&str, usize>::new();
        same().for_each(|node| *counts.entry(host(node)).or_default() += 1);
        // The first of those with the highest count is the oldest.
        let crowded = same().rev().max_by_key(|node| counts[host(node)]).map(|node| node.id.clone());
        if let Some(id) = crowded {
            self.lost(&id, events);
        }
    }

    pub fn lost(&mut self, id: &NodeId, events: &mut Vec<DiscoveryEvent>) {
        if let Some(index) = self.nodes.iter().position(|node| node.id == *id) {
            let node = self.nodes.remove(index);
            events.push(DiscoveryEvent::Lost(node.id));
        }
    }
}

/// The host of a node's best address.
fn host(node: &DiscoveredNode) -> &str {
    let address = node.addresses[0].as_str();
    address.rsplit_once(':').map_or(address, |(host, _)| host)
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
    use super::*;

    fn announcement() -> Announcement {
        Announcement::new("kitchen".parse().unwrap())
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
        let mut table = NodeTable::default();
        let ours = announcement();
        assert_eq!(events(|e| table.found(id("a"), &ours, &[at(1, 7)], e)), ["+a \"10.0.0.1:7\" None"]);
        assert!(events(|e| table.found(id("a"), &ours, &[at(1, 7)], e)).is_empty());
        assert_eq!(events(|e| table.found(id("a"), &ours, &[at(2, 7)], e)), ["+a \"10.0.0.2:7\" None"]);
        assert_eq!(events(|e| table.lost(&id("a"), e)), ["-a"]);
        assert!(events(|e| table.lost(&id("a"), e)).is_empty());
    }

    #[test]
    fn a_node_that_was_started_again_replaces_itself() {
        let mut table = NodeTable::default();
        let ours = announcement();
        events(|e| table.found(id("a"), &ours, &[at(1, 7)], e));
        assert_eq!(events(|e| table.found(id("b"), &ours, &[at(1, 7)], e)), ["-a", "+b \"10.0.0.1:7\" None"]);
    }

    #[test]
    fn another_version_is_said_with_both_and_which_to_update() {
        let mut table = NodeTable::default();
        let check = |table: &mut NodeTable, version: u16, place: &str| {
            let mut events = Vec::new();
            table.found(id("a"), &Announcement { version, ..announcement() }, &[at(1, 7)], &mut events);
            let Some(DiscoveryEvent::Found(node)) = events.pop() else { panic!("{events:?}") };
            let said = node.unusable.unwrap().to_string();
            for part in [&format!("version {version} "), &format!("speaks {}", net::VERSION), place] {
                assert!(said.contains(part), "{said}");
            }
        };
        check(&mut table, net::VERSION - 1, "update consort there");
        check(&mut table, net::VERSION + 1, "update consort on this machine");
    }

    #[test]
    fn one_address_displaces_only_its_own_nodes() {
        let mut table = NodeTable::default();
        let mut found = |name: &str, address| events(|e| table.found(id(name), &announcement(), &[address], e));
        let kept: Vec<_> = (0..9).map(|host| found(&format!("kept-{host}"), at(host, 7))).collect();
        assert!(kept.iter().all(|events| events.len() == 1));
        let mut lost = Vec::new();
        for port in 1..1000 {
            lost.extend(
                found(&format!("many-{port}"), at(99, port)).into_iter().filter(|event| event.starts_with('-')),
            );
        }
        assert_eq!(lost.len(), 999 + 9 - NODES_FOUND_MAX);
        assert!(lost.iter().all(|event| event.starts_with("-many")), "{lost:?}");
        assert_eq!((lost.first().map(String::as_str), table.nodes.len()), (Some("-many-1"), NODES_FOUND_MAX));
        // Nodes that cannot be used have places of their own.
        let newer = Announcement { version: net::VERSION + 1, ..announcement() };
        let mut strangers = Vec::new();
        (0..100).for_each(|host| table.found(id(&format!("new-{host}")), &newer, &[at(host, 8)], &mut strangers));
        assert_eq!(table.nodes.len(), NODES_FOUND_MAX + OTHER_VERSIONS_FOUND_MAX);
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
