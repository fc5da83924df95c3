//! `Dial`: how streams to other peers are opened. The network of the swarm provides it; tests connect peers in one process.

use std::pin::Pin;

use swarm::PeerId;
use tokio::io::{AsyncRead, AsyncWrite};

/// A stream of bytes to a peer whose identity the network has proved.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

pub type BoxedStream = Box<dyn ByteStream>;

#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DialError(pub String);

pub type Dialled<'a> = Pin<Box<dyn Future<Output = Result<BoxedStream, DialError>> + Send + 'a>>;

pub trait Dial: Send + Sync + 'static {
    /// Opens a stream to a peer that may be reached at these multiaddresses. Ends with an error within a limited time.
    fn open<'a>(&'a self, peer: PeerId, addresses: &'a [String], protocol: &'static str) -> Dialled<'a>;

    /// Multiaddresses of a peer, as text, for other peers.
    fn addresses(&self, peer: PeerId) -> Vec<String>;
}
