//! What all tests of chains use: limits, and prompts for any model.

pub mod answers;
pub mod setup;
pub mod states;

use std::path::Path;
use std::time::Duration;

use kernels::StepLimits;
use model::{Checkpoint, Limits, LoadOptions};
use types::TokenId;

pub const OPTIONS: LoadOptions = LoadOptions {
    keep: None,
    limits: Limits {
        step: StepLimits { rows: 128, sequences: 16, pages: 128 },
        logit_rows: 128,
        kv_pages: 64,
        positions: 300,
    },
};

/// Longer than any test.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// A prompt of any tokens.
pub fn prompt(model: &Path, length: usize, seed: u32) -> Vec<TokenId> {
    let vocab = Checkpoint::open(model).unwrap().description().vocab as u32;
    (0..length as u32).map(|index| TokenId((index * 31 + seed * 17 + index * seed % 5) % vocab)).collect()
}
