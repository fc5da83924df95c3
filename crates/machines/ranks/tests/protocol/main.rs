//! The line protocol: what is written reads back, and everything else is refused.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod lines;
mod messages;
mod plan;
mod values;
