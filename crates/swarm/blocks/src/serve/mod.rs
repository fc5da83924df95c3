//! Serves blocks to clients over streams, and passes rows on to the next peers of chains.
//!
//! A client has one stream, with all of its sessions. Each session is a task: it runs what comes, in order, passes it on, and
//! replies. Memory for what is read and for what waits, to be run, to be sent or to be passed on, is limited per client and in all;
//! so are streams, sessions and connections to next peers. A stream that is not read is closed.

mod account;
mod client_stream;
mod push;
mod session;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use directory::{ModelDigest, PeerId};
use tokio::io::AsyncRead;
use tokio::sync::Semaphore;
use tracing::debug;

use crate::block::BlockHandle;
use crate::dial::{BoxedStream, Dial};
use crate::wire::{FrameError, body_bytes_max, read_head};
use account::{SMALL_FRAME_BYTES, StreamPlace, StreamPlaces, WaitingPermits};
use push::{PushLinks, PushTable};

pub use account::{STREAMS_MAX, STREAMS_PER_PEER_MAX};
pub use client_stream::{RUNS_WAITING_MAX, SESSIONS_PER_STREAM_MAX};
pub use push::LINKS_PER_CLIENT_MAX;

/// What waits to be run or to be sent, in all, in KiB.
pub const WAITING_KIB_MAX: usize = 1 << 20;
/// The same, of one client or peer.
pub const WAITING_KIB_PER_PEER_MAX: usize = 128 << 10;
/// Large frames that are being read, in all, in KiB.
pub const READING_KIB_MAX: usize = 512 << 10;
/// The same, of one client or peer.
pub const READING_KIB_PER_PEER_MAX: usize = 32 << 10;

/// The blocks that this process serves. Clones are the same server.
#[derive(Clone)]
pub struct BlockServer(Arc<Server>);

struct Server {
    blocks: RwLock<HashMap<ModelDigest, BlockHandle>>,
    pushes: PushTable,
    links: PushLinks,
    places: StreamPlaces,
    waiting: Arc<Semaphore>,
    reading: Arc<Semaphore>,
}

impl BlockServer {
    pub fn new(dial: Arc<dyn Dial>) -> Self {
        Self(Arc::new(Server {
            blocks: RwLock::default(),
            pushes: PushTable::default(),
            links: PushLinks::new(dial),
            places: StreamPlaces::default(),
            waiting: Arc::new(Semaphore::new(WAITING_KIB_MAX)),
            reading: Arc::new(Semaphore::new(READING_KIB_MAX)),
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
    /// Replaces `body` with that of a peer's next frame, and returns its kind and the memory that is free when the body is not needed any
    /// more.
    async fn read_frame(
        &self,
        place: &StreamPlace,
        from: &mut (impl AsyncRead + Unpin),
        body: &mut Vec<u8>,
    ) -> Result<(u8, WaitingPermits), FrameError> {
        if body.capacity() > SMALL_FRAME_BYTES {
            *body = Vec::new();
        }
        let head = read_head(from, self.body_bytes_max()).await?;
        let reading = head.within(place.read(&self.reading, head.bytes)).await?;
        head.read_body(from, body).await?;
        Ok((head.kind, reading))
    }

    /// The longest body of a frame, for the largest of the blocks.
    fn body_bytes_max(&self) -> usize {
        let blocks = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        let shapes = blocks.values().filter_map(BlockHandle::shape);
        let bytes = shapes.map(|shape| body_bytes_max(shape.rows_max, shape.hidden));
        bytes.max().unwrap_or_else(|| body_bytes_max(0, 0))
    }
}
