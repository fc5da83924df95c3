//! Serves blocks to clients over streams, and passes rows on to the next peers of chains.
//!
//! A client has one stream, with all of its sessions. Each session is a task: it runs what comes, in order, passes it on, and
//! replies. Nothing that a client sends can make another one wait for longer than a step takes: memory for what waits is
//! limited per stream and in all, and a stream that is not read is closed.

mod client_stream;
mod push;
mod session;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use swarm::{ModelDigest, PeerId};
use tokio::sync::Semaphore;

use crate::block::BlockHandle;
use crate::dial::{BoxedStream, Dial};
use crate::wire::body_bytes_max;
use push::{PushLinks, PushTable};

/// What waits to be run, in all, in KiB.
const WAITING_KIB_MAX: usize = 1 << 20;
/// The same, of one stream.
const STREAM_WAITING_KIB_MAX: usize = 128 << 10;
/// Streams of all clients and peers.
const STREAMS_MAX: usize = 1024;
/// Streams of one client or peer.
const STREAMS_PER_PEER_MAX: usize = 8;

/// The blocks that this process serves. Clones are the same server.
#[derive(Clone)]
pub struct BlockServer(Arc<Server>);

struct Server {
    blocks: RwLock<HashMap<ModelDigest, BlockHandle>>,
    pushes: PushTable,
    links: PushLinks,
    streams: Mutex<HashMap<PeerId, usize>>,
    waiting: Arc<Semaphore>,
}

impl BlockServer {
    pub fn new(dial: Arc<dyn Dial>) -> Self {
        Self(Arc::new(Server {
            blocks: RwLock::default(),
            pushes: PushTable::default(),
            links: PushLinks::new(dial),
            streams: Mutex::default(),
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

    /// Serves a stream of [`BLOCK_PROTOCOL`](crate::wire::BLOCK_PROTOCOL) until it ends.
    pub async fn serve_client(&self, peer: PeerId, stream: BoxedStream) {
        let Some(_place) = StreamPlace::take(&self.0, peer) else { return };
        client_stream::serve(&self.0, peer, stream).await;
    }

    /// Serves a stream of [`PUSH_PROTOCOL`](crate::wire::PUSH_PROTOCOL) until it ends.
    pub async fn serve_pushes(&self, peer: PeerId, stream: BoxedStream) {
        let Some(_place) = StreamPlace::take(&self.0, peer) else { return };
        push::serve(&self.0, stream).await;
    }

    /// Streams of clients and peers that are open.
    pub fn streams(&self) -> usize {
        self.0.streams().values().sum()
    }

    /// Sessions to which other peers may pass rows on.
    pub fn push_keys(&self) -> usize {
        self.0.pushes.len()
    }
}

impl Server {
    fn streams(&self) -> MutexGuard<'_, HashMap<PeerId, usize>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest body of a frame, for the largest of the blocks.
    fn body_bytes_max(&self) -> usize {
        let blocks = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        let shapes = blocks.values().filter_map(BlockHandle::shape);
        let bytes = shapes.map(|shape| body_bytes_max(shape.rows_max, shape.hidden));
        bytes.max().unwrap_or_else(|| body_bytes_max(0, 0))
    }
}

/// A stream that counts against the limits.
struct StreamPlace<'a> {
    server: &'a Server,
    peer: PeerId,
}

impl<'a> StreamPlace<'a> {
    fn take(server: &'a Server, peer: PeerId) -> Option<Self> {
        let mut streams = server.streams();
        let (all, own) = (streams.values().sum::<usize>(), streams.get(&peer).copied().unwrap_or_default());
        if all >= STREAMS_MAX || own >= STREAMS_PER_PEER_MAX {
            tracing::debug!(%peer, all, own, "a stream was refused: there are too many");
            return None;
        }
        streams.insert(peer, own + 1);
        drop(streams);
        Some(Self { server, peer })
    }
}

impl Drop for StreamPlace<'_> {
    fn drop(&mut self) {
        let mut streams = self.server.streams();
        if let Some(own) = streams.get_mut(&self.peer) {
            *own -= 1;
            if *own == 0 {
                streams.remove(&self.peer);
            }
        }
    }
}
