//! The options of tensor parallelism.

use std::num::NonZeroU16;

use clap::Args;
use ranks::group::Deadlines;

use super::heading;
use super::values::{ActivationsOption, rank_count};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::CLUSTER)]
pub struct RankOptions {
    /// Number of ranks (processes) that each layer is split over [default: 1, or one here and one on each host]
    #[arg(long, value_name = "RANKS", env = "CONSORT_TENSOR_PARALLEL", allow_negative_numbers = true)]
    #[arg(value_parser = rank_count, alias = "tensor-parallel-size", help_heading = heading::MACHINE)]
    pub tensor_parallel: Option<NonZeroU16>,
    /// Hosts that run `consort ranks`. Each runs one rank, and this machine runs one more. They need the same build of
    /// consort, and the model under the same path
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub tp_hosts: Vec<String>,
    /// Format of activations between hosts; q8 sends little more than a quarter of the bytes, and is less exact
    #[arg(long, value_enum, default_value_t)]
    pub tp_activations: ActivationsOption,
    /// Time limits after which a rank counts as lost; limits that are not named keep their default
    #[arg(long, value_name = "NAME=SECONDS,…", default_value_t, help_heading = heading::MACHINE)]
    pub rank_deadlines: Deadlines,
}
