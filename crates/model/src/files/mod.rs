//! The two file formats that weights come in, read in place: a file is mapped, checked once when it is opened, and its
//! tensors are views into the map. Everything in a file is untrusted: whatever it holds, opening it gives a reader whose
//! views are in bounds, or one error, within the memory that the named limits allow.
//!
//! A file must not be changed while it is open, as with every program that maps its input.

mod error;
mod gguf;
mod map;
mod safetensors;
mod tensors;

pub use error::{FileError, FormatError};
pub use gguf::{Gguf, Strings, Value};
pub use safetensors::SafeTensors;
pub use tensors::{RANK_MAX, TENSORS_MAX};

use types::DType;

/// A stored tensor. The shape is outermost first, so a linear weight is `[out, in]`; the bytes are exactly the rows that
/// the shape and the format call for, at any alignment.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub dtype: DType,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}
