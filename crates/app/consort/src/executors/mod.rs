//! What runs a model, wherever its [`Placement`](crate::placement::Placement) says: executors, and what is known of them while they
//! load and run. A model in this process needs nothing of its own.

pub mod cluster;
pub mod group;
mod load_observer;
mod loaded_model;

use std::path::Path;

use anyhow::Result;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Footprint, LoadOptions, ModelPart};
use types::Rank;

pub use load_observer::{LoadBars, LoadObserver, WeightsBar};
pub use loaded_model::LoadedModel;

/// A model whose files are open, and how it is loaded.
#[derive(Clone, Copy)]
pub struct OpenedModel<'a> {
    /// What `checkpoint` was opened from.
    pub path: &'a Path,
    pub checkpoint: &'a Checkpoint,
    pub options: LoadOptions,
    pub cpu: CpuOptions,
}

/// The memory that each of these ranks needs for a part of a model.
pub fn footprints(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    cpu: CpuOptions,
    part: ModelPart,
    ranks: impl Iterator<Item = Rank>,
) -> Result<Vec<Footprint>> {
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..cpu })?;
    let footprints = ranks.map(|rank| Footprint::new(&backend, checkpoint, options, part, rank));
    Ok(footprints.collect::<Result<_, _>>()?)
}
