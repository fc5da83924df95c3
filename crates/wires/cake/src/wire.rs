//! The bytes of cake's protocol: frames and messages, without I/O.
//!
//! A frame is a header of eight bytes (magic and length) and a payload: one message. Integers of the protocol are
//! big-endian, the elements of tensors little-endian. Every length and count is checked before anything is allocated for
//! it. Bytes after the end of a message are ignored, as cake ignores them.
//!
//! There are two variants of the protocol, and no field that tells which one a peer speaks: see [`CakeVariant`].

mod activations;
mod frame;
mod message;
mod reader;
mod tensor;
#[cfg(test)]
mod tests;

pub use activations::{activation_rows, activation_tensor};
pub use frame::{FRAME_BYTES_MAX, FRAME_HEADER_BYTES, payload_bytes};
pub use message::{CakeChunk, CakeChunkCheck, CakeMessage, CakeOp, CakeVariant, CakeWorkerInfo};
pub use tensor::{CakeDType, CakeTensor};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CakeWireError {
    #[error("the bytes are not a frame of cake's protocol")]
    Magic,
    #[error("a frame of {bytes} bytes is too long, the limit is {max}")]
    FrameTooLong { bytes: usize, max: usize },
    #[error("the message ends within its {0}")]
    Truncated(&'static str),
    #[error("{0} is not the number of a message")]
    UnknownMessage(u32),
    #[error("the {0} is not UTF-8")]
    NotText(&'static str),
    #[error("{found} {what} are too many, the limit is {max}")]
    TooMany { what: &'static str, found: usize, max: usize },
    #[error("{0} is not the number of an element type that is known")]
    UnknownDType(u8),
    #[error("a tensor of {dtype} with shape {shape:?} does not have {bytes} bytes")]
    TensorBytes { dtype: CakeDType, shape: Vec<u64>, bytes: usize },
    #[error("activations have type F16, BF16 or F32, not {0}")]
    ActivationDType(CakeDType),
    #[error("activations have shape [1, rows, {hidden}], not {shape:?}")]
    ActivationShape { hidden: usize, shape: Vec<u64> },
    #[error("an activation is not finite in {0}")]
    NotFinite(CakeDType),
    #[error("cake's older protocol has no such message")]
    NotInVariant,
}
