//! The swarm: peers that nobody has to trust serve blocks of layers. What a peer announces, what a client knows of all
//! peers, which chain of peers it takes, and which block a peer should serve: pure functions of values. Time and
//! randomness are passed in; nothing here opens a socket.
#![forbid(unsafe_code)]

mod balance;
mod coordinate;
mod coverage;
mod directory;
mod identity;
mod record;
mod reputation;
mod route;
mod source;
#[cfg(test)]
mod tests;

pub use balance::{DWELL_MS, GAIN_MIN, MoveDecision, PeerCapacity, ServedBlock, choose_block, consider_move};
pub use coordinate::{COORDINATE_SECONDS_MAX, Coordinate};
pub use coverage::{Coverage, TRUSTED_SPEED_FACTOR};
pub use directory::{BLOCKS_PER_PEER_MAX, CROWD, Directory, DirectoryError, RECORDS_MAX};
pub use identity::{ModelDigest, PEER_ID_BYTES_MAX, PeerId, UnixTime};
pub use record::{
    BlockRecord, BlockUse, CLOCK_SKEW_MS, LAYERS_MAX, LIFETIME_MS_MAX, NEIGHBOURS_MAX, Neighbour, RECORD_BYTES_MAX,
    Reach, RecordError, SIGNATURE_BYTES_MAX, ServiceState, SignedRecord, Signer, Speed, VerifiedRecord, Verifier,
};
pub use reputation::{EXCLUDED_AT, HALF_LIFE_MS, JUDGED_PEERS_MAX, Offence, Reputation};
pub use route::{
    CANDIDATES_PER_LAYER, ChainSpan, ClientView, DEFAULT_ROUND_TRIP_SECONDS, EXITS_PER_LAYER, PeerChain, RELAY_SECONDS,
    RouteError, RouteLimits, RoutePlanner, RouteRequest,
};
pub use source::AddressBlock;
