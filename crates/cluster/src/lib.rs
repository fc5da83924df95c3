//! Machines we own: collectives between the ranks of a tensor-parallel group, the protocol of rank processes, and the
//! rank process itself.

#![deny(unsafe_code)]

mod exchange;
pub mod group;
mod memory;
pub mod protocol;
pub mod shared_memory;
mod stopped;
pub mod tcp;
pub mod worker;

pub use exchange::{EXCHANGE_ELEMENTS_MAX, Exchange, Joint};
pub use memory::{InsufficientMemory, check_memory, memory_available};
