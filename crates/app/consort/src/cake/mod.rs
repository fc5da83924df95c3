//! The feature `cake`: layers on workers of cake, and this machine as one of them. Without the feature, `without_cake.rs` has the
//! same names.

mod chain;
mod join;
mod monitor;
mod options;

pub use join::CakeJoinOptions;
pub use options::{CakeOptions, CakePlacement};
