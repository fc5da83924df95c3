//! Blocks of layers that peers of the swarm serve, and chains of such blocks that clients use.
#![forbid(unsafe_code)]

pub mod block;
pub mod client;
pub mod dial;
pub mod kwaai;
pub mod node;
pub mod protocols;
pub mod serve;
pub mod view;
pub mod wire;
