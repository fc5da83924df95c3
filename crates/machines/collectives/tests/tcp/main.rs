//! Collectives over TCP between ranks that are threads, on loopback, and what
//! unauthenticated and broken peers can do to them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod backend;
mod failure;
mod forming;
mod garbled;
mod group;
mod operations;
