//! Block formats of GGUF: what each stored byte means, and how weights are written in them.
//!
//! This is the definition of correct that the fast kernels are tested against. [`dequantise`] gives the weights that a
//! block stands for; [`groups32`] and [`superblock`] give the integers and scales in it, for those who pack blocks
//! anew; [`quantise`] goes the other way. Nothing here allocates, and every function gives the same bits on every CPU.
//! All multi-byte numbers are little-endian.
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

pub use block::{Group32, Superblock, groups32, superblock, zero_point};
pub use dequantise::dequantise;
pub use quantise::{can_quantise, quantise};
