//! Opens streams over the best connection to a peer, and passes on those that peers open.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};

use libp2p_core::transport::PortUse;
use libp2p_core::{Endpoint, Multiaddr};
use libp2p_identity::PeerId;
use libp2p_swarm::behaviour::{ConnectionClosed, ConnectionEstablished};
use libp2p_swarm::{
    ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, NotifyHandler, StreamProtocol, ToSwarm,
};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::handler::{Accepted, Handler};
use super::stream::{IncomingStream, IncomingStreams, Path, PeerStream};
use crate::error::OpenError;
use crate::limits::{INCOMING_QUEUE_MAX, INCOMING_STREAMS_MAX};
use crate::peer_id;
use crate::view::{ip, is_relayed};

pub struct Behaviour {
    names: Vec<&'static str>,
    accepts: Arc<[StreamProtocol]>,
    places: Arc<Semaphore>,
    incoming: mpsc::Sender<IncomingStream>,
    /// In the order in which they were made.
    connections: HashMap<PeerId, Vec<Connection>>,
    events: VecDeque<ToSwarm<(), Opening>>,
}

#[derive(Clone, Copy)]
struct Connection {
    id: ConnectionId,
    is_relayed: bool,
}

/// A stream that is to be opened. Whoever drops it reports that the connection was lost.
#[derive(Debug)]
pub struct Opening {
    pub peer: PeerId,
    pub protocol: &'static str,
    reply: oneshot::Sender<Result<PeerStream, OpenError>>,
}

impl Opening {
    pub fn new(peer: PeerId, protocol: &'static str) -> (Self, oneshot::Receiver<Result<PeerStream, OpenError>>) {
        let (reply, outcome) = oneshot::channel();
        (Self { peer, protocol, reply }, outcome)
    }

    pub fn is_cancelled(&self) -> bool {
        self.reply.is_closed()
    }

    pub fn peer_text(&self) -> String {
        self.peer.to_base58()
    }

    pub fn succeed(self, stream: PeerStream) {
        // Nobody may wait for it any more.
        let _ = self.reply.send(Ok(stream));
    }

    pub fn fail(self, error: OpenError) {
        let _ = self.reply.send(Err(error));
    }
}

impl Behaviour {
    pub fn new(accepts: &[&'static str]) -> (Self, IncomingStreams) {
        let (incoming, queue) = mpsc::channel(INCOMING_QUEUE_MAX);
        let behaviour = Self {
            names: accepts.to_vec(),
            accepts: accepts.iter().copied().map(StreamProtocol::new).collect(),
            places: Arc::new(Semaphore::new(INCOMING_STREAMS_MAX)),
            incoming,
            connections: HashMap::new(),
            events: VecDeque::new(),
        };
        (behaviour, IncomingStreams { queue })
    }

    /// Opens a stream over the newest direct connection, or else over the oldest relayed one: later ones are attempts to get
    /// a direct one. Gives `opening` back if there is no
    /// connection.
    pub fn open(&mut self, opening: Opening) -> Result<(), Opening> {
        let connections = self.connections.get(&opening.peer).map_or(&[][..], Vec::as_slice);
        let direct = connections.iter().rev().find(|connection| !connection.is_relayed);
        let Some(connection) = direct.or(connections.first()) else { return Err(opening) };
        let handler = NotifyHandler::One(connection.id);
        self.events.push_back(ToSwarm::NotifyHandler { peer_id: opening.peer, handler, event: opening });
        Ok(())
    }

    fn handler(&self, path: Path) -> Handler {
        Handler::new(path, Arc::clone(&self.accepts), Arc::clone(&self.places))
    }
}

impl NetworkBehaviour for Behaviour {
    type ConnectionHandler = Handler;
    type ToSwarm = ();

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        local: &Multiaddr,
        remote: &Multiaddr,
    ) -> Result<Handler, ConnectionDenied> {
        // The relay's address is part of the local one.
        let is_relayed = is_relayed(local);
        Ok(self.handler(Path { is_relayed, ip: ip(if is_relayed { local } else { remote }) }))
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        remote: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<Handler, ConnectionDenied> {
        Ok(self.handler(Path { is_relayed: is_relayed(remote), ip: ip(remote) }))
    }

    fn on_swarm_event(&mut self, event: FromSwarm) {
        match event {
            FromSwarm::ConnectionEstablished(ConnectionEstablished { peer_id, connection_id, endpoint, .. }) => {
                let connection = Connection { id: connection_id, is_relayed: endpoint.is_relayed() };
                self.connections.entry(peer_id).or_default().push(connection);
            }
            FromSwarm::ConnectionClosed(ConnectionClosed { peer_id, connection_id, .. }) => {
                if let Some(connections) = self.connections.get_mut(&peer_id) {
                    connections.retain(|connection| connection.id != connection_id);
                    if connections.is_empty() {
                        self.connections.remove(&peer_id);
                    }
                }
            }
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, peer: PeerId, _: ConnectionId, accepted: Accepted) {
        let Accepted { protocol, stream } = accepted;
        let Some(protocol) = self.names.iter().copied().find(|name| *name == protocol.as_ref()) else { return };
        let stream = IncomingStream { peer: peer_id::from_libp2p(&peer), protocol, stream };
        if self.incoming.try_send(stream).is_err() {
            tracing::debug!(%peer, protocol, "a stream is refused: too many wait, or nobody takes them");
        }
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<(), Opening>> {
        self.events.pop_front().map_or(Poll::Pending, Poll::Ready)
    }
}
