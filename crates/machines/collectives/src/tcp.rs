//! Ranks on several hosts: collectives over TCP connections, and the line protocol of a rank on another host.
//!
//! Each rank connects to all ranks with a lower index and accepts connections from all with a higher one
//! ([`TcpComm::connect`]). The [`TcpComm`] runs the collectives of a [`Communicator`](crate::Communicator); its sums
//! are bit for bit those of shared memory. A [`RankStream`] carries the lines between a supervisor and a rank that
//! [`serve_ranks`] started for it. Authentication and encryption are [`net`]'s.
//!
//! # Why nothing waits for ever
//!
//! A collective runs in one thread, on non-blocking sockets: it sends and receives on all connections as they become
//! ready, so full buffers on all sides cannot deadlock. It sleeps for at most a [tick](net::TICK) and then checks the abort and
//! the clock. A rank that leaves the group sends a goodbye with the cause to all others and closes its connections. A
//! rank that cannot send one is detected by its closed connection, by TCP keepalive (nothing from its host for
//! [`TcpCommOptions::silence_deadline`]), or because no bytes have come from it for [`TcpCommOptions::stall_deadline`].
//! A host reports over each [`RankStream`] a few times a second whether the rank process is stopped. A supervisor that
//! receives nothing for the silence deadline, which its hello contains, takes the host for lost, and a host that receives
//! nothing from a supervisor ends its rank.
//!
//! # What a peer can do
//!
//! The receiver knows beforehand how many bytes are due. Lengths from the network are compared with that and never size
//! a buffer. An attacker without the key can delay or cut connections; with the key, it can also cause wrong numbers.
#![cfg(target_os = "linux")]

mod abort;
mod comm;
mod connect;
mod connection;
mod encoding;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod message;
mod rank_hello;

pub use abort::TcpAbort;
pub use comm::{TcpComm, TcpCommOptions};
pub use connect::{ConnectError, TcpGroup};
pub use encoding::Encoding;
pub use rank_hello::{RankHello, RankPurpose};
