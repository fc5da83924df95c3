//! What can go wrong, one enum per kind of operation.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use libp2p_core::Multiaddr;

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("identity file {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("identity file {} can be read by others (mode {mode:03o}): it must be 600", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("identity file {} is in a folder that others can write to (mode {mode:03o})", path.display())]
    FolderMode { path: PathBuf, mode: u32 },
    #[error("identity file {} holds no Ed25519 key", path.display())]
    Content { path: PathBuf },
}

#[derive(Debug, thiserror::Error)]
pub enum NetworkKeyError {
    #[error("read the network key from {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("a network key is 64 hexadecimal digits")]
    Text,
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("bootstrap address {address} does not end in /p2p/ID")]
    Bootstrap { address: Multiaddr },
    #[error("{address} is a QUIC address, and a private network has only TCP")]
    PrivateQuic { address: Multiaddr },
    #[error("{address} is at a relay: make the relay a bootstrap peer, and the node listens there when it must")]
    Circuit { address: Multiaddr },
    #[error("protocol {protocol:?} does not begin with a slash, or is accepted twice")]
    Protocol { protocol: &'static str },
    #[error("listen on {address}: {reason}")]
    Listen { address: Multiaddr, reason: String },
    #[error("prepare encryption: {reason}")]
    Encryption { reason: String },
    #[error("find peers on the LAN")]
    Lan(#[source] io::Error),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error("peer {peer} can not be reached: {reason}")]
    Unreachable { peer: String, reason: String },
    #[error("peer {peer} does not speak {protocol}")]
    Protocol { peer: String, protocol: &'static str },
    #[error("the connection to peer {peer} was lost: {reason}")]
    Lost { peer: String, reason: String },
    #[error("peer {peer} was not reached in {waited:?}")]
    Timeout { peer: String, waited: Duration },
    #[error("the peer's id is not one of libp2p")]
    PeerId,
    #[error("the peer is this node itself")]
    Itself,
    #[error("{WAITING_OPENS_MAX} streams wait for a connection already", WAITING_OPENS_MAX = crate::limits::WAITING_OPENS_MAX)]
    Busy,
    #[error("the node has ended")]
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FindError {
    #[error("a key has 1 to {KEY_BYTES_MAX} bytes", KEY_BYTES_MAX = crate::limits::KEY_BYTES_MAX)]
    Key,
    #[error("too many keys are provided, or too many look-ups run")]
    Busy,
    #[error("the node has ended")]
    Ended,
}
