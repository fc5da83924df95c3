//! A chain of stages in threads of this process, over encrypted loopback connections: its answers are those of one process, bit
//! for bit, also when stages are lost.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod loss;
mod same_bits;
#[path = "../support/mod.rs"]
mod support;
