//! Machines we own: collectives between the ranks of a tensor-parallel group, and the protocol of rank processes.

#![deny(unsafe_code)]

pub mod protocol;
pub mod shared_memory;
pub mod tcp;
