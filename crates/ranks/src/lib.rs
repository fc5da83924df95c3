//! Tensor parallelism on machines of one owner: collectives between ranks, the line protocol between supervisor and
//! rank process, the rank process, and the group that supervises rank processes.

#![deny(unsafe_code)]

mod collective;
mod comm;
pub mod group;
mod memory;
pub mod protocol;
pub mod shared_memory;
mod stopped;
pub mod tcp;
pub mod worker;

pub use collective::{AbortHandle, GroupCollective};
pub use comm::{CommError, Communicator, EXCHANGE_ELEMENTS_MAX};
pub use memory::{InsufficientMemory, check_memory, memory_available};
