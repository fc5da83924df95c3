//! What a node does about the events of libp2p's swarm.

use std::time::Duration;

use libp2p_core::{ConnectedPoint, Multiaddr};
use libp2p_identify as identify;
use libp2p_identity::PeerId;
use libp2p_kad::{self as kad, InboundRequest, QueryResult};
use libp2p_mdns as mdns;
use libp2p_ping as ping;
use libp2p_relay::HOP_PROTOCOL_NAME;
use libp2p_swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p_swarm::{ConnectionId, SwarmEvent};
use tokio::time::Instant;

use super::{Node, reason};
use crate::behaviour::{BehaviourEvent, IPFS_KADEMLIA, KADEMLIA, set_addresses};
use crate::limits::{ADDRESSES_PER_PEER_MAX, AGENT_CHARS_MAX, LAN_CONNECTIONS_MAX, PING_FAILURES_MAX};
use crate::peer_id;
use crate::view::{Connection, PeerChange, ip, is_public, is_relayed, without_peer};

impl Node {
    pub(super) fn on_event(&mut self, event: SwarmEvent<BehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(event) => self.on_behaviour(event),
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                self.on_established(peer_id, connection_id, &endpoint);
            }
            SwarmEvent::ConnectionClosed { peer_id, connection_id, num_established, .. } => {
                self.on_closed(&peer_id, connection_id, num_established == 0);
            }
            SwarmEvent::OutgoingConnectionError { peer_id: Some(peer), connection_id, error } => {
                tracing::debug!(%peer, %error, "no connection");
                if self.bootstrap.has(&peer) {
                    let why = reason(&error);
                    tracing::warn!(%peer, %why, "a peer to join the swarm through cannot be reached");
                    self.view().bootstrap_failure = Some(format!("{peer} cannot be reached: {why}"));
                }
                self.on_dial_failed(&peer, connection_id, &error);
            }
            SwarmEvent::IncomingConnectionError { error, .. } => {
                tracing::debug!(%error, "an incoming connection was not made");
            }
            SwarmEvent::NewListenAddr { address, .. } => self.on_listening(address),
            SwarmEvent::ExpiredListenAddr { address, .. } => self.on_not_listening(&address),
            SwarmEvent::ListenerClosed { listener_id, addresses, .. } => {
                addresses.iter().for_each(|address| self.on_not_listening(address));
                self.relays.on_listener_closed(listener_id, Instant::now());
            }
            SwarmEvent::ExternalAddrConfirmed { address } => {
                tracing::info!(%address, "others reach this node");
                self.view().confirm(without_peer(address));
                self.providers.on_address();
            }
            SwarmEvent::ExternalAddrExpired { address } => self.view().expire(&without_peer(address)),
            SwarmEvent::NewExternalAddrOfPeer { peer_id, address } => self.learn(peer_id, address),
            _ => {}
        }
    }

    fn on_behaviour(&mut self, event: BehaviourEvent) {
        match event {
            BehaviourEvent::Identify(identify::Event::Received { connection_id, peer_id, info }) => {
                self.on_identified(peer_id, connection_id, info);
            }
            BehaviourEvent::Ping(ping::Event { peer, connection, result }) => self.on_ping(&peer, connection, result),
            BehaviourEvent::Kademlia(event) => self.on_kademlia(event),
            BehaviourEvent::Mdns(mdns::Event::Discovered(found)) => {
                found.into_iter().for_each(|(peer, address)| self.on_seen_in_lan(peer, address));
            }
            BehaviourEvent::Dcutr(event) => match event.result {
                Ok(_) => tracing::info!(peer = %event.remote_peer_id, "a relayed peer is connected directly"),
                Err(error) => tracing::debug!(peer = %event.remote_peer_id, %error, "a peer stays relayed"),
            },
            BehaviourEvent::AutonatClient(event) => {
                let result = event.result.map_or_else(|error| error.to_string(), |()| "others reach it".to_owned());
                tracing::debug!(address = %event.tested_addr, server = %event.server, result, "an own address is tested");
            }
            BehaviourEvent::RelayClient(event) => tracing::trace!(?event, "relay client"),
            BehaviourEvent::RelayServer(event) => tracing::trace!(?event, "relay server"),
            _ => {}
        }
    }

    fn on_established(&mut self, peer: PeerId, id: ConnectionId, endpoint: &ConnectedPoint) {
        let address = without_peer(endpoint.get_remote_address().clone());
        let connection = Connection {
            id,
            address,
            is_relayed: endpoint.is_relayed(),
            is_own: endpoint.is_dialer(),
            round_trip: None,
            ping_failures: 0,
        };
        tracing::debug!(%peer, address = %connection.address, "connected");
        self.rules().connected(&connection.address);
        let connections = {
            let mut view = self.view();
            view.bootstrap_failure = None;
            let connections = &mut view.peers.entry(peer).or_default().connections;
            connections.push(connection);
            connections.len()
        };
        if connections == 1 {
            // Nobody may listen.
            let _ = self.changes.send(PeerChange::Connected(peer_id::from_libp2p(&peer)));
        }
        self.on_connected(&peer);
    }

    fn on_closed(&mut self, peer: &PeerId, id: ConnectionId, is_last: bool) {
        tracing::debug!(%peer, is_last, "disconnected");
        let closed = {
            let mut view = self.view();
            let connections = view.peers.get_mut(peer).map(|known| &mut known.connections);
            let closed = connections.and_then(|connections| {
                let index = connections.iter().position(|connection| connection.id == id)?;
                Some(connections.remove(index))
            });
            if is_last {
                view.peers.remove(peer);
            }
            closed
        };
        if let Some(closed) = closed {
            self.rules().disconnected(&closed.address);
        }
        if is_last {
            self.relays.on_disconnected(peer);
            let _ = self.changes.send(PeerChange::Disconnected(peer_id::from_libp2p(peer)));
        }
    }

    fn on_listening(&mut self, address: Multiaddr) {
        tracing::debug!(%address, "listening");
        if is_relayed(&address) {
            return;
        }
        self.view().listen.insert(address.clone());
        if self.is_relay_server && self.view().addresses().contains(&address) {
            self.swarm.add_external_address(address);
        }
    }

    fn on_not_listening(&mut self, address: &Multiaddr) {
        self.view().listen.remove(address);
        if self.is_relay_server {
            self.swarm.remove_external_address(address);
        }
    }

    fn on_identified(&mut self, peer: PeerId, id: ConnectionId, info: identify::Info) {
        let is_seen_in_public = !is_relayed(&info.observed_addr) && ip(&info.observed_addr).is_some_and(is_public);
        let agent = info.agent_version.chars().filter(|char| !char.is_control()).take(AGENT_CHARS_MAX).collect();
        let dialled = {
            let mut view = self.view();
            view.is_seen_in_public |= is_seen_in_public;
            if let Some(known) = view.peers.get_mut(&peer) {
                known.agent = Some(agent);
            }
            view.connection_mut(&peer, id).filter(|connection| !connection.is_relayed).map(|it| it.address.clone())
        };
        let addresses = info.listen_addrs.into_iter().take(ADDRESSES_PER_PEER_MAX).map(without_peer);
        let addresses: Vec<_> = addresses.collect();
        if let Some(dialled) = dialled
            && info.protocols.contains(&HOP_PROTOCOL_NAME)
        {
            // The port that an incoming connection comes from is not where its peer listens.
            let same_host = addresses.iter().find(|address| !is_relayed(address) && ip(address) == ip(&dialled));
            let is_listed = addresses.contains(&dialled);
            let address = if is_listed { Some(&dialled) } else { same_host };
            if let Some(address) = address {
                self.relays.add(peer, address.clone());
            }
        }
        // Those at which it was reached are better than those that it tells.
        let mut reached: Vec<_> = {
            let view = self.view();
            let connections = view.peers.get(&peer).map_or(&[][..], |known| known.connections.as_slice());
            let own = connections.iter().filter(|connection| connection.is_own && !connection.is_relayed);
            own.map(|connection| connection.address.clone()).collect()
        };
        reached.extend(addresses);
        let addresses = reached;
        let behaviour = self.swarm.behaviour_mut();
        if info.protocols.contains(&KADEMLIA) {
            set_addresses(&mut behaviour.kademlia, &peer, &addresses);
        }
        if let Some(kademlia) = behaviour.ipfs_kademlia.as_mut()
            && info.protocols.contains(&IPFS_KADEMLIA)
        {
            set_addresses(kademlia, &peer, &addresses);
        }
        self.look_up_after_joining(Instant::now());
    }

    fn on_ping(&mut self, peer: &PeerId, id: ConnectionId, result: Result<Duration, ping::Failure>) {
        let is_silent = {
            let mut view = self.view();
            let Some(connection) = view.connection_mut(peer, id) else { return };
            match result {
                Ok(round_trip) => {
                    connection.round_trip = Some(round_trip);
                    connection.ping_failures = 0;
                }
                Err(ping::Failure::Unsupported) => {}
                Err(_) => connection.ping_failures += 1,
            }
            connection.ping_failures >= PING_FAILURES_MAX
        };
        if is_silent {
            tracing::info!(%peer, "a connection is closed: pings have no answer");
            self.swarm.close_connection(id);
        }
    }

    fn on_kademlia(&mut self, event: kad::Event) {
        match event {
            kad::Event::OutboundQueryProgressed { id, result: QueryResult::GetClosestPeers(result), step, .. }
                if step.last =>
            {
                let found = match result {
                    Ok(found) => found.peers,
                    Err(kad::GetClosestPeersError::Timeout { peers, .. }) => peers,
                };
                self.on_looked_up(id, &found);
            }
            kad::Event::OutboundQueryProgressed { id, result: QueryResult::GetProviders(result), step, .. } => {
                let me = *self.swarm.local_peer_id();
                self.providers.on_progress(id, result.ok(), step.last, &me);
            }
            kad::Event::InboundRequest { request: InboundRequest::AddProvider { record: Some(record) } } => {
                self.providers.store(&mut self.swarm, record, Instant::now());
            }
            kad::Event::RoutingUpdated { is_new_peer: true, .. } => self.providers.on_peer(),
            _ => {}
        }
    }

    fn on_seen_in_lan(&mut self, peer: PeerId, address: Multiaddr) {
        let address = without_peer(address);
        self.rules().found_in_lan(&address);
        self.learn(peer, address.clone());
        if self.view().peers.len() >= LAN_CONNECTIONS_MAX {
            return;
        }
        let dial = DialOpts::peer_id(peer)
            .condition(PeerCondition::DisconnectedAndNotDialing)
            .addresses(vec![address])
            .extend_addresses_through_behaviour()
            .build();
        // It is connected already, or its other addresses are being dialled.
        let _ = self.swarm.dial(dial);
    }
}
