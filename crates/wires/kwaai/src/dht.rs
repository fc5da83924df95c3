//! Discovery: the DHT of hivemind, in which peers announce their blocks. Its messages travel in the envelope of a call, each
//! on a stream of the protocol of its RPC.
//!
//! Times are seconds since 1970. Nothing here is authenticated: whoever can reach a DHT node can write any record.

mod message;
mod record;
mod routing;
#[cfg(test)]
mod tests;

pub use message::{
    DHT_KEYS_MAX, DhtFindRequest, DhtFindResponse, DhtFindResult, DhtFound, DhtRecord, DhtSender, DhtStoreRequest,
    DhtStoreResponse, DhtSubkey,
};
pub use record::{
    DhtDictionary, DhtEntry, KwaaiModelInfo, KwaaiServerInfo, KwaaiServerState, SERVER_VERSION_MIN, block_key,
    model_prefix,
};
pub use routing::{KADEMLIA_PROTOCOL, ROUTING_ADDRESSES_MAX, ROUTING_BYTES_MAX, routing_addresses, routing_request};

use std::time::Duration;

use sha1::{Digest, Sha1};

use crate::KwaaiWireError;
use crate::msgpack::put_text;

/// Protocols of the RPCs. They begin without a slash, which stock libp2p does not accept.
pub const STORE_PROTOCOL: &str = "DHTProtocol.rpc_store";
pub const FIND_PROTOCOL: &str = "DHTProtocol.rpc_find";

/// The key under which models are listed.
pub const MODELS_KEY: &str = "_petals.models";
/// The key under which peers are listed that serve any blocks.
pub const NODES_KEY: &str = "_kwaai.inference.nodes";

/// How long a record lives.
pub const RECORD_LIFETIME: Duration = Duration::from_secs(360);
/// How often a record is written again; KwaaiNet varies it by 30 seconds either way.
pub const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(300);

pub const DHT_ID_BYTES: usize = 20;

/// A key of a record, or the id of a node: places in one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DhtId(pub [u8; DHT_ID_BYTES]);

impl DhtId {
    pub fn of_key(key: &str) -> Self {
        let mut packed = Vec::with_capacity(key.len() + 5);
        put_text(&mut packed, key);
        Self(Sha1::digest(&packed).into())
    }

    /// The node of a peer, by the bytes of its id.
    pub fn of_peer(peer: &[u8]) -> Self {
        Self(Sha1::digest(peer).into())
    }

    fn read(bytes: &[u8], what: &'static str) -> Result<Self, KwaaiWireError> {
        let length = KwaaiWireError::Length { what, found: bytes.len(), expected: DHT_ID_BYTES };
        bytes.try_into().map(Self).map_err(|_| length)
    }
}

/// Whether a record that expires at `expires_at` takes the place of the one that a node has. To withdraw a record before it
/// expires, write another one that expires later.
pub fn is_fresher(expires_at: f64, current: Option<f64>, now: f64) -> bool {
    expires_at.is_finite() && expires_at > now && current.is_none_or(|current| expires_at > current)
}
