//! The feature `swarm`: layers that peers serve, and this machine as one of them. Without the feature, `without_swarm.rs` has the
//! same names.

mod block_placement;
mod chain;
mod commands;
mod kwaai;
mod kwaai_options;
mod model_digest;
mod monitor;
mod options;

pub use commands::SwarmArgs;
pub use options::{SwarmOptions, SwarmPlacement};
