//! `SwarmNode`: this process in the swarm: a libp2p node, the blocks that it serves, and what it knows of others.

mod announcer;
mod block_host;
mod gossip;

use std::sync::Arc;
use std::time::Duration;

use directory::{ModelDigest, PeerId};
use libp2p_node::{IncomingStreams, Multiaddr, Node, NodeError, NodeHandle, NodeOptions};
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::dial::{BoxedStream, Dial, DialError, Dialled};
use crate::protocols::{BLOCK_PROTOCOL, PUSH_PROTOCOL, RECORDS_PROTOCOL};
use crate::serve::BlockServer;
use crate::view::SwarmView;

pub use announcer::{Announcer, BlockState};
pub use block_host::{BlockHost, BlockHostOptions, BlockHostState, BlockHostWatch, BlockLoader, LoadedBlock};

/// How often a node asks others for records: at first and while it finds no chain, and when it knows some.
const FIRST_ROUND: Duration = Duration::from_millis(500);
const ROUND: Duration = Duration::from_secs(5);
/// How often it looks for peers that serve a model, beyond those that it knows.
const ROUNDS_PER_LOOKUP: u32 = 6;
/// How long a stream of an unfamiliar protocol may take.
const EXCHANGE_TIME_MAX: Duration = Duration::from_secs(10);

/// Protocols of the streams that a node accepts.
pub const PROTOCOLS: [&str; 3] = [BLOCK_PROTOCOL, PUSH_PROTOCOL, RECORDS_PROTOCOL];

/// Serves streams of another protocol.
pub type StreamHandler = Arc<dyn Fn(PeerId, BoxedStream) + Send + Sync>;

/// Clones are the same node. It ends when the last one is dropped.
#[derive(Clone)]
pub struct SwarmNode {
    handle: NodeHandle,
    view: Arc<SwarmView>,
    server: BlockServer,
}

struct NodeDial(NodeHandle);

impl Dial for NodeDial {
    fn open<'a>(&'a self, peer: PeerId, addresses: &'a [String], protocol: &'static str) -> Dialled<'a> {
        Box::pin(async move {
            // Addresses come from other peers; those that make no sense are left out.
            let addresses: Vec<Multiaddr> = addresses.iter().filter_map(|address| address.parse().ok()).collect();
            let opened = self.0.open(&peer, &addresses, protocol).await;
            opened.map(|stream| Box::new(stream) as BoxedStream).map_err(|error| DialError(error.to_string()))
        })
    }

    fn addresses(&self, peer: PeerId) -> Vec<String> {
        let connected = self.0.peers().into_iter().filter(|connected| connected.peer == peer);
        connected.map(|connected| connected.address.to_string()).collect()
    }
}

impl SwarmNode {
    /// Starts a node that accepts [`PROTOCOLS`], and those of `others`. Must be called in a tokio runtime.
    pub fn start(mut options: NodeOptions, others: Vec<(&'static str, StreamHandler)>) -> Result<Self, NodeError> {
        options.accepts = PROTOCOLS.into_iter().chain(others.iter().map(|(protocol, _)| *protocol)).collect();
        let (handle, incoming) = Node::start(options)?;
        let view = Arc::<SwarmView>::default();
        let server = BlockServer::new(Arc::new(NodeDial(handle.clone())));
        tokio::spawn(accept(incoming, server.clone(), Arc::clone(&view), others));
        Ok(Self { handle, view, server })
    }

    pub fn handle(&self) -> &NodeHandle {
        &self.handle
    }

    pub fn view(&self) -> &Arc<SwarmView> {
        &self.view
    }

    pub fn server(&self) -> &BlockServer {
        &self.server
    }

    pub fn dial(&self) -> Arc<dyn Dial> {
        Arc::new(NodeDial(self.handle.clone()))
    }

    /// Keeps what is known of a model up to date, until the returned guard is dropped. `None`: of all models.
    pub fn follow(&self, model: Option<ModelDigest>) -> Following {
        let (handle, view) = (self.handle.clone(), Arc::clone(&self.view));
        Following(tokio::spawn(async move {
            let mut gossip = gossip::Gossip::new(handle, view, model);
            for round in 0_u32.. {
                let knows = gossip.round(round.is_multiple_of(ROUNDS_PER_LOOKUP)).await;
                let rest = if knows { ROUND - FIRST_ROUND } else { Duration::ZERO };
                // Whoever finds no chain does not wait for the next round.
                let _ = timeout(rest, gossip.wanted()).await;
                sleep(FIRST_ROUND).await;
            }
        }))
    }
}

/// Ends a background task when it is dropped.
pub struct Following(tokio::task::JoinHandle<()>);

impl Drop for Following {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn accept(
    mut incoming: IncomingStreams,
    server: BlockServer,
    view: Arc<SwarmView>,
    others: Vec<(&'static str, StreamHandler)>,
) {
    while let Some(libp2p_node::IncomingStream { peer, protocol, stream }) = incoming.next().await {
        let teller = gossip::address_block(stream.ip());
        let (server, view, stream) = (server.clone(), Arc::clone(&view), Box::new(stream));
        match protocol {
            BLOCK_PROTOCOL => drop(tokio::spawn(async move { server.serve_client(peer, stream).await })),
            PUSH_PROTOCOL => drop(tokio::spawn(async move { server.serve_pushes(peer, stream).await })),
            RECORDS_PROTOCOL => drop(tokio::spawn(async move {
                match timeout(EXCHANGE_TIME_MAX, gossip::answer(stream, &view, teller)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => debug!(%peer, %error, "an exchange of records failed"),
                    Err(_) => debug!(%peer, "an exchange of records took too long"),
                }
            })),
            other => {
                if let Some((_, handler)) = others.iter().find(|(protocol, _)| *protocol == other) {
                    handler(peer, stream);
                }
            }
        }
    }
}
