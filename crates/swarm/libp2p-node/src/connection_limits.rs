//! `ConnectionLimits`: how many connections there may be: in handshakes, made, to one peer, and from one IP address.
//! libp2p-connection-limits has no limit per address and keeps an entry for every peer that ever was.
//!
//! Where there are too many from others, one is evicted for a new one: of the address that has the most, the handshake that began
//! first, or the connection that was made last. So an address that takes what it can keeps nobody else out.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
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
use libp2p_swarm::{
    CloseConnection, ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandlerInEvent, ToSwarm,
};

use crate::handshakes::Handshakes;
use crate::limits::{
    CLOSING_CONNECTIONS_MAX, CONNECTIONS_PER_PEER_MAX, INCOMING_CONNECTIONS_MAX, INCOMING_CONNECTIONS_PER_ADDRESS_MAX,
    INCOMING_HANDSHAKES_MAX, OUTGOING_CONNECTIONS_MAX, OUTGOING_HANDSHAKES_MAX,
};
use crate::view::ip;

#[derive(Default)]
pub struct ConnectionLimits {
    handshakes: Handshakes,
    incoming_handshakes: HashMap<ConnectionId, Handshake>,
    outgoing_handshakes: HashSet<ConnectionId>,
    incoming: HashMap<ConnectionId, Incoming>,
    outgoing: HashSet<ConnectionId>,
    peers: Counts<PeerId>,
    /// Handshakes and connections.
    origins: Counts<Origin>,
    /// Incoming connections that are being closed for others.
    closing: HashSet<ConnectionId>,
    to_close: VecDeque<(PeerId, ConnectionId)>,
    /// Orders handshakes and connections by age.
    next: u64,
}

struct Handshake {
    origin: Option<Origin>,
    remote: Multiaddr,
    begun: u64,
}

struct Incoming {
    peer: PeerId,
    origin: Option<Origin>,
    made: u64,
}

/// An IPv4 address, or the network of an IPv6 address: a host has as many addresses there as it likes.
type Origin = IpAddr;
const NETWORK_BITS: u32 = 64;

/// The connection was evicted for another one.
#[derive(Debug)]
struct Evicted;

/// The limit that a connection would exceed.
#[derive(Debug)]
struct Exceeded(&'static str, usize);

impl ConnectionLimits {
    /// `handshakes`: those of incoming connections.
    pub fn new(handshakes: Handshakes) -> Self {
        Self { handshakes, ..Self::default() }
    }

    fn check_peer(&self, peer: &PeerId) -> Result<(), ConnectionDenied> {
        check("connections to one peer", self.peers.of(peer), CONNECTIONS_PER_PEER_MAX)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Handshakes and connections from there; those from nowhere in particular are not counted.
    fn count(&self, origin: Option<Origin>) -> usize {
        origin.map_or(1, |origin| self.origins.of(&origin))
    }

    /// Ends a handshake: of this origin, or of the one that has the most connections, the oldest one. False if there is none.
    fn evict_handshake(&mut self, of: Option<Origin>) -> bool {
        let may = |handshake: &Handshake| of.is_none() || handshake.origin == of;
        let all = self.incoming_handshakes.iter().filter(|(_, handshake)| may(handshake));
        let key = |handshake: &Handshake| (self.count(handshake.origin), Reverse(handshake.begun));
        let Some((&id, _)) = all.max_by_key(|(_, handshake)| key(handshake)) else { return false };
        if let Some(handshake) = self.forget_handshake(id) {
            self.handshakes.end(&handshake.remote);
        }
        true
    }

    fn forget_handshake(&mut self, id: ConnectionId) -> Option<Handshake> {
        let handshake = self.incoming_handshakes.remove(&id)?;
        if let Some(origin) = handshake.origin {
            self.origins.remove(&origin);
        }
        Some(handshake)
    }

    /// Closes a connection for one from `origin`: of the address that has the most, unless that has no more than `origin` itself, the
    /// one that was made last. Whoever is connected for long has been of use. False if there is none.
    fn evict_connection(&mut self, origin: Option<Origin>) -> bool {
        if self.closing.len() >= CLOSING_CONNECTIONS_MAX {
            return false;
        }
        let own = self.count(origin);
        let open = self.incoming.iter().filter(|(id, incoming)| {
            !self.closing.contains(id) && self.count(incoming.origin) > own && incoming.origin != origin
        });
        let last = open.max_by_key(|(_, incoming)| (self.count(incoming.origin), incoming.made));
        let Some((id, peer)) = last.map(|(&id, incoming)| (id, incoming.peer)) else { return false };
        self.closing.insert(id);
        self.to_close.push_back((peer, id));
        true
    }

    fn on_established(&mut self, peer: PeerId, id: ConnectionId, endpoint: &ConnectedPoint) {
        self.peers.add(peer);
        match endpoint {
            ConnectedPoint::Dialer { .. } => {
                self.outgoing_handshakes.remove(&id);
                self.outgoing.insert(id);
            }
            ConnectedPoint::Listener { .. } => {
                let origin = self.incoming_handshakes.remove(&id).and_then(|handshake| handshake.origin);
                let made = self.number();
                self.incoming.insert(id, Incoming { peer, origin, made });
            }
        }
    }

    fn on_closed(&mut self, peer: &PeerId, id: ConnectionId) {
        self.peers.remove(peer);
        self.outgoing.remove(&id);
        self.closing.remove(&id);
        if let Some(origin) = self.incoming.remove(&id).and_then(|incoming| incoming.origin) {
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
        let origin = ip(remote).map(origin);
        if let Some(origin) = origin {
            let own = self.origins.of(&origin);
            if own >= INCOMING_CONNECTIONS_PER_ADDRESS_MAX && !self.evict_handshake(Some(origin)) {
                check("connections from one address", own, INCOMING_CONNECTIONS_PER_ADDRESS_MAX)?;
            }
        }
        if self.incoming_handshakes.len() >= INCOMING_HANDSHAKES_MAX {
            self.evict_handshake(None);
        }
        if let Some(origin) = origin {
            self.origins.add(origin);
        }
        let begun = self.number();
        self.incoming_handshakes.insert(id, Handshake { origin, remote: remote.clone(), begun });
        Ok(())
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<ConnectionHandler, ConnectionDenied> {
        // It was complete just when it was evicted.
        let Some(handshake) = self.incoming_handshakes.get(&id) else { return Err(ConnectionDenied::new(Evicted)) };
        let origin = handshake.origin;
        self.check_peer(&peer)?;
        let open = self.incoming.len() - self.closing.len();
        if open >= INCOMING_CONNECTIONS_MAX && !self.evict_connection(origin) {
            check("incoming connections", open, INCOMING_CONNECTIONS_MAX)?;
        }
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
                self.forget_handshake(connection_id);
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: Infallible) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Infallible, THandlerInEvent<Self>>> {
        match self.to_close.pop_front() {
            Some((peer_id, id)) => {
                Poll::Ready(ToSwarm::CloseConnection { peer_id, connection: CloseConnection::One(id) })
            }
            None => Poll::Pending,
        }
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

impl fmt::Display for Evicted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("evicted for another connection")
    }
}

impl std::error::Error for Evicted {}

#[cfg(test)]
mod tests {
    use super::*;

    fn incoming(limits: &mut ConnectionLimits, id: usize, remote: &str) -> bool {
        let local = "/ip4/127.0.0.1/tcp/1".parse().unwrap();
        let id = ConnectionId::new_unchecked(id);
        limits.handle_pending_inbound_connection(id, &local, &remote.parse().unwrap()).is_ok()
    }

    /// A connection from there was made.
    fn established(limits: &mut ConnectionLimits, id: usize, remote: &str) -> bool {
        let (local, remote): (Multiaddr, Multiaddr) =
            ("/ip4/127.0.0.1/tcp/1".parse().unwrap(), remote.parse().unwrap());
        let (id, peer) = (ConnectionId::new_unchecked(id), PeerId::random());
        let is_allowed = limits.handle_established_inbound_connection(id, peer, &local, &remote).is_ok();
        if is_allowed {
            limits.on_established(peer, id, &ConnectedPoint::Listener { local_addr: local, send_back_addr: remote });
        }
        is_allowed
    }

    fn has_handshake(limits: &ConnectionLimits, id: usize) -> bool {
        limits.incoming_handshakes.contains_key(&ConnectionId::new_unchecked(id))
    }

    #[test]
    fn one_address_has_a_share_of_connections() {
        let mut limits = ConnectionLimits::default();
        for id in 0..INCOMING_CONNECTIONS_PER_ADDRESS_MAX {
            assert!(incoming(&mut limits, id, "/ip6/2001:db8::1/tcp/1"));
            assert!(established(&mut limits, id, "/ip6/2001:db8::1/tcp/1"));
        }
        let more = INCOMING_CONNECTIONS_PER_ADDRESS_MAX;
        assert!(!incoming(&mut limits, more, "/ip6/2001:db8::ffff:0:0:2/tcp/2"), "the same network");
        assert!(incoming(&mut limits, more, "/ip6/2001:db8:0:1::1/tcp/1"));
        assert!(incoming(&mut limits, more + 1, "/ip4/192.0.2.1/tcp/1"));
        assert_eq!(limits.origins.0.len(), 3);
    }

    #[test]
    fn one_address_evicts_its_own_oldest_handshake_and_no_other() {
        let mut limits = ConnectionLimits::default();
        let share = INCOMING_CONNECTIONS_PER_ADDRESS_MAX;
        assert!(incoming(&mut limits, share + 1, "/ip4/198.51.100.1/tcp/1"));
        for id in 0..=share {
            assert!(incoming(&mut limits, id, &format!("/ip4/192.0.2.1/tcp/{}", id + 1)));
        }
        assert!(!has_handshake(&limits, 0) && has_handshake(&limits, 1) && has_handshake(&limits, share + 1));
        assert_eq!(limits.incoming_handshakes.len(), share + 1);
        assert!(!established(&mut limits, 0, "/ip4/192.0.2.1/tcp/1"), "it was complete just when it was evicted");
        assert_eq!(limits.origins.of(&"192.0.2.1".parse().unwrap()), share);
    }

    #[test]
    fn handshakes_of_the_addresses_that_have_the_most_are_evicted_for_others() {
        let mut limits = ConnectionLimits::default();
        for id in 0..INCOMING_HANDSHAKES_MAX {
            let address = if id < 10 { format!("198.51.100.{id}") } else { format!("192.0.2.{}", id % 4) };
            assert!(incoming(&mut limits, id, &format!("/ip4/{address}/tcp/{}", id + 1)));
        }
        for id in INCOMING_HANDSHAKES_MAX..INCOMING_HANDSHAKES_MAX + 100 {
            assert!(incoming(&mut limits, id, &format!("/ip4/203.0.113.{}/tcp/1", id - INCOMING_HANDSHAKES_MAX)));
            assert_eq!(limits.incoming_handshakes.len(), INCOMING_HANDSHAKES_MAX);
        }
        assert!((0..10).all(|id| has_handshake(&limits, id)), "those of quiet addresses stay");
        assert!((10..110).all(|id| !has_handshake(&limits, id)), "the oldest ones of the others have gone");
        assert!((110..INCOMING_HANDSHAKES_MAX + 100).all(|id| has_handshake(&limits, id)));
    }

    #[test]
    fn connections_of_the_addresses_that_have_the_most_are_closed_for_others() {
        let mut limits = ConnectionLimits::default();
        let connect = |limits: &mut ConnectionLimits, id: usize, address: &str| {
            let remote = format!("/ip4/{address}/tcp/{}", id + 1);
            assert!(incoming(limits, id, &remote));
            established(limits, id, &remote)
        };
        let addresses = INCOMING_CONNECTIONS_MAX / INCOMING_CONNECTIONS_PER_ADDRESS_MAX;
        for id in 0..INCOMING_CONNECTIONS_MAX {
            assert!(connect(&mut limits, id, &format!("192.0.2.{}", id % addresses)));
        }
        assert!(connect(&mut limits, INCOMING_CONNECTIONS_MAX, "198.51.100.1"));
        let evicted = limits.to_close.pop_front().unwrap().1;
        assert_eq!(evicted, ConnectionId::new_unchecked(INCOMING_CONNECTIONS_MAX - 1), "the last one of the flood");
        // An address that has as much as any gets no more.
        limits.on_closed(&PeerId::random(), evicted);
        let id = INCOMING_CONNECTIONS_MAX + 1;
        let mut single = ConnectionLimits::default();
        for id in 0..INCOMING_CONNECTIONS_MAX {
            assert!(connect(&mut single, id, &format!("10.0.{}.{}", id / 200, id % 200)));
        }
        assert!(!connect(&mut single, id, "10.0.0.1"), "nobody has more than the new one");
        assert!(single.to_close.is_empty());
    }
}
