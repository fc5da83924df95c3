//! The block formats of GGUF: dequantisation and quantisation.
//!
//! This is the reference that the fast kernels are tested against. [`dequantise`] returns the weights of blocks;
//! [`decode_block32`] and [`superblock`] return the integers and scales of a block, for repacking; [`quantise`] writes blocks.
//! Nothing here allocates, and every function gives the same bits on every CPU. All multi-byte numbers are little-endian.
//!
//! | format | elements | weight |
//! |---|---|---|
//! | Q4_0, Q5_0, Q8_0 | 32 | `scale * (q - zero_point)` |
//! | Q4_1, Q5_1 | 32 | `scale * q + min` |
//! | Q3_K, Q6_K | 16 groups of 16 | `(d * scales[group]) * (q - zero_point)` |
//! | Q2_K | 16 groups of 16 | `(d * scales[group]) * q - dmin * mins[group]` |
//! | Q4_K, Q5_K | 8 groups of 32 | `(d * scales[group]) * q - dmin * mins[group]` |

mod block;
mod dequantise;
mod quantise;
mod superblock_fit;

pub use block::{Block32, Superblock, decode_block32, superblock, zero_point};
pub use dequantise::dequantise;
pub use quantise::{can_quantise, quantise};
