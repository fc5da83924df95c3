//! `ModelConfig`: how and where a model runs, and how it is loaded there.

use std::path::Path;

use ::cluster::coordinator::Survey;
use anyhow::{Context, Result, bail};
use engine::LocalExecutor;
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use plan::UnusableNode;
use ranks::check_memory;
use ranks::protocol::limits::LOGIT_VALUES_MAX;
use types::{DType, Rank, WorldSize};

use crate::executors::{LoadBars, LoadObserver, LoadedModel, OpenedModel, cluster, footprints, group};
use crate::options::{ExecutionOptions, ModelOptions, ThreadOption};
use crate::placement::Placement;
use crate::store::{ModelFiles, Store};
use crate::usage::UsageError;

/// Page table entries in one step. If the sequences have more pages, they take turns.
const STEP_PAGES_MAX: usize = 1 << 20;

/// The load that a model is sized for: determines the size of the KV cache and of the working memory.
#[derive(Clone, Copy, Debug)]
pub struct RequestedCapacity {
    /// Sequences that run at once.
    pub sequences: usize,
    /// Maximum tokens of one sequence.
    pub positions: usize,
    /// Tokens of all sequences together.
    pub tokens: usize,
    /// Maximum tokens of one step; the chunk size is another limit.
    pub rows: usize,
    /// Maximum rows of one step whose logits are computed.
    pub logit_rows: usize,
}

impl RequestedCapacity {
    /// Capacity for `sequences` sequences of `positions` tokens each.
    pub fn full(sequences: usize, positions: usize, logit_rows: usize) -> Self {
        // Sequences do not share pages, so each one is rounded up to whole pages.
        let tokens = sequences.saturating_mul(positions.div_ceil(PAGE_TOKENS)).saturating_mul(PAGE_TOKENS);
        Self { sequences, positions, tokens, rows: positions, logit_rows }
    }
}

/// A model's options, checked.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    pub execution: ExecutionOptions,
    pub placement: Placement,
}

impl ModelConfig {
    /// Checks what can be checked without the model, before it is downloaded to be loaded.
    pub fn new(options: &ModelOptions) -> Result<Self> {
        let config = Self::without_key(options)?;
        config.placement.check_key()?;
        Ok(config)
    }

    /// Checks that the options do not contradict each other.
    pub fn without_key(options: &ModelOptions) -> Result<Self, UsageError> {
        let ModelOptions { execution, placement } = options;
        let placement = Placement::new(placement)?;
        execution.keep()?;
        Ok(Self { execution: execution.clone(), placement })
    }

    /// The files of a model, downloaded if they are missing, as far as this machine needs them.
    pub fn resolve(&self, model: Option<&str>) -> Result<ModelFiles> {
        let store = Store::from_environment()?;
        match self.placement.own_part() {
            Some(part) => store.resolve_part(model, part),
            None => store.resolve(model),
        }
    }

    /// Compute threads of each rank.
    pub fn threads(&self, asked: &ThreadOption) -> usize {
        asked.per_rank(self.placement.local_ranks())
    }

    /// Loads the model that was opened at `path`, and shows a progress bar. `threads` is per rank.
    pub fn load(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: &ThreadOption,
        capacity: RequestedCapacity,
    ) -> Result<Box<dyn LoadedModel>> {
        let mut bars = LoadBars::new(checkpoint.description().layers.len());
        self.load_with(path, checkpoint, self.threads(threads), capacity, &mut bars)
    }

    /// Loads the model that was opened at `path`.
    pub fn load_with(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: usize,
        capacity: RequestedCapacity,
        observer: &mut dyn LoadObserver,
    ) -> Result<Box<dyn LoadedModel>> {
        let model = self.opened(path, checkpoint, threads, capacity)?;
        Ok(match &self.placement {
            Placement::Here => {
                check_memory(&self.footprint(checkpoint, capacity)?)?;
                let (backend, progress) = (CpuBackend::new(model.cpu)?, &mut |done| observer.layers(done));
                let local = LocalExecutor::load(backend, checkpoint, &model.options, progress);
                let local = local.context("load the model")?;
                checkpoint.release();
                Box::new(local)
            }
            Placement::Ranks(ranks) => {
                check_memory(&self.footprint(checkpoint, capacity)?)?;
                Box::new(group::start(ranks, &model, None, &mut |done| observer.layers(done))?)
            }
            Placement::Cluster(machines) => Box::new(cluster::form(machines, &model, None, observer)?),
            Placement::Cake(cake) => cake.form(&model, observer)?,
            Placement::Swarm(swarm) => swarm.connect(&model, observer)?,
        })
    }

    /// Finds the machines that could run layers of the model that was opened at `path`, and loads nothing. Also returns those
    /// that cannot.
    pub fn survey(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: &ThreadOption,
        capacity: RequestedCapacity,
    ) -> Result<(Survey, Vec<UnusableNode>)> {
        let Placement::Cluster(machines) = &self.placement else {
            bail!("only layers on several machines have a plan")
        };
        cluster::survey(machines, &self.opened(path, checkpoint, self.threads(threads), capacity)?)
    }

    /// Loads the model with its weights as f32, to compare with: in this process, on this machine.
    pub fn load_reference(
        &self,
        checkpoint: &Checkpoint,
        threads: usize,
        capacity: RequestedCapacity,
    ) -> Result<LocalExecutor<CpuBackend>> {
        let options = LoadOptions { keep: Some(DType::F32), limits: self.limits(checkpoint, capacity) };
        let level = self.execution.level()?;
        let backend = CpuBackend::new(CpuOptions { threads, level, ..CpuOptions::default() })?;
        let whole = ModelPart::whole(checkpoint.description());
        check_memory(&[Footprint::new(&backend, checkpoint, &options, whole, Rank::SINGLE)?])?;
        LocalExecutor::load(backend, checkpoint, &options, &mut |_| {}).context("load the model in f32")
    }

    /// The memory that each rank on this machine would need for this capacity.
    pub fn footprint(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Result<Vec<Footprint>> {
        let options = self.load_options(checkpoint, capacity)?;
        let part = self.placement.own_part().unwrap_or_else(|| ModelPart::whole(checkpoint.description()));
        let ranks = self.placement.world().ranks().take(self.placement.local_ranks());
        footprints(checkpoint, &options, self.execution.cpu(checkpoint, 1)?, part, ranks)
    }

    /// The numbers of ranks up to `max` that the model can be split over.
    pub fn possible_ranks(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity, max: u16) -> Result<Vec<u16>> {
        let options = self.load_options(checkpoint, capacity)?;
        let backend = CpuBackend::new(self.execution.cpu(checkpoint, 1)?)?;
        let whole = ModelPart::whole(checkpoint.description());
        let can_load = |rank| Footprint::new(&backend, checkpoint, &options, whole, rank).is_ok();
        let can_split = |&size: &u16| WorldSize::new(size).is_some_and(|world| world.ranks().all(can_load));
        Ok((1..=max).filter(can_split).collect())
    }

    fn opened<'a>(
        &self,
        path: &'a Path,
        checkpoint: &'a Checkpoint,
        threads: usize,
        capacity: RequestedCapacity,
    ) -> Result<OpenedModel<'a>> {
        Ok(OpenedModel {
            path,
            checkpoint,
            options: self.load_options(checkpoint, capacity)?,
            cpu: self.execution.cpu(checkpoint, threads)?,
        })
    }

    fn load_options(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Result<LoadOptions, UsageError> {
        Ok(LoadOptions { keep: self.execution.keep()?, limits: self.limits(checkpoint, capacity) })
    }

    fn limits(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Limits {
        let pages_each = capacity.positions.div_ceil(PAGE_TOKENS);
        // A page that two sequences share is in both page tables.
        let step_pages = capacity.sequences.saturating_mul(pages_each).min(STEP_PAGES_MAX).max(pages_each);
        // At least the pages of one full sequence.
        let kv_pages = capacity.tokens.div_ceil(PAGE_TOKENS).max(pages_each);
        let logit_rows = match self.placement {
            // All logits of a step must fit into one line of the protocol.
            Placement::Ranks(_) => {
                let most = LOGIT_VALUES_MAX / checkpoint.description().vocab;
                capacity.logit_rows.min(most).max(capacity.sequences)
            }
            _ => capacity.logit_rows,
        };
        let rows = self.execution.chunk().min(capacity.rows).max(logit_rows);
        let step = StepLimits { rows, sequences: capacity.sequences, pages: step_pages };
        Limits { step, logit_rows, kv_pages, positions: capacity.positions }
    }
}
