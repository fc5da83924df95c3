//! What chains over a LAN and chains over a swarm have in common: numbers in messages, running means of times, and how failures
//! of machines add up and are forgiven. Pure: nothing here waits, or looks at a clock.
#![forbid(unsafe_code)]

mod blame;
mod bytes;
mod mean;

pub use blame::{Blame, BlamePolicy, Verdict};
pub use bytes::{ByteReader, ByteWriter, WireError, read_f32s};
pub use mean::MeanTime;
