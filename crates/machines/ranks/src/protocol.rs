//! The line protocol between a supervisor and its ranks: types and their encoding, without I/O of its own.
//!
//! A message is one JSON object on one line, named by its `op`; each request gets exactly one reply. Activations follow the
//! line as bytes. The ops of the neuron protocol are kept unchanged, so that a foreign leader can drive consort's ranks. Consort's own ops carry an
//! `id` that the reply echoes, so that a late reply is recognised and dropped.
//!
//! All input is bounded: a line by [`LINE_BYTES_MAX`], its contents by [`limits`]. A line is parsed directly into its
//! message, and long lists end at their limit, so a line costs at most a small multiple of its length in memory.

mod attached;
mod bounded;
mod error;
pub mod join;
pub mod limits;
mod lines;
mod message;
mod number;
pub mod output;
mod packed;
pub mod plan;
pub mod session;
pub mod shard;

pub use attached::{ATTACHED_BYTES_MAX, Attached};
pub use bounded::BoundedVec;
pub use error::{ErrorKind, MESSAGE_BYTES_MAX, clean};
pub use lines::{LINE_BYTES_MAX, Lines, OP_BYTES_MAX, ReadError, WriteError, Writer, decode, decode_reusing, encode};
pub use message::{LineMessage, RankReply, RankRequest};
pub use number::Number;
pub use packed::Packed;

/// Increased with every change that an older build would misread.
pub const VERSION: u32 = 7;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloMismatch {
    #[error("the other side speaks protocol version {theirs}, this build speaks {VERSION}")]
    Version { theirs: u32 },
    #[error("the other side is build {theirs}, this one is {ours}")]
    Build { ours: String, theirs: String },
}

/// Checks that the other side of a `hello` or `hello_ok` is the same build. Ranks of one group must agree in every bit
/// of their arithmetic, so the version alone is not enough.
pub fn check_hello(ours: &str, protocol: u32, build: &str) -> Result<(), HelloMismatch> {
    if protocol != VERSION {
        return Err(HelloMismatch::Version { theirs: protocol });
    }
    if build != ours {
        return Err(HelloMismatch::Build { ours: ours.to_owned(), theirs: clean(build) });
    }
    Ok(())
}
