//! Chains of stages in this process, over encrypted loopback connections: their answers are those of one process, bit for bit,
//! also when stages or nodes are lost.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod coming_back;
mod lent_memory;
mod loopback;
mod loss;
mod mapped_weights;
mod nodes;
mod ranges;
mod request_kinds;
mod same_bits;
