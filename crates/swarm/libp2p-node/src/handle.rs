//! `NodeHandle`: how the rest of the program uses a node, from any task. The node itself is one task, which ends when the
//! last handle is dropped.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use libp2p_core::Multiaddr;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::timeout;

use crate::error::{FindError, NodeError, OpenError};
use crate::limits::{KEY_BYTES_MAX, OPEN_TIME_MAX};
use crate::node::{self, Command};
use crate::options::NodeOptions;
use crate::peer_id::{self, peer_text};
use crate::streams::{IncomingStreams, Opening, PeerStream};
use crate::view::{ConnectedPeer, PeerChange, Reachability, View};

/// Starts nodes.
pub struct Node;

impl Node {
    /// Listens, dials the bootstrap peers, and returns. Must be called in a tokio runtime.
    pub fn start(options: NodeOptions) -> Result<(NodeHandle, IncomingStreams), NodeError> {
        node::start(options)
    }
}

#[derive(Clone)]
pub struct NodeHandle {
    pub(crate) peer: directory::PeerId,
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) view: Arc<Mutex<View>>,
    pub(crate) changes: broadcast::WeakSender<PeerChange>,
}

impl NodeHandle {
    pub fn peer(&self) -> directory::PeerId {
        self.peer
    }

    /// Opens a stream to a peer. If there is no connection, the peer is dialled at these addresses and those known from
    /// elsewhere, then at those that a look-up finds, then through relays.
    pub async fn open(
        &self,
        peer: &directory::PeerId,
        addresses: &[Multiaddr],
        protocol: &'static str,
    ) -> Result<PeerStream, OpenError> {
        let opened = timeout(OPEN_TIME_MAX, async {
            match self.open_once(peer, addresses, protocol).await {
                // The connection was at its end: another one may be made.
                Err(OpenError::Lost { .. }) => self.open_once(peer, addresses, protocol).await,
                outcome => outcome,
            }
        });
        let waited = OPEN_TIME_MAX;
        opened.await.unwrap_or_else(|_| Err(OpenError::Timeout { peer: peer_text(peer), waited }))
    }

    async fn open_once(
        &self,
        peer: &directory::PeerId,
        addresses: &[Multiaddr],
        protocol: &'static str,
    ) -> Result<PeerStream, OpenError> {
        if *peer == self.peer {
            return Err(OpenError::Itself);
        }
        let id = peer_id::to_libp2p(peer).ok_or(OpenError::PeerId)?;
        let (opening, outcome) = Opening::new(id, protocol);
        let command = Command::Open { opening, addresses: addresses.to_vec() };
        self.commands.send(command).await.map_err(|_| OpenError::Ended)?;
        match outcome.await {
            Ok(outcome) => outcome,
            Err(_) if self.commands.is_closed() => Err(OpenError::Ended),
            Err(_) => Err(OpenError::Lost { peer: peer_text(peer), reason: "it ended".to_owned() }),
        }
    }

    /// Remembers where a peer can be dialled.
    pub async fn add_address(&self, peer: &directory::PeerId, address: Multiaddr) {
        if let Some(peer) = peer_id::to_libp2p(peer) {
            self.tell(Command::AddAddress { peer, address }).await;
        }
    }

    /// Announces this node as a provider of `key` until [`stop_providing`](Self::stop_providing).
    pub async fn provide(&self, key: &[u8]) -> Result<(), FindError> {
        let key = checked(key)?;
        self.ask(|reply| Command::Provide { key, reply }).await?
    }

    pub async fn stop_providing(&self, key: &[u8]) {
        if let Ok(key) = checked(key) {
            self.tell(Command::StopProviding { key }).await;
        }
    }

    /// The other peers that provide `key`, as far as a look-up finds them.
    pub async fn providers(&self, key: &[u8]) -> Result<Vec<directory::PeerId>, FindError> {
        let key = checked(key)?;
        self.ask(|reply| Command::Providers { key, reply }).await?
    }

    /// Closes all connections to a peer.
    pub async fn disconnect(&self, peer: &directory::PeerId) {
        if let Some(peer) = peer_id::to_libp2p(peer) {
            self.tell(Command::Disconnect { peer }).await;
        }
    }

    /// Where others can dial this node, without its id. The first ones are the best.
    pub fn addresses(&self) -> Vec<Multiaddr> {
        self.view().addresses()
    }

    pub fn reachability(&self) -> Reachability {
        self.view().reachability()
    }

    pub fn peers(&self) -> Vec<ConnectedPeer> {
        self.view().connected()
    }

    /// Why no bootstrap peer was reached, until a connection is made.
    pub fn bootstrap_failure(&self) -> Option<String> {
        self.view().bootstrap_failure.clone()
    }

    /// The round trip to a connected peer that was measured last.
    pub fn round_trip(&self, peer: &directory::PeerId) -> Option<Duration> {
        let peer = peer_id::to_libp2p(peer)?;
        self.view().peers.get(&peer)?.best()?.round_trip
    }

    /// Connects and disconnects from now on. It is closed when the node has ended.
    pub fn changes(&self) -> broadcast::Receiver<PeerChange> {
        match self.changes.upgrade() {
            Some(changes) => changes.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    async fn tell(&self, command: Command) {
        // A node that has ended has nothing to do.
        let _ = self.commands.send(command).await;
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, FindError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| FindError::Ended)?;
        answer.await.map_err(|_| FindError::Ended)
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeHandle({})", peer_text(&self.peer))
    }
}

fn checked(key: &[u8]) -> Result<Vec<u8>, FindError> {
    match key.len() {
        1..=KEY_BYTES_MAX => Ok(key.to_vec()),
        _ => Err(FindError::Key),
    }
}
