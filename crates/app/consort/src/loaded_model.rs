//! `LoadedModel`: a model that is ready to run, in this process, in a group of rank processes, on several machines, or in a
//! swarm.

use engine::{Executor, LocalExecutor, RankReport};
use kernels::cpu::CpuBackend;
use ranks::group::Group;

use crate::cake_options::CakeChain;
use crate::cluster_options::ClusterChain;
use crate::swarm_options::SwarmChain;

pub enum LoadedModel {
    Local(Box<LocalExecutor<CpuBackend>>),
    Group(Box<Group>),
    Chain(Box<ClusterChain>),
    Cake(Box<CakeChain>),
    Swarm(Box<SwarmChain>),
}

impl LoadedModel {
    pub fn executor(&mut self) -> &mut dyn Executor {
        match self {
            Self::Local(local) => &mut **local,
            Self::Group(group) => &mut **group,
            Self::Chain(chain) => &mut **chain,
            Self::Cake(chain) => &mut **chain,
            Self::Swarm(chain) => &mut **chain,
        }
    }

    pub fn into_executor(self) -> Box<dyn Executor> {
        match self {
            Self::Local(local) => local,
            Self::Group(group) => group,
            Self::Chain(chain) => chain,
            Self::Cake(chain) => chain,
            Self::Swarm(chain) => chain,
        }
    }

    /// Bytes of the layers' weights, summed over all ranks; of a chain, those on this machine.
    pub fn layer_bytes(&self) -> usize {
        match self {
            Self::Local(local) => local.weight_bytes(),
            Self::Group(group) => group.layer_bytes(),
            Self::Chain(chain) => chain.layer_bytes(),
            Self::Cake(chain) => chain.layer_bytes(),
            Self::Swarm(_) => 0,
        }
    }

    /// Bytes of the head's weights, summed over all ranks; of a chain, those on this machine.
    pub fn head_bytes(&self) -> usize {
        match self {
            Self::Local(local) => local.head_bytes(),
            Self::Group(group) => group.head_bytes(),
            Self::Chain(chain) => chain.head_bytes(),
            Self::Cake(chain) => chain.head_bytes(),
            Self::Swarm(chain) => chain.head_bytes(),
        }
    }

    /// The counters of all ranks; empty for a model in one process.
    pub fn rank_reports(&mut self) -> anyhow::Result<Vec<RankReport>> {
        match self {
            Self::Local(_) | Self::Chain(_) | Self::Cake(_) | Self::Swarm(_) => Ok(Vec::new()),
            Self::Group(group) => Ok(group.count()?),
        }
    }
}
