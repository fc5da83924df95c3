//! Machines we own: collectives between the ranks of a tensor-parallel group, the protocol of rank processes, and the
//! rank process itself.

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
