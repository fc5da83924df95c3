//! Machines we own: collectives between the ranks of a tensor-parallel group, and the protocol of rank processes.

#![deny(unsafe_code)]

mod memory;
pub mod protocol;
pub mod shared_memory;

pub use memory::memory_available;
