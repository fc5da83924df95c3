//! The options of layers that run on machines of this network.

use clap::builder::{PathBufValueParser, TypedValueParser as _};
use clap::{Args, ValueEnum};
use net::PeerAddress;
use plan::Optimise;

use super::{CpuLevelOption, heading};
use crate::plan_file::PlanFile;

/// Where layers run, on several machines.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::CLUSTER)]
pub struct ClusterOptions {
    /// Run layers on machines of this network that run `consort join` with the same key
    #[arg(long)]
    pub cluster: bool,
    /// A machine that runs `consort join`, where it is not found by itself
    #[arg(long, alias = "peer", value_name = "HOST:PORT", value_delimiter = ',')]
    pub node: Vec<PeerAddress>,
    /// How many layers each --node or --cake-worker gets, in their order; this machine has the rest
    #[arg(long, value_name = "LAYERS,…", value_delimiter = ',')]
    pub split: Vec<usize>,
    /// Which machine has which layers: a plan that `consort plan --save` wrote, or a topology of cake. Its addresses are used as
    /// --node
    #[arg(long, value_name = "FILE", value_parser = PathBufValueParser::new().try_map(PlanFile::read))]
    #[arg(conflicts_with = "split")]
    pub plan: Option<PlanFile>,
    /// One arithmetic on all machines, so that neither the split nor the loss of a machine changes a bit: these CPU instructions
    /// [default: the best that all machines have at the start]
    #[arg(long, value_name = "LEVEL", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    pub exact: Option<CpuLevelOption>,
    /// What the plan minimises
    #[arg(long, value_enum, default_value_t)]
    pub optimise: OptimiseOption,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimiseOption {
    /// The time of a token of one request alone
    #[default]
    Latency,
    /// The time of a token of many requests together
    Throughput,
}

impl From<OptimiseOption> for Optimise {
    fn from(option: OptimiseOption) -> Self {
        match option {
            OptimiseOption::Latency => Self::Latency,
            OptimiseOption::Throughput => Self::Throughput,
        }
    }
}

impl ClusterOptions {
    /// Whether layers are to run on other machines.
    pub fn is_used(&self) -> bool {
        self.cluster || !self.node.is_empty() || self.plan.is_some()
    }

    /// As with `--cluster`, unless the options name machines.
    pub fn imply_cluster(&mut self) {
        self.cluster |= !self.is_used();
    }
}
