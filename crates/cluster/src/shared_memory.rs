//! Collectives between the ranks of one host, over a memfd that all of them map.
//!
//! A supervisor makes a [`Segment`] and hands its descriptor to the ranks; each attaches, joins as its rank ([`ShmComm`]) and runs
//! the collectives of a [`Communicator`](crate::Communicator). Whoever sees a rank fail raises an
//! [`Abort`], and every wait ends. A sum is always taken in the order of the ranks, so a run repeats bit for bit.
//!
//! # How an exchange works
//!
//! Every rank has two slots, used in turn. A phase is: write the own slot, arrive, wait until all have arrived, read
//! the others' slots. One barrier a phase is enough: a slot is written again two phases later, by a rank that has
//! passed the barrier in between, at which every reader arrived only after it had read.
//!
//! # Memory ordering
//!
//! A rank arrives with a release operation on a word of its own, after it has written its slot; a waiter reads that
//! word with acquire before it reads the slot. So what a rank wrote before it arrived is seen by all who saw it arrive,
//! and what a rank read before it arrived has been read before anyone who saw it arrive writes.
//!
//! Who parks says so in a word of its own and then looks once more; who arrives stores its word and then looks at the
//! others and at who sleeps. A sequentially consistent fence stands between the two steps of each, so whoever's fence
//! is the last sees everything: either the sleeper finds that all have arrived, or the last to arrive finds the sleeper
//! and rings. The bell is read before that last look, and the kernel puts nobody to sleep on a bell that has rung
//! since.
//!
//! # What a peer can do
//!
//! Sizes and offsets come from this process alone, never from the segment, and the seals keep it from being cut
//! short under a mapping. A peer that writes nonsense can cause wrong numbers, errors, or a wait that an abort ends.
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
