//! Serves blocks to clients over streams, and passes rows on to the next peers of chains.
//!
//! A client has one stream, with all of its sessions. Each session is a task: it runs what comes, in order, passes it on, and
//! replies. Memory for what waits, to be run or to be sent, is limited per client and in all; so are streams, sessions and
//! connections to next peers. A stream that is not read is closed.

mod account;
mod client_stream;
mod push;
mod session;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use swarm::{ModelDigest, PeerId};
use tokio::sync::Semaphore;
use tracing::debug;

use crate::block::BlockHandle;
use crate::dial::{BoxedStream, Dial};
use crate::wire::body_bytes_max;
use account::StreamPlaces;
use push::{PushLinks, PushTable};

pub use account::{STREAMS_MAX, STREAMS_PER_PEER_MAX};
pub use client_stream::{RUNS_WAITING_MAX, SESSIONS_PER_STREAM_MAX};
pub use push::LINKS_PER_CLIENT_MAX;

/// What waits to be run or to be sent, in all, in KiB.
pub const WAITING_KIB_MAX: usize = 1 << 20;
/// The same, of one client or peer.
pub const WAITING_KIB_PER_PEER_MAX: usize = 128 << 10;

/// The blocks that this process serves. Clones are the same server.
#[derive(Clone)]
pub struct BlockServer(Arc<Server>);

struct Server {
    blocks: RwLock<HashMap<ModelDigest, BlockHandle>>,
    pushes: PushTable,
    links: PushLinks,
    places: StreamPlaces,
    waiting: Arc<Semaphore>,
}

impl BlockServer {
    pub fn new(dial: Arc<dyn Dial>) -> Self {
        Self(Arc::new(Server {
            blocks: RwLock::default(),
            pushes: PushTable::default(),
            links: PushLinks::new(dial),
            places: StreamPlaces::default(),
            waiting: Arc::new(Semaphore::new(WAITING_KIB_MAX)),
        }))
    }

    /// From now on new sessions for the model are opened in this block. Open ones go on in theirs.
    pub fn set_block(&self, model: ModelDigest, block: BlockHandle) {
        self.0.blocks.write().unwrap_or_else(PoisonError::into_inner).insert(model, block);
    }

    pub fn block(&self, model: &ModelDigest) -> Option<BlockHandle> {
        self.0.blocks.read().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// Serves a stream of [`BLOCK_PROTOCOL`](crate::protocols::BLOCK_PROTOCOL) until it ends.
    pub async fn serve_client(&self, peer: PeerId, stream: BoxedStream) {
        match self.0.places.take(peer) {
            Some(place) => client_stream::serve(&self.0, &place, stream).await,
            None => debug!(%peer, "a stream was refused: there are too many"),
        }
    }

    /// Serves a stream of [`PUSH_PROTOCOL`](crate::protocols::PUSH_PROTOCOL) until it ends.
    pub async fn serve_pushes(&self, peer: PeerId, stream: BoxedStream) {
        match self.0.places.take(peer) {
            Some(place) => push::serve(&self.0, &place, stream).await,
            None => debug!(%peer, "a stream was refused: there are too many"),
        }
    }

    /// Streams of clients and peers that are open.
    pub fn streams(&self) -> usize {
        self.0.places.streams()
    }

    /// Sessions to which other peers may pass rows on.
    pub fn push_keys(&self) -> usize {
        self.0.pushes.len()
    }

    /// Memory for what waits to be run or to be sent, in KiB.
    pub fn waiting_kib(&self) -> usize {
        WAITING_KIB_MAX - self.0.waiting.available_permits()
    }

    /// Connections to next peers of chains, also those that are being made.
    pub fn links(&self) -> usize {
        self.0.links.len()
    }
}

impl Server {
    /// The longest body of a frame, for the largest of the blocks.
    fn body_bytes_max(&self) -> usize {
        let blocks = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        let shapes = blocks.values().filter_map(BlockHandle::shape);
        let bytes = shapes.map(|shape| body_bytes_max(shape.rows_max, shape.hidden));
        bytes.max().unwrap_or_else(|| body_bytes_max(0, 0))
    }
}
