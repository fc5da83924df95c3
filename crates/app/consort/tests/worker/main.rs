//! Drives `consort --worker` over pipes, with lines of the protocol.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod ending;
mod faults;
mod lines;
mod neuron;
mod neuron_failures;
mod own_ops;
mod rank;
