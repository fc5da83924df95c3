//! Types that all crates use. Each type checks its invariant once, on construction.
#![forbid(unsafe_code)]

mod dtype;
mod layers;
mod log_limit;
mod rank;

pub use dtype::{DType, UnknownDType};
pub use layers::LayerRange;
pub use log_limit::LogLimit;
pub use rank::{Rank, WorldSize};

/// A token of a model's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenId(pub u32);

/// One sequence's cached state in an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);
