//! The options that commands with a model share. Here they are only parsed and checked: how a model runs is
//! [`ExecutionOptions`], where it runs is what a [`Placement`](crate::placement::Placement) is made of.

mod cluster;
pub mod execution;
pub mod heading;
mod key;
mod model;
mod model_math;
mod ranks;
mod values;

use std::num::NonZeroUsize;

use clap::Args;

use crate::cake::CakeOptions;
use crate::swarm::SwarmOptions;

pub use cluster::ClusterOptions;
pub use execution::{CONTEXT_DEFAULT, ExecutionOptions};
pub use key::{KeyOptions, Passphrase};
pub use model::{ModelName, ModelOption};
pub use model_math::ModelMath;
pub use ranks::RankOptions;
pub use values::{CpuLevelOption, bytes, cpus, duration, rank_count, thread_count};

/// Where and how a model runs.
#[derive(Args, Clone, Debug)]
pub struct ModelOptions {
    #[command(flatten)]
    pub execution: ExecutionOptions,
    #[command(flatten)]
    pub placement: PlacementOptions,
}

/// Where a model runs.
#[derive(Args, Clone, Debug)]
pub struct PlacementOptions {
    #[command(flatten)]
    pub ranks: RankOptions,
    #[command(flatten)]
    pub key: KeyOptions,
    #[command(flatten)]
    pub cluster: ClusterOptions,
    #[command(flatten)]
    pub cake: CakeOptions,
    #[command(flatten)]
    pub swarm: SwarmOptions,
}

/// The number of compute threads.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::MACHINE)]
pub struct ThreadOption {
    /// Compute threads of each rank [default: one per CPU, divided among the ranks]
    #[arg(short, long, value_name = "COUNT", env = "CONSORT_THREADS", value_parser = thread_count)]
    #[arg(allow_negative_numbers = true)]
    threads: Option<NonZeroUsize>,
}

impl ThreadOption {
    /// The threads of each of so many ranks on this machine.
    pub fn per_rank(&self, ranks: usize) -> usize {
        self.threads.map_or_else(|| (cpus() / ranks).max(1), NonZeroUsize::get)
    }
}
