//! A libp2p node: an identity, connections and streams to peers, ways to find them, and ways through NAT. It knows nothing
//! of models: what streams carry is up to those who open and accept them.
//!
//! Bytes from a peer cost at most its own connection, and what peers can make a node hold is limited: see [`limits`].
#![forbid(unsafe_code)]

mod behaviour;
mod candidates;
mod connection_limits;
mod dial_rules;
mod error;
mod handle;
mod handshakes;
mod identity;
pub mod limits;
mod network_key;
mod node;
mod options;
mod peer_id;
mod streams;
mod transport;
mod view;

pub use error::{FindError, IdentityError, NetworkKeyError, NodeError, OpenError};
pub use handle::{Node, NodeHandle};
pub use identity::{Identity, InlinedKeys};
pub use libp2p_core::Multiaddr;
pub use network_key::NetworkKey;
pub use options::NodeOptions;
pub use peer_id::{parse_peer, peer_text};
pub use streams::{IncomingStream, IncomingStreams, PeerStream};
pub use view::{ConnectedPeer, PeerChange, Reachability, Scope, scope};
