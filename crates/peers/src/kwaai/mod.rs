//! KwaaiNet's block protocol in both roles. Nothing else of this crate knows it.
//!
//! [`KwaaiServer`] serves a block to KwaaiNet's coordinators. [`KwaaiSpan`] uses a block server of KwaaiNet as a span of a chain.
//! [`DhtClient`] announces blocks in hivemind's DHT and finds those of others.
//!
//! KwaaiNet computes in f16, so a chain with one of its servers gives other logits than one without. Its sessions have no
//! message to open, to truncate or to close them. A replay needs a fresh session id.

mod calls;
mod frames;
mod local;
mod server;
mod sessions;
mod span;

pub use calls::CallLimits;
pub use frames::KwaaiStreamError;
pub use local::serve_local;
pub use server::{EmbedAndHead, KwaaiLimits, KwaaiServer};
pub use sessions::SessionLimits;
pub use span::{
    KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, OpenStream, OpeningStream, SpanError,
    Stream,
};
