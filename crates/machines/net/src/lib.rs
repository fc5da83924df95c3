//! Connections between machines that share a [`ClusterKey`]. This crate knows neither ranks nor models.
//!
//! # Authentication
//!
//! Every connection begins with a Noise handshake (NNpsk0) from the key and is encrypted from then on ([`dial`],
//! [`respond`]). The initiator's first bytes are a [`Hello`]: protocol version, purpose, ten bytes whose meaning depends on
//! the purpose, and how long either side may be silent. It is the handshake's prologue, so a connection that was made for
//! one purpose cannot be passed off as another. The initiator confirms with a first record, so a replayed handshake is not
//! accepted. A peer without the key is refused before any Diffie-Hellman. A peer that does not complete the handshake
//! within its deadline is dropped. Handshakes run in parallel ([`accept_all`]), so a slow peer does not delay others.
//!
//! A machine that has no key yet gets it by an [`invitation`].
//!
//! # Messages
//!
//! A [`MessageStream`] carries messages of a kind and a body in both directions, and heartbeats. A [`SecureListener`]
//! accepts connections of several purposes on one port. Code that needs another exchange, as collectives do, uses the
//! records of a [`SecureStream`] itself ([`RecordEncryptor`], [`RecordReader`]).
//!
//! # What a peer can do
//!
//! Lengths from the network are compared with limits and never size a buffer. An attacker without the key can delay or
//! cut connections. Every wait ends: by a deadline, by the silence of the other side, or when another thread closes the
//! connection.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]

mod accept;
mod address;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod handshake;
mod hello;
pub mod invitation;
mod key;
mod listener;
mod message;
mod message_stream;
mod noise;
mod record_reader;
mod wait_limit;

pub use accept::{HANDSHAKE_DEADLINE, HANDSHAKES_MAX, HANDSHAKES_PER_ADDRESS_MAX, accept_all};
pub use address::{InvalidPeerAddress, PeerAddress};
pub use handshake::{HandshakeError, SILENCE_MAX, SILENCE_MIN, SecureStream, dial, other_version, respond};
pub use hello::{Hello, PARAMETER_BYTES, Purpose, RejectReason, VERSION};
pub use key::{ClusterKey, PASSPHRASE_BYTES_MIN, WeakPassphrase, check_passphrase};
pub use listener::{AcceptedStream, ConnectionSlot, PurposeLimit, SecureListener};
pub use message::{BODY_BYTES_MAX, MessageError};
pub use message_stream::{LastHeard, MessageReceiver, MessageSender, MessageStream};
pub use noise::{Forged, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, RecordDecryptor, RecordEncryptor};
pub use record_reader::RecordReader;
pub use wait_limit::{POLL_TICK, TICK, WaitLimit, is_transient};
