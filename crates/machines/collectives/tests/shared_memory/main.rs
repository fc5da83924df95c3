//! Collectives over shared memory: ranks as threads, each with its own mapping, and as processes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod backend;
mod failure;
mod operations;
mod processes;
mod segment;
mod vocabulary;
