//! `LoadedModel`: a model that is ready to run.

use anyhow::Result;
use cluster::chain::{Chain, ChainBuilder};
use engine::{Executor, LocalExecutor, RankReport};
use kernels::cpu::CpuBackend;
use ranks::group::Group;

pub trait LoadedModel: Executor {
    /// Bytes of the layers' weights, summed over all ranks; of a chain, those on this machine.
    fn layer_bytes(&self) -> usize;

    /// Bytes of the head's weights, summed over all ranks; of a chain, those on this machine.
    fn head_bytes(&self) -> usize;

    /// The counters of all ranks; empty for a model in one process.
    fn rank_reports(&mut self) -> Result<Vec<RankReport>> {
        Ok(Vec::new())
    }
}

impl LoadedModel for LocalExecutor<CpuBackend> {
    fn layer_bytes(&self) -> usize {
        self.weight_bytes()
    }

    fn head_bytes(&self) -> usize {
        self.head_bytes()
    }
}

impl LoadedModel for Group {
    fn layer_bytes(&self) -> usize {
        self.layer_bytes()
    }

    fn head_bytes(&self) -> usize {
        self.head_bytes()
    }

    fn rank_reports(&mut self) -> Result<Vec<RankReport>> {
        Ok(self.count()?)
    }
}

impl<F: ChainBuilder<CpuBackend>> LoadedModel for Chain<CpuBackend, F> {
    fn layer_bytes(&self) -> usize {
        self.layer_bytes()
    }

    fn head_bytes(&self) -> usize {
        self.head_bytes()
    }
}
