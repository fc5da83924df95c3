//! Tensor parallelism on machines of one owner: the line protocol between supervisor and rank process, the rank process,
//! and the group that supervises rank processes.

#![deny(unsafe_code)]

pub mod group;
mod memory;
pub mod protocol;
pub mod remote;
mod stopped;
pub mod worker;

pub use memory::{InsufficientMemory, check_memory, memory_available};
