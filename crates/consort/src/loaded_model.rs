//! `LoadedModel`: a model that is ready to run, in this process or in a group of rank processes.

use engine::{Executor, LocalExecutor, RankReport};
use kernels::cpu::CpuBackend;
use ranks::group::Group;

pub enum LoadedModel {
    Local(Box<LocalExecutor<CpuBackend>>),
    Group(Box<Group>),
}

impl LoadedModel {
    pub fn executor(&mut self) -> &mut dyn Executor {
        match self {
            Self::Local(local) => &mut **local,
            Self::Group(group) => &mut **group,
        }
    }

    pub fn into_executor(self) -> Box<dyn Executor> {
        match self {
            Self::Local(local) => local,
            Self::Group(group) => group,
        }
    }

    /// Bytes of the layers' weights, summed over all ranks.
    pub fn layer_bytes(&self) -> usize {
        match self {
            Self::Local(local) => local.weight_bytes(),
            Self::Group(group) => group.layer_bytes(),
        }
    }

    /// Bytes of the head's weights, summed over all ranks.
    pub fn head_bytes(&self) -> usize {
        match self {
            Self::Local(local) => local.head_bytes(),
            Self::Group(group) => group.head_bytes(),
        }
    }

    /// The counters of all ranks; empty for a model in one process.
    pub fn rank_reports(&mut self) -> anyhow::Result<Vec<RankReport>> {
        match self {
            Self::Local(_) => Ok(Vec::new()),
            Self::Group(group) => Ok(group.count()?),
        }
    }
}
