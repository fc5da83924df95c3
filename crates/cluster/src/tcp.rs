//! Ranks on several hosts: collectives over a comm of TCP connections, and the line protocol of a rank elsewhere.
//!
//! Each rank connects to all ranks below it and is called by all above: [`TcpComm::connect`]. The comm runs the collectives
//! of a [`Communicator`](crate::Communicator), with the sums of shared memory bit for bit. A [`Link`]
//! carries the lines between a supervisor and a rank that [`serve_ranks`] started for it.
//!
//! # Who may speak
//!
//! Every connection begins with a Noise handshake (NNpsk0) from a [`ClusterKey`] and is encrypted from then on. The
//! caller's first bytes, a hello with the protocol's version, the purpose, the world, both ranks and the epoch, are
//! the handshake's prologue: a connection that was made for anything else cannot be passed off as this one. The caller
//! confirms with a first record, so a recorded call, played again, takes nobody's place. Who does not get this far within
//! its deadline is dropped, and takes none of the time of those who do.
//!
//! # Why nothing waits for ever
//!
//! A rank is within an exchange in one thread, with sockets that never block: it sends and receives on all of them as
//! they are ready, so full buffers on all sides cannot lock each other. It sleeps for a [`TICK`] at most and then looks
//! at the abort and at the clock. A rank that leaves the group, for whatever reason, says why to all others and closes
//! its connections; one that cannot say anything any more is known by its closed connection, by the kernel, which hears nothing from
//! its host for [`TcpCommOptions::silence_deadline`], or because nothing has come from it for [`TcpCommOptions::stall_deadline`].
//!
//! A host says over each [`Link`], a few times a second, that it is there and whether the rank is stopped. A supervisor that hears
//! nothing for as long as it said when it connected takes the host for lost.
//!
//! # What a peer can do
//!
//! How many bytes are due is known to the receiver beforehand; lengths from the wire are compared with it and size no
//! buffer. Without the key one can delay or cut connections; with it, one can also cause wrong numbers.
#![cfg(target_os = "linux")]

mod abort;
mod comm;
mod connect;
mod door;
mod encoding;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handshake;
mod hello;
mod key;
mod link;
mod message;
mod noise;
mod serve;
mod watch;
mod wire;

pub use abort::TcpAbort;
pub use comm::{TcpComm, TcpCommOptions};
pub use connect::{ConnectError, TcpGroup};
pub use door::{HANDSHAKE_DEADLINE, HANDSHAKES_MAX};
pub use encoding::Encoding;
pub use handshake::{HandshakeError, SILENCE_MAX, SILENCE_MIN};
pub use hello::Refusal;
pub use key::{ClusterKey, PASSPHRASE_BYTES_MIN, WeakPassphrase};
pub use link::{Link, LinkEnd, LinkReader, LinkWriter};
pub use serve::{RANKS_MAX, RankProcess, serve_ranks};
pub use watch::TICK;
