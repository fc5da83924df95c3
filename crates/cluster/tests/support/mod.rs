//! What the tests of chains share.
#![allow(dead_code)] // each test binary uses its own part

pub mod answers;
pub mod loopback;
