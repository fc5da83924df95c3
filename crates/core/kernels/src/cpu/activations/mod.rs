//! Activations in the layouts that the linear kernels read: int8 with a scale per 32 or per 256 inputs, or bf16. Each in one
//! or two parts: the row is the sum of its parts, and each part is the rounded remainder of the parts before it.
//!
//! Rows are grouped into *tiles* of 16 and inputs into superblocks of 256. The bytes of one (superblock, tile) are
//! contiguous, 16 rows by the depth of a hardware tile: a tile load reads one contiguous kilobyte, and a vector kernel
//! reads four consecutive inputs of a row as one 32-bit word. Rounding, and so every integer, is the same on all levels.

mod bf16;
mod int8;
mod int8_parts;

use super::matrix::SUPER;
#[cfg(target_arch = "x86_64")]
pub(super) use bf16::round_bf16;
pub(crate) use bf16::{Bf16SplitActivations, Bf16SplitWriter};
pub(crate) use int8::{Q8Activations, Q8KActivations, Q8Writer};

/// Rows in a tile.
pub(crate) const TILE: usize = 16;
/// Bytes of the int8 values of one (superblock, tile).
pub(crate) const BLOCK: usize = TILE * SUPER;

fn supers(cols: usize) -> usize {
    cols.div_ceil(SUPER)
}
