//! Streams between peers, by the name of their protocol. libp2p-stream is not used: it picks a connection at random, where
//! a direct one is better than a relayed one, drops streams that arrive at once, and never forgets a connection.

mod behaviour;
mod handler;
mod stream;

pub use behaviour::{Behaviour, Opening};
pub use stream::{IncomingStream, IncomingStreams, PeerStream};
