//! Collectives between the ranks of one host, over a memfd that all of them map.
//!
//! A supervisor makes a [`Segment`] and passes its descriptor to the ranks. Each rank attaches, joins as its rank
//! ([`ShmComm`]) and runs the collectives of a [`Communicator`](crate::Communicator). A process that sees a rank fail
//! raises an [`Abort`], and every wait ends. Sums are taken in the order of ranks, so a run repeats bit for bit.
//!
//! # How a collective works
//!
//! Every rank has two slots, used in turn. In a phase a rank writes its own slot, arrives at the barrier, waits until
//! all have arrived, and reads the other ranks' slots. One barrier per phase is enough: a rank writes a slot again two
//! phases later, after it has passed the barrier in between, and every reader arrived at that barrier only after it had
//! read.
//!
//! # Memory ordering
//!
//! A rank arrives with a release operation on its own word, after it has written its slot. A waiting rank reads that
//! word with acquire before it reads the slot. So what a rank wrote before it arrived is visible to every rank that saw
//! it arrive; and what a rank read before it arrived was read before any rank that saw it arrive writes.
//!
//! A rank that parks sets its `Asleep` word and then checks the arrivals once more. A rank that arrives sets its
//! `Arrived` word and then checks the other arrivals and the `Asleep` words. Each has a sequentially consistent fence
//! between the two, so the rank whose fence is last sees the words of all others: either the parking rank finds that
//! all have arrived, or the last rank to arrive finds the parked one and notifies the futex. The futex is read before
//! the last check, and the kernel does not let a thread sleep on a futex whose value has changed since.
//!
//! # What a peer can do
//!
//! Sizes and offsets come from this process alone, never from the segment, and the seals keep a peer from shrinking the
//! file under a mapping. A peer that writes garbage can cause wrong numbers, errors, or a wait that an abort ends.
#![cfg(target_os = "linux")]

mod barrier;
#[cfg(test)]
mod barrier_model;
mod comm;
mod mapping;
mod segment;

pub use barrier::Epoch;
pub use comm::ShmComm;
pub use segment::{Abort, GroupLimits, SEGMENT_BYTES_MAX, Segment, SegmentError};
