//! Uses blocks of peers: [`SwarmExecutor`] runs a model whose layers are served by the swarm.
//!
//! The client keeps the embedding and the head; peers see activations only. Each session has a chain of its own. Peers pass the
//! activations on to each other, and return copies of them to the client. With these, a span whose peer is lost is replaced: the
//! engine notices nothing but the time that it takes.

mod avoided;
mod check;
mod context;
mod executor;
mod foreign;
mod forming;
mod job;
mod link;
mod replay_budget;
mod session;
mod session_state;
mod times;

pub use context::{ClientCounters, ClientOptions, REPLAY_BYTES_MAX, SpanReport};
pub use executor::{SwarmClient, SwarmExecutor};
pub use foreign::{ForeignLoss, ForeignPeer, ForeignPeers, ForeignTask};
pub use forming::FORM_TIME_MAX;
pub use link::SILENCE_MAX;
pub use times::{ClientTimes, PeerTimes, StepTimes};
