//! The bytes of KwaaiNet's block protocol (`/kwaai/inference/1.0.0`) and of the records by which its peers find one
//! another. Bytes in, values out; there is no I/O.
//!
//! A call is a frame, a reply another one, each on a stream of its own: [`frame_header`], [`read_call`], [`reply_frame`], and
//! for the caller [`call_frame`] and [`read_reply`]. Sessions, connections and deadlines are left to the user.
//!
//! Every length and count is checked before anything is allocated for it. Decoded values borrow from the bytes where they
//! can. Unknown fields and bytes after the end of a MessagePack value are ignored, as KwaaiNet ignores them.
#![forbid(unsafe_code)]

mod block;
pub mod dht;
mod envelope;
mod failure;
mod frame;
mod msgpack;
mod protobuf;
mod tensor;
#[cfg(test)]
mod tests;

pub use block::{KwaaiInput, KwaaiReply, KwaaiRequest, call_frame, read_call, read_reply, reply_frame};
pub use envelope::{CALL_ID_BYTES, CallId, INFERENCE_PROTOCOL, UnaryBody, UnaryMessage};
pub use failure::{FAILURE_TEXT_BYTES_MAX, KwaaiFailure};
pub use frame::{FRAME_BYTES_MAX, FrameHeader, LOCAL_FRAME_BYTES_MAX, frame_header, local_frame, local_frame_header};
pub use tensor::{DataForm, KwaaiTensor, rows_per_frame};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KwaaiWireError {
    #[error("a frame of {bytes} bytes is too long, the limit is {max}")]
    FrameTooLong { bytes: u64, max: usize },
    #[error("a varint has more than 64 bits")]
    Varint,
    #[error("the message ends within its {0}")]
    Truncated(&'static str),
    #[error("the {0} has another type")]
    Type(&'static str),
    #[error("the {0} is out of range")]
    OutOfRange(&'static str),
    #[error("the {0} is missing")]
    Missing(&'static str),
    #[error("the {0} is there twice")]
    Repeated(&'static str),
    #[error("the {0} is not UTF-8")]
    NotText(&'static str),
    #[error("the {what} has {found} bytes, not {expected}")]
    Length { what: &'static str, found: usize, expected: usize },
    #[error("there are {found} {what}, not {expected}")]
    Count { what: &'static str, found: usize, expected: usize },
    #[error("{found} {what} are too many, the limit is {max}")]
    TooMany { what: &'static str, found: usize, max: usize },
    #[error("field {0} does not begin a call, a response or an error")]
    UnknownBody(u32),
    #[error("a call where a reply is due, or a reply where a call is due")]
    Unexpected,
    #[error("the reply is to another call")]
    OtherCall,
    #[error("the {0} has a value that is not known")]
    UnknownKind(&'static str),
    #[error("{bytes} bytes of token ids are not a positive multiple of 4")]
    TokenBytes { bytes: usize },
    #[error("a tensor of f16 with shape {shape:?} does not have {bytes} bytes")]
    TensorBytes { shape: Vec<u32>, bytes: usize },
    #[error("hidden states have shape [1, rows, {hidden}], not {shape:?}")]
    HiddenShape { hidden: usize, shape: Vec<u32> },
    #[error("logits have shape [1, rows, {vocab}] or [{vocab}], not {shape:?}")]
    LogitShape { vocab: usize, shape: Vec<u32> },
    #[error("a value is not finite in f16")]
    NotFinite,
}
