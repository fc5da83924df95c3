//! The line protocol between a supervisor and its ranks: values and bytes, nothing that opens or waits.
//!
//! One JSON object a line, named by its `op`; exactly one reply to each request. The ops of the neuron protocol are kept
//! as they are, so that a foreign leader can drive our ranks. Ours stand beside them: each carries an `id` that its
//! reply echoes, so that a reply which comes too late is known as such and dropped.
//!
//! Whatever is read is bounded: a line by [`LINE_BYTES_MAX`], what a line says by [`limits`]. Nothing is buffered on the
//! way from a line to its message, and long lists end at their limit, so the memory that a line can cost is a small
//! multiple of its length.

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
pub mod share;

pub use error::{ErrorKind, MESSAGE_BYTES_MAX, clean};
pub use lines::{LINE_BYTES_MAX, Lines, OP_BYTES_MAX, ReadError, WriteError, Writer, decode, encode};
pub use message::{Message, Reply, Request};
pub use number::Number;
pub use packed::Packed;

/// Changes with every change that an older build would misread.
pub const VERSION: u32 = 3;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    #[error("the other side speaks protocol version {theirs}, this build speaks {VERSION}")]
    Version { theirs: u32 },
    #[error("the other side is build {theirs}, this one is {ours}")]
    Build { ours: String, theirs: String },
}

/// That the other side of a `hello` or `hello_ok` is this very build. Ranks of one group have to agree in every bit of
/// arithmetic, so the version alone is not enough.
pub fn check_hello(ours: &str, protocol: u32, build: &str) -> Result<(), HandshakeError> {
    if protocol != VERSION {
        return Err(HandshakeError::Version { theirs: protocol });
    }
    if build != ours {
        return Err(HandshakeError::Build { ours: ours.to_owned(), theirs: clean(build) });
    }
    Ok(())
}
