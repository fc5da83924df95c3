//! Readers of the two weight file formats. A file is memory-mapped and checked once when it is opened, and its tensors are
//! views into the map. Files are untrusted: for any contents, opening returns a reader whose views are in bounds, or an
//! error, and allocates no more than the named limits allow.
//!
//! A file must not be changed while it is open. One that becomes shorter is noticed ([`FileError::Damaged`]).

mod error;
mod gguf;
pub(crate) mod map;
mod safetensors;
mod sample;
mod tensors;

pub(crate) use error::shown;
pub use error::{FileError, FormatError};
pub use gguf::{Gguf, Strings, Value};
pub use safetensors::SafeTensors;
pub(crate) use tensors::stored_bytes;
pub use tensors::{RANK_MAX, TENSORS_MAX};

use types::DType;

/// A stored tensor. The shape is outermost first, so a linear weight is `[out, in]`. The length of the bytes matches the
/// shape and the format; their alignment is arbitrary.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}
