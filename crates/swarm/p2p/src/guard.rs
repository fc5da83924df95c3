//! `Guarded`: one of libp2p's behaviours, of which some actions are not taken, because peers could cause too many of them or
//! bad ones.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::task::{Context, Poll};

use libp2p_core::transport::PortUse;
use libp2p_core::{Endpoint, Multiaddr};
use libp2p_identity::PeerId;
use libp2p_swarm::behaviour::{ConnectionClosed, ConnectionEstablished};
use libp2p_swarm::{
    ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
};

use crate::limits::ADDRESS_CANDIDATES_MAX;
use crate::view::{ip, is_public, is_relayed};

pub struct Guarded<B, G> {
    inner: B,
    guard: G,
}

pub trait Guard: 'static {
    /// False: the action is not taken.
    fn allows<E, H>(&mut self, action: &ToSwarm<E, H>) -> bool;

    /// False: this dial fails.
    fn allows_dial(&mut self, _id: ConnectionId, _addresses: &[Multiaddr]) -> bool {
        true
    }

    fn on_swarm_event(&mut self, _event: &FromSwarm) {}
}

impl<B, G> Guarded<B, G> {
    pub fn new(inner: B, guard: G) -> Self {
        Self { inner, guard }
    }
}

/// Own addresses that peers report are kept by those who test them, so there is a limit to how many different ones.
#[derive(Default)]
pub struct CandidateLimit {
    reported: HashSet<Multiaddr>,
}

impl Guard for CandidateLimit {
    fn allows<E, H>(&mut self, action: &ToSwarm<E, H>) -> bool {
        let ToSwarm::NewExternalAddrCandidate(address) = action else { return true };
        if self.reported.len() < ADDRESS_CANDIDATES_MAX {
            self.reported.insert(address.clone());
        }
        self.reported.contains(address)
    }
}

/// A peer that asks whether it can be reached must not have this node dial machines that only this node can reach: it is
/// dialled at public IP addresses and at those that it is connected from.
#[derive(Default)]
pub struct DialBacks {
    origins: HashMap<PeerId, Vec<(ConnectionId, IpAddr)>>,
    /// Dials that are about to begin.
    dials: HashMap<ConnectionId, PeerId>,
}

impl Guard for DialBacks {
    fn allows<E, H>(&mut self, action: &ToSwarm<E, H>) -> bool {
        if let ToSwarm::Dial { opts } = action
            && let Some(peer) = opts.get_peer_id()
        {
            self.dials.insert(opts.connection_id(), peer);
        }
        true
    }

    fn allows_dial(&mut self, id: ConnectionId, addresses: &[Multiaddr]) -> bool {
        let Some(peer) = self.dials.remove(&id) else { return true };
        let origins = self.origins.get(&peer).map_or(&[][..], Vec::as_slice);
        let is_fine = |ip: IpAddr| is_public(ip) || origins.iter().any(|(_, origin)| *origin == ip);
        // Others than IP addresses are names, which may stand for any machine.
        addresses.iter().all(|address| !is_relayed(address) && ip(address).is_some_and(is_fine))
    }

    fn on_swarm_event(&mut self, event: &FromSwarm) {
        match event {
            FromSwarm::ConnectionEstablished(ConnectionEstablished { peer_id, connection_id, endpoint, .. }) => {
                if let Some(ip) = ip(endpoint.get_remote_address()) {
                    self.origins.entry(*peer_id).or_default().push((*connection_id, ip));
                }
            }
            FromSwarm::ConnectionClosed(ConnectionClosed { peer_id, connection_id, .. }) => {
                if let Some(origins) = self.origins.get_mut(peer_id) {
                    origins.retain(|(id, _)| id != connection_id);
                    if origins.is_empty() {
                        self.origins.remove(peer_id);
                    }
                }
            }
            _ => {}
        }
    }
}

impl<B: NetworkBehaviour, G: Guard> NetworkBehaviour for Guarded<B, G> {
    type ConnectionHandler = B::ConnectionHandler;
    type ToSwarm = B::ToSwarm;

    fn handle_pending_inbound_connection(
        &mut self,
        id: ConnectionId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<(), ConnectionDenied> {
        self.inner.handle_pending_inbound_connection(id, local, remote)
    }

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.inner.handle_established_inbound_connection(id, peer, local, remote)
    }

    fn handle_pending_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: Option<PeerId>,
        addresses: &[Multiaddr],
        role: Endpoint,
    ) -> Result<Vec<Multiaddr>, ConnectionDenied> {
        match self.guard.allows_dial(id, addresses) {
            true => self.inner.handle_pending_outbound_connection(id, peer, addresses, role),
            false => Err(ConnectionDenied::new("a stranger chose the address")),
        }
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        address: &Multiaddr,
        role: Endpoint,
        port: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.inner.handle_established_outbound_connection(id, peer, address, role, port)
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        self.guard.on_swarm_event(&event);
        self.inner.on_swarm_event(event);
    }

    fn on_connection_handler_event(&mut self, peer: PeerId, id: ConnectionId, event: THandlerOutEvent<Self>) {
        self.inner.on_connection_handler_event(peer, id, event);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        loop {
            match self.inner.poll(context) {
                Poll::Ready(action) if !self.guard.allows(&action) => {}
                outcome => return outcome,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use libp2p_core::ConnectedPoint;
    use libp2p_swarm::dial_opts::{DialOpts, PeerCondition};

    use super::*;

    #[test]
    fn a_peer_is_dialled_back_in_public_and_where_it_is_connected_from() {
        let peer = PeerId::random();
        let mut guard = DialBacks::default();
        let endpoint = ConnectedPoint::Listener {
            local_addr: "/ip4/10.0.0.1/tcp/1".parse().unwrap(),
            send_back_addr: "/ip4/10.0.0.2/tcp/2".parse().unwrap(),
        };
        guard.on_swarm_event(&FromSwarm::ConnectionEstablished(ConnectionEstablished {
            peer_id: peer,
            connection_id: ConnectionId::new_unchecked(1),
            endpoint: &endpoint,
            failed_addresses: &[],
            other_established: 0,
        }));
        let mut is_dialled = |address: &str| {
            let opts = DialOpts::peer_id(peer).condition(PeerCondition::Always).build();
            let id = opts.connection_id();
            assert!(guard.allows::<(), ()>(&ToSwarm::Dial { opts }));
            let is_dialled = guard.allows_dial(id, &[address.parse().unwrap()]);
            assert!(guard.dials.is_empty());
            is_dialled
        };
        assert!(is_dialled("/ip4/10.0.0.2/tcp/22"));
        assert!(is_dialled("/ip4/203.0.113.1/udp/1/quic-v1"));
        for address in ["/ip4/10.0.0.3/tcp/2", "/ip4/127.0.0.1/tcp/22", "/ip6/::1/tcp/1", "/dns/localhost/tcp/1"] {
            assert!(!is_dialled(address), "{address}");
        }
        assert!(guard.allows_dial(ConnectionId::new_unchecked(7), &[]), "a dial of somebody else");
    }

    #[test]
    fn peers_report_a_limited_number_of_own_addresses() {
        let mut guard = CandidateLimit::default();
        let mut report = |port: usize| {
            let address = format!("/ip4/192.0.2.1/tcp/{port}").parse().unwrap();
            guard.allows::<(), ()>(&ToSwarm::NewExternalAddrCandidate(address))
        };
        for port in 1..=ADDRESS_CANDIDATES_MAX {
            assert!(report(port));
        }
        assert!(!report(ADDRESS_CANDIDATES_MAX + 1));
        assert!(report(1));
    }
}
