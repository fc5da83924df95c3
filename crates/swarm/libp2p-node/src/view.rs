//! `View`: what handles see of a node, kept up to date by its task.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use libp2p_core::Multiaddr;
use libp2p_core::multiaddr::Protocol;
use libp2p_identity::PeerId;
use libp2p_swarm::ConnectionId;

use crate::limits::{ADDRESSES_PER_PEER_MAX, OWN_ADDRESSES_MAX};
use crate::peer_id;

/// How others reach this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reachability {
    /// Nobody has tried, or nobody has come through yet.
    #[default]
    Unknown,
    /// At an address of its own.
    Direct,
    /// Through a relay.
    Relayed,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ConnectedPeer {
    pub peer: directory::PeerId,
    /// Of the connection that streams are opened in.
    pub address: Multiaddr,
    pub is_relayed: bool,
    /// The last one measured.
    pub round_trip: Option<Duration>,
    /// How the peer describes itself.
    pub agent: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerChange {
    Connected(directory::PeerId),
    Disconnected(directory::PeerId),
}

#[derive(Default)]
pub struct View {
    pub peers: HashMap<PeerId, Peer>,
    /// Where this node listens.
    pub listen: HashSet<Multiaddr>,
    /// Addresses of its own that were tested, or that its owner gave.
    pub confirmed: HashSet<Multiaddr>,
    /// Addresses of its own through relays.
    pub circuits: HashSet<Multiaddr>,
    /// Why no bootstrap peer was reached, until a connection is made.
    pub bootstrap_failure: Option<String>,
    /// Somebody has seen this node at a public IP address.
    pub is_seen_in_public: bool,
}

#[derive(Default)]
pub struct Peer {
    /// In the order in which they were made.
    pub connections: Vec<Connection>,
    /// How it describes itself, once it has.
    pub agent: Option<String>,
}

pub struct Connection {
    pub id: ConnectionId,
    pub address: Multiaddr,
    pub is_relayed: bool,
    /// This node made it.
    pub is_own: bool,
    pub round_trip: Option<Duration>,
    /// Pings in a row without an answer.
    pub ping_failures: u32,
}

impl View {
    pub fn reachability(&self) -> Reachability {
        if self.confirmed.iter().any(|address| self.counts(address)) {
            Reachability::Direct
        } else if !self.circuits.is_empty() {
            Reachability::Relayed
        } else {
            Reachability::Unknown
        }
    }

    /// A neighbour in the LAN that reaches a private address says nothing about the rest of the swarm, unless all of it is
    /// private.
    fn counts(&self, confirmed: &Multiaddr) -> bool {
        !self.is_seen_in_public || ip(confirmed).is_none_or(is_public)
    }

    /// What others can dial.
    pub fn addresses(&self) -> Vec<Multiaddr> {
        let is_loopback = |address: &&Multiaddr| ip(address).is_some_and(|ip| ip.is_loopback());
        let listen = self.listen.iter().filter(|address| ip(address).is_none_or(|ip| !ip.is_unspecified()));
        let all: Vec<&Multiaddr> = self.confirmed.iter().chain(listen).collect();
        let elsewhere: Vec<&Multiaddr> = all.iter().copied().filter(|address| !is_loopback(address)).collect();
        let direct = if elsewhere.is_empty() { all } else { elsewhere };
        let mut addresses = Vec::new();
        for address in direct.into_iter().chain(&self.circuits) {
            if !addresses.contains(address) && addresses.len() < ADDRESSES_PER_PEER_MAX {
                addresses.push(address.clone());
            }
        }
        addresses
    }

    pub fn connected(&self) -> Vec<ConnectedPeer> {
        let connected = |(id, peer): (&PeerId, &Peer)| {
            let best = peer.best()?;
            Some(ConnectedPeer {
                peer: peer_id::from_libp2p(id),
                address: best.address.clone(),
                is_relayed: best.is_relayed,
                round_trip: best.round_trip,
                agent: peer.agent.clone().unwrap_or_default(),
            })
        };
        self.peers.iter().filter_map(connected).collect()
    }

    pub fn connection_mut(&mut self, peer: &PeerId, id: ConnectionId) -> Option<&mut Connection> {
        self.peers.get_mut(peer)?.connections.iter_mut().find(|connection| connection.id == id)
    }

    /// Remembers an address as tested, within limits.
    pub fn confirm(&mut self, address: Multiaddr) {
        let addresses = if is_relayed(&address) { &mut self.circuits } else { &mut self.confirmed };
        if addresses.len() < OWN_ADDRESSES_MAX {
            addresses.insert(address);
        }
    }

    pub fn expire(&mut self, address: &Multiaddr) {
        self.circuits.remove(address);
        self.confirmed.remove(address);
    }
}

impl Peer {
    /// The connection that the next stream is opened in.
    pub fn best(&self) -> Option<&Connection> {
        let direct = self.connections.iter().rev().find(|connection| !connection.is_relayed);
        direct.or(self.connections.first())
    }
}

/// An address without the id of its peer at the end.
pub fn without_peer(mut address: Multiaddr) -> Multiaddr {
    if let Some(Protocol::P2p(_)) = address.iter().last() {
        address.pop();
    }
    address
}

pub fn is_relayed(address: &Multiaddr) -> bool {
    address.iter().any(|part| part == Protocol::P2pCircuit)
}

/// The IP address that a direct address begins with.
pub fn ip(address: &Multiaddr) -> Option<IpAddr> {
    match address.iter().next()? {
        Protocol::Ip4(ip) => Some(ip.into()),
        Protocol::Ip6(ip) => Some(ip.into()),
        _ => None,
    }
}

/// From where a direct address leads to the same machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// From this machine only, or from its link.
    Host,
    /// From its private network.
    Network,
    Internet,
}

/// The scope of an address that begins with an IP address. One through a relay has that of the relay.
pub fn scope(address: &Multiaddr) -> Option<Scope> {
    let ip = ip(address)?.to_canonical();
    Some(match is_public(ip) {
        true => Scope::Internet,
        false if ip.is_loopback() || ip.is_unspecified() || is_link_local(ip) => Scope::Host,
        false => Scope::Network,
    })
}

pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Whether the whole internet could reach this address.
pub fn is_public(ip: IpAddr) -> bool {
    const SHARED: [u8; 2] = [100, 64];
    match ip {
        IpAddr::V4(ip) => {
            let [first, second, ..] = ip.octets();
            let is_shared = first == SHARED[0] && second & 0xc0 == SHARED[1];
            !(ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_unspecified() || is_shared)
        }
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    match ip.to_ipv4_mapped() {
        Some(ip) => is_public(ip.into()),
        None => !(ip.is_loopback() || ip.is_unspecified() || ip.is_unique_local() || ip.is_unicast_link_local()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Multiaddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_neighbour_in_the_lan_does_not_make_a_node_reachable_for_all() {
        let mut view = View::default();
        view.confirm(address("/ip4/192.168.1.2/tcp/1"));
        assert_eq!(view.reachability(), Reachability::Direct, "all of the swarm is in the LAN");
        view.is_seen_in_public = true;
        assert_eq!(view.reachability(), Reachability::Unknown);
        let circuit =
            address("/ip4/203.0.113.1/tcp/1/p2p/12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5/p2p-circuit");
        view.confirm(circuit.clone());
        assert_eq!(view.reachability(), Reachability::Relayed);
        view.confirm(address("/ip4/203.0.113.2/tcp/1"));
        assert_eq!(view.reachability(), Reachability::Direct);
        view.expire(&address("/ip4/203.0.113.2/tcp/1"));
        view.expire(&circuit);
        assert_eq!(view.reachability(), Reachability::Unknown);
    }

    #[test]
    fn others_dial_no_loopback_address_if_there_is_another() {
        let mut view = View::default();
        let (loopback, lan) = (address("/ip4/127.0.0.1/tcp/1"), address("/ip4/192.168.1.2/tcp/1"));
        view.listen.insert(loopback.clone());
        assert_eq!(view.addresses(), std::slice::from_ref(&loopback));
        view.listen.insert(lan.clone());
        view.confirm(loopback);
        view.confirm(lan.clone());
        assert_eq!(view.addresses(), [lan]);
    }

    #[test]
    fn private_addresses_are_not_public() {
        for private in
            ["10.1.1.1", "100.64.0.1", "100.127.0.1", "127.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:10.1.1.1"]
        {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in ["203.0.113.1", "100.128.0.1", "2001:db8::1", "::ffff:203.0.113.1"] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
    }
}
