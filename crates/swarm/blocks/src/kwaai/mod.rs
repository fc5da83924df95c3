//! KwaaiNet's block protocol in both roles. Nothing else of this crate knows it.
//!
//! [`KwaaiServer`] serves a block to KwaaiNet's coordinators. [`KwaaiSpan`] uses a block server of KwaaiNet as a span of a chain.
//! [`DhtClient`] announces blocks in hivemind's DHT and finds those of others, which [`KwaaiFinder`] has a client use.
//!
//! KwaaiNet computes in f16, so a chain with one of its servers gives other logits than one without. Its sessions have no
//! message to open, to truncate or to close them. A replay needs a fresh session id.

pub use kwaai::INFERENCE_PROTOCOL;
pub use kwaai::dht::KwaaiServerState;
use rustix::rand::{GetRandomFlags, getrandom};

mod calls;
mod dht_client;
mod finder;
mod foreign;
mod frames;
mod local;
mod multistream;
mod registry;
mod server;
mod sessions;
mod span;

pub use calls::CallLimits;
pub use dht_client::{DhtClient, FoundServer, KwaaiAnnouncement};
pub use finder::{FinderReport, KwaaiFinder, KwaaiModel, insert_record};
pub use foreign::KwaaiPeer;
pub use frames::KwaaiStreamError;
pub use local::serve_local;
pub use registry::RegistryError;
pub use server::{EmbedAndHead, KwaaiLimits, KwaaiServer};
pub use span::{KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, SpanError};

/// Bytes that nobody can guess.
fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // So few are never cut short, and the system's generator is ready long before this program runs.
    let filled = getrandom(&mut bytes, GetRandomFlags::empty());
    assert_eq!(filled.ok(), Some(N), "the system has random numbers");
    bytes
}
