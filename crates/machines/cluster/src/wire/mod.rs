//! Messages between the machines of a cluster, without I/O: bytes in, values out. Lengths are checked before anything is
//! allocated for them. What a message may ask of the receiver is checked by the receiver.

pub mod chain;
pub mod control;

pub use chains::WireError;
