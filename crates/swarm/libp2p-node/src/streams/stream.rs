//! `PeerStream`: a stream of bytes to a peer, for tokio.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt};

/// What is written is sent at the latest when it is flushed. Dropping it ends the stream at both ends.
pub struct PeerStream {
    stream: Compat<libp2p_swarm::Stream>,
    path: Path,
    /// Its place among the streams that peers may have open.
    _places: Option<[OwnedSemaphorePermit; 2]>,
}

/// How a connection reaches its peer.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    pub is_relayed: bool,
    pub ip: Option<IpAddr>,
}

/// A stream that a peer opened.
#[derive(Debug)]
pub struct IncomingStream {
    pub peer: directory::PeerId,
    pub protocol: &'static str,
    pub stream: PeerStream,
}

/// The streams that peers open. Dropping it refuses them.
#[derive(Debug)]
pub struct IncomingStreams {
    pub(crate) queue: mpsc::Receiver<IncomingStream>,
}

impl IncomingStreams {
    /// None if the node has ended.
    pub async fn next(&mut self) -> Option<IncomingStream> {
        self.queue.recv().await
    }
}

impl PeerStream {
    pub(super) fn new(stream: libp2p_swarm::Stream, path: Path, places: Option<[OwnedSemaphorePermit; 2]>) -> Self {
        Self { stream: stream.compat(), path, _places: places }
    }

    /// Whether a relay carries it.
    pub fn is_relayed(&self) -> bool {
        self.path.is_relayed
    }

    /// Where the connection leads to: the IP address of the peer, or of the relay between.
    pub fn ip(&self) -> Option<IpAddr> {
        self.path.ip
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, buffer: &mut ReadBuf) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl fmt::Debug for PeerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerStream").field("is_relayed", &self.path.is_relayed).finish_non_exhaustive()
    }
}
