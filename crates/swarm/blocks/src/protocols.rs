//! The names of the protocols that peers speak on libp2p's streams, beside KwaaiNet's.

/// A client's stream to a peer: [`crate::wire`].
pub const BLOCK_PROTOCOL: &str = "/consort/block/1";
/// Streams on which peers pass rows on: [`crate::wire`].
pub const PUSH_PROTOCOL: &str = "/consort/push/1";
/// Exchanges of records: [`crate::node`].
pub const RECORDS_PROTOCOL: &str = "/consort/records/1";
