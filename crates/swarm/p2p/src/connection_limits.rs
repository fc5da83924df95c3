//! `ConnectionLimits`: how many connections there may be: in handshakes, made, to one peer, and from one IP address.
//! libp2p-connection-limits has no limit per address and keeps an entry for every peer that ever was.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::fmt;
use std::hash::Hash;
use std::net::IpAddr;
use std::task::{Context, Poll};

use libp2p_core::transport::PortUse;
use libp2p_core::{ConnectedPoint, Endpoint, Multiaddr};
use libp2p_identity::PeerId;
use libp2p_swarm::behaviour::{ConnectionClosed, ConnectionEstablished, DialFailure, ListenFailure};
use libp2p_swarm::dummy::ConnectionHandler;
use libp2p_swarm::{ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandlerInEvent, ToSwarm};

use crate::limits::{
    CONNECTIONS_PER_PEER_MAX, INCOMING_CONNECTIONS_MAX, INCOMING_CONNECTIONS_PER_ADDRESS_MAX, INCOMING_HANDSHAKES_MAX,
    OUTGOING_CONNECTIONS_MAX, OUTGOING_HANDSHAKES_MAX,
};
use crate::view::ip;

#[derive(Default)]
pub struct ConnectionLimits {
    /// Incoming handshakes, and whose they are.
    incoming_handshakes: HashMap<ConnectionId, Option<Origin>>,
    outgoing_handshakes: HashSet<ConnectionId>,
    incoming: HashMap<ConnectionId, Option<Origin>>,
    outgoing: HashSet<ConnectionId>,
    peers: Counts<PeerId>,
    /// Handshakes and connections.
    origins: Counts<Origin>,
}

/// An IPv4 address, or the network of an IPv6 address: a host has as many addresses there as it likes.
type Origin = IpAddr;
const NETWORK_BITS: u32 = 64;

/// The limit that a connection would exceed.
#[derive(Debug)]
struct Exceeded(&'static str, usize);

impl ConnectionLimits {
    fn check_peer(&self, peer: &PeerId) -> Result<(), ConnectionDenied> {
        check("connections to one peer", self.peers.of(peer), CONNECTIONS_PER_PEER_MAX)
    }

    fn on_established(&mut self, peer: PeerId, id: ConnectionId, endpoint: &ConnectedPoint) {
        self.peers.add(peer);
        match endpoint {
            ConnectedPoint::Dialer { .. } => {
                self.outgoing_handshakes.remove(&id);
                self.outgoing.insert(id);
            }
            ConnectedPoint::Listener { .. } => {
                let origin = self.incoming_handshakes.remove(&id).flatten();
                self.incoming.insert(id, origin);
            }
        }
    }

    fn on_closed(&mut self, peer: &PeerId, id: ConnectionId) {
        self.peers.remove(peer);
        self.outgoing.remove(&id);
        if let Some(origin) = self.incoming.remove(&id).flatten() {
            self.origins.remove(&origin);
        }
    }
}

impl NetworkBehaviour for ConnectionLimits {
    type ConnectionHandler = ConnectionHandler;
    type ToSwarm = Infallible;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        _: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        check("incoming handshakes", self.incoming_handshakes.len(), INCOMING_HANDSHAKES_MAX)?;
        let origin = ip(remote).map(origin);
        if let Some(origin) = origin {
            check("connections from one address", self.origins.of(&origin), INCOMING_CONNECTIONS_PER_ADDRESS_MAX)?;
            self.origins.add(origin);
        }
        self.incoming_handshakes.insert(id, origin);
        Ok(())
    }

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<ConnectionHandler, ConnectionDenied> {
        check("incoming connections", self.incoming.len(), INCOMING_CONNECTIONS_MAX)?;
        self.check_peer(&peer)?;
        Ok(ConnectionHandler)
    }

    fn handle_pending_outbound_connection(
        &mut self,
        id: ConnectionId,
        _: Option<PeerId>,
        _: &[Multiaddr],
        _: Endpoint,
    ) -> Result<Vec<Multiaddr>, ConnectionDenied> {
        check("outgoing handshakes", self.outgoing_handshakes.len(), OUTGOING_HANDSHAKES_MAX)?;
        self.outgoing_handshakes.insert(id);
        Ok(Vec::new())
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<ConnectionHandler, ConnectionDenied> {
        check("outgoing connections", self.outgoing.len(), OUTGOING_CONNECTIONS_MAX)?;
        self.check_peer(&peer)?;
        Ok(ConnectionHandler)
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        match event {
            FromSwarm::ConnectionEstablished(ConnectionEstablished { peer_id, connection_id, endpoint, .. }) => {
                self.on_established(peer_id, connection_id, endpoint);
            }
            FromSwarm::ConnectionClosed(ConnectionClosed { peer_id, connection_id, .. }) => {
                self.on_closed(&peer_id, connection_id);
            }
            FromSwarm::DialFailure(DialFailure { connection_id, .. }) => {
                self.outgoing_handshakes.remove(&connection_id);
            }
            FromSwarm::ListenFailure(ListenFailure { connection_id, .. }) => {
                if let Some(origin) = self.incoming_handshakes.remove(&connection_id).flatten() {
                    self.origins.remove(&origin);
                }
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: Infallible) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Infallible, THandlerInEvent<Self>>> {
        Poll::Pending
    }
}

fn check(what: &'static str, count: usize, max: usize) -> Result<(), ConnectionDenied> {
    if count < max { Ok(()) } else { Err(ConnectionDenied::new(Exceeded(what, max))) }
}

fn origin(address: IpAddr) -> Origin {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) & (u128::MAX << NETWORK_BITS)).into()),
        address => address,
    }
}

/// How many there are of each. What there is none of has no entry.
struct Counts<K>(HashMap<K, usize>);

impl<K: Eq + Hash> Counts<K> {
    fn of(&self, key: &K) -> usize {
        self.0.get(key).copied().unwrap_or_default()
    }

    fn add(&mut self, key: K) {
        *self.0.entry(key).or_default() += 1;
    }

    fn remove(&mut self, key: &K) {
        if let Some(count) = self.0.get_mut(key) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(key);
            }
        }
    }
}

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there are {} {} already", self.1, self.0)
    }
}

impl std::error::Error for Exceeded {}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(limits: &mut ConnectionLimits, id: usize, remote: &str) -> bool {
        let local = "/ip4/127.0.0.1/tcp/1".parse().unwrap();
        let id = ConnectionId::new_unchecked(id);
        limits.handle_pending_inbound_connection(id, &local, &remote.parse().unwrap()).is_ok()
    }

    #[test]
    fn one_address_has_a_share_of_connections() {
        let mut limits = ConnectionLimits::default();
        for id in 0..INCOMING_CONNECTIONS_PER_ADDRESS_MAX {
            assert!(incoming(&mut limits, id, "/ip6/2001:db8::1/tcp/1"));
        }
        let more = INCOMING_CONNECTIONS_PER_ADDRESS_MAX;
        assert!(!incoming(&mut limits, more, "/ip6/2001:db8::ffff:0:0:2/tcp/2"), "the same network");
        assert!(incoming(&mut limits, more, "/ip6/2001:db8:0:1::1/tcp/1"));
        assert!(incoming(&mut limits, more + 1, "/ip4/192.0.2.1/tcp/1"));
        assert_eq!(limits.origins.0.len(), 3);
    }

    #[test]
    fn incoming_handshakes_are_limited() {
        let mut limits = ConnectionLimits::default();
        for id in 0..INCOMING_HANDSHAKES_MAX {
            assert!(incoming(&mut limits, id, &format!("/ip4/192.0.2.{}/tcp/1", id % 200)));
        }
        assert!(!incoming(&mut limits, INCOMING_HANDSHAKES_MAX, "/ip4/198.51.100.1/tcp/1"));
    }
}
