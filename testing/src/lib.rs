//! What the tests of several crates share. Only tests depend on it.
//!
//! The unit tests of a crate have a second copy of that crate beside the one that this crate depends on. So they take from here
//! only what mentions no type of theirs.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[cfg(feature = "engine")]
pub mod answers;
pub mod bounded;
#[cfg(feature = "programs")]
pub mod cake_programs;
#[cfg(all(feature = "cluster", target_os = "linux"))]
pub mod cluster_chain;
#[cfg(feature = "kernels")]
pub mod decoder_stack;
#[cfg(feature = "model")]
pub mod driver;
#[cfg(feature = "engine")]
pub mod fake_executor;
#[cfg(feature = "server")]
pub mod fragile;
#[cfg(feature = "binary")]
pub mod joined_node;
#[cfg(feature = "kwaai")]
pub mod kwaai_input;
#[cfg(feature = "blocks")]
pub mod kwaai_programs;
#[cfg(feature = "engine")]
pub mod local_chain;
pub mod model_files;
pub mod needs;
#[cfg(target_os = "linux")]
pub mod network;
#[cfg(feature = "engine")]
pub mod oracle_model;
mod paths;
pub mod proxy;
#[cfg(feature = "programs")]
pub mod python;
#[cfg(feature = "model")]
pub mod random_model;
#[cfg(feature = "model")]
pub mod reference;
#[cfg(unix)]
pub mod reserved_port;
#[cfg(all(feature = "binary", target_os = "linux"))]
pub mod running_answer;
#[cfg(feature = "server")]
pub mod served_model;
#[cfg(feature = "binary")]
pub mod serving;
#[cfg(feature = "collectives")]
pub mod shared_memory_group;
#[cfg(feature = "directory")]
pub mod simulation;
#[cfg(feature = "binary")]
pub mod swarm_peer;
pub mod watchdog;

pub use paths::{oracle, repository};
