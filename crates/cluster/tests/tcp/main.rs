//! Collectives over TCP between ranks that are threads, on loopback; links to ranks elsewhere; and what strangers and
//! broken peers can do to them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod backend;
mod failure;
mod forming;
mod garbled;
mod group;
mod link;
mod operations;
mod proxy;
#[path = "../shared_memory/group.rs"]
mod shared;
