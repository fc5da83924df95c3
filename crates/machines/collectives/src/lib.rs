//! Collectives between the ranks of a group: a [`Communicator`] sums and gathers slices of host memory, over shared memory
//! on one host and over TCP between hosts. A [`GroupCollective`] runs it on the buffers of a backend.

#![deny(unsafe_code)]

mod collective;
mod comm;
pub mod shared_memory;
pub mod tcp;

pub use collective::{AbortHandle, GroupCollective, NoGroup};
pub use comm::{CommError, Communicator, EXCHANGE_ELEMENTS_MAX};
