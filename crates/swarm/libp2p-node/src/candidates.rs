//! `Candidates`: identify, with a limit to the own addresses that peers report. Whoever tests such an address keeps it for ever, so
//! in an hour only a limited number of new ones is passed on, few of them from one IP address: a peer that reports many is not
//! in the way of others, and nobody is for longer than an hour.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::task::{Context, Poll, Waker};

use libp2p_core::transport::PortUse;
use libp2p_core::{Endpoint, Multiaddr};
use libp2p_identify as identify;
use libp2p_identity::PeerId;
use libp2p_swarm::behaviour::{ConnectionClosed, ConnectionEstablished};
use libp2p_swarm::{
    ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandler, THandlerInEvent, THandlerOutEvent, ToSwarm,
};
use tokio::time::Instant;

use crate::limits::{ADDRESS_CANDIDATE_TIME, ADDRESS_CANDIDATES_MAX, ADDRESS_CANDIDATES_PER_REPORTER_MAX};
use crate::view::ip;

type Action = ToSwarm<identify::Event, THandlerInEvent<identify::Behaviour>>;

pub struct Candidates {
    identify: identify::Behaviour,
    /// Where connections come from.
    origins: HashMap<ConnectionId, Option<IpAddr>>,
    limit: CandidateLimit,
    actions: VecDeque<Action>,
}

impl Candidates {
    pub fn new(identify: identify::Behaviour) -> Self {
        Self { identify, origins: HashMap::new(), limit: CandidateLimit::default(), actions: VecDeque::new() }
    }

    /// Takes what identify wants to do now. `reporter`: whose message was the reason.
    fn drain(&mut self, reporter: Option<IpAddr>) {
        // The swarm polls again after every event, with its own waker.
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(action) = self.identify.poll(&mut context) {
            let is_taken = match &action {
                ToSwarm::NewExternalAddrCandidate(address) => self.limit.takes(address, reporter, Instant::now()),
                _ => true,
            };
            if is_taken {
                self.actions.push_back(action);
            }
        }
    }
}

/// Reported addresses of the last hour.
#[derive(Default)]
struct CandidateLimit {
    reported: HashMap<Multiaddr, (Option<IpAddr>, Instant)>,
}

impl CandidateLimit {
    fn takes(&mut self, address: &Multiaddr, reporter: Option<IpAddr>, now: Instant) -> bool {
        if self.reported.contains_key(address) {
            return true;
        }
        self.reported.retain(|_, (_, since)| now.duration_since(*since) < ADDRESS_CANDIDATE_TIME);
        let own = self.reported.values().filter(|(other, _)| *other == reporter).count();
        let has_room = self.reported.len() < ADDRESS_CANDIDATES_MAX && own < ADDRESS_CANDIDATES_PER_REPORTER_MAX;
        if has_room {
            self.reported.insert(address.clone(), (reporter, now));
        }
        has_room
    }
}

impl NetworkBehaviour for Candidates {
    type ConnectionHandler = <identify::Behaviour as NetworkBehaviour>::ConnectionHandler;
    type ToSwarm = identify::Event;

    fn handle_established_inbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.identify.handle_established_inbound_connection(id, peer, local, remote)
    }

    fn handle_pending_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: Option<PeerId>,
        addresses: &[Multiaddr],
        role: Endpoint,
    ) -> Result<Vec<Multiaddr>, ConnectionDenied> {
        self.identify.handle_pending_outbound_connection(id, peer, addresses, role)
    }

    fn handle_established_outbound_connection(
        &mut self,
        id: ConnectionId,
        peer: PeerId,
        address: &Multiaddr,
        role: Endpoint,
        port: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        self.identify.handle_established_outbound_connection(id, peer, address, role, port)
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        match &event {
            FromSwarm::ConnectionEstablished(ConnectionEstablished { connection_id, endpoint, .. }) => {
                self.origins.insert(*connection_id, ip(endpoint.get_remote_address()));
            }
            FromSwarm::ConnectionClosed(ConnectionClosed { connection_id, .. }) => {
                self.origins.remove(connection_id);
            }
            _ => {}
        }
        self.identify.on_swarm_event(event);
    }

    fn on_connection_handler_event(&mut self, peer: PeerId, id: ConnectionId, event: THandlerOutEvent<Self>) {
        self.drain(None);
        self.identify.on_connection_handler_event(peer, id, event);
        let reporter = self.origins.get(&id).copied().flatten();
        self.drain(reporter);
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        if let Some(action) = self.actions.pop_front() {
            return Poll::Ready(action);
        }
        self.identify.poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: usize) -> Multiaddr {
        format!("/ip4/192.0.2.1/tcp/{}", number + 1).parse().unwrap()
    }

    fn reporter(number: usize) -> Option<IpAddr> {
        Some(IpAddr::from([198, 51, 100, number as u8]))
    }

    #[test]
    fn one_reporter_leaves_room_and_the_room_is_given_back() {
        let (mut limit, start) = (CandidateLimit::default(), Instant::now());
        let liar = (0..1000).filter(|number| limit.takes(&address(*number), reporter(0), start)).count();
        assert_eq!(liar, ADDRESS_CANDIDATES_PER_REPORTER_MAX);
        assert!(limit.takes(&address(1000), reporter(1), start));
        // Many reporters take all that there is, for an hour.
        let all = (2000..9000).filter(|number| limit.takes(&address(*number), reporter(number % 250), start)).count();
        assert_eq!(all + liar + 1, ADDRESS_CANDIDATES_MAX);
        assert!(limit.takes(&address(1000), reporter(9), start), "it is known");
        let later = start + ADDRESS_CANDIDATE_TIME;
        assert!(!limit.takes(&address(9000), reporter(251), later - std::time::Duration::from_secs(1)));
        assert!(limit.takes(&address(9000), reporter(251), later));
        assert_eq!(limit.reported.len(), 1);
    }
}
