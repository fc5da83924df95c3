//! Messages between a client and a peer that serves a block, and between two peers of a chain, without I/O: bytes in, values
//! out.
//!
//! A message is a frame: length u32, kind u8, body; numbers are little-endian. A client has one stream to a peer, with all of
//! its sessions at that peer. A peer passes the rows of a session on to the next peer of its chain on a stream of another
//! protocol, which carries nothing else. Lengths are checked before anything is allocated for them.

mod activations;
mod frame;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use activations::{Activations, Encoding};
pub use chains::WireError;
pub use frame::{FrameError, FrameHead, read_frame, read_head, write_frame};
pub use reply::{FailureKind, Reply, Returned};
pub use request::{Next, Open, PushKey, Request, Run};

/// Tokens of one session.
pub const POSITIONS_MAX: usize = 1 << 24;
/// Rows of one run.
pub const ROWS_MAX: usize = 1 << 14;
/// Values of one row.
pub const HIDDEN_MAX: usize = 1 << 17;
/// Values of all rows of one run.
const VALUES_MAX: usize = 1 << 25;
/// The longest text of a failure.
pub const TEXT_BYTES_MAX: usize = 512;
/// Addresses of the next peer.
pub const ADDRESSES_MAX: usize = 16;
const ADDRESS_BYTES_MAX: usize = 256;

/// A body without activations is no longer.
const HEAD_BYTES_MAX: usize = 256 + ADDRESSES_MAX * (ADDRESS_BYTES_MAX + 8) + TEXT_BYTES_MAX;

/// The longest body in a conversation about rows of `hidden` values, at most `rows` of them in a run.
pub fn body_bytes_max(rows: usize, hidden: usize) -> usize {
    HEAD_BYTES_MAX + rows.saturating_mul(hidden).min(VALUES_MAX) * size_of::<f32>()
}
