//! `Loader`: loads the blocks that this machine serves: in this process, on ranks, or on machines of its LAN.

use std::path::{Path, PathBuf};

use anyhow::Result;
use blocks::block::BlockShape;
use blocks::node::{BlockLoader, LoadedBlock};
use engine::{EmbeddingAndHead, Executor, Stage};
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use ranks::{check_memory, memory_available};
use types::LayerRange;

use super::super::block_placement::BlockPlacement;
use crate::executors::{OpenedModel, cluster, footprints, group};
use crate::options::{CONTEXT_DEFAULT, ExecutionOptions, ThreadOption};

/// Rows of one step, of all clients together, and of one run of a client.
const STEP_ROWS: usize = 512;
/// The part of the memory that blocks may take, in percent.
const MEMORY_PERCENT: u64 = 80;

pub struct Loader {
    path: PathBuf,
    checkpoint: Checkpoint,
    placement: BlockPlacement,
    options: LoadOptions,
    cpu: CpuOptions,
}

impl Loader {
    pub fn new(
        path: &Path,
        checkpoint: Checkpoint,
        execution: &ExecutionOptions,
        placement: BlockPlacement,
        threads: &ThreadOption,
        kv_tokens: Option<usize>,
        sessions: usize,
    ) -> Result<Self> {
        let positions = execution.context(&checkpoint, CONTEXT_DEFAULT)?;
        let tokens = kv_tokens.unwrap_or(4 * positions).max(positions);
        let kv_pages = tokens.div_ceil(PAGE_TOKENS);
        let sequences = sessions.max(1);
        let step = StepLimits { rows: STEP_ROWS.max(sequences), sequences, pages: 2 * kv_pages };
        // A block returns states, and no logits; the limit bounds the sequences of a step.
        let limits = Limits { step, logit_rows: sequences, kv_pages, positions };
        let options = LoadOptions { keep: execution.keep()?, limits };
        let cpu = execution.cpu(&checkpoint, threads.per_rank(placement.world().get()))?;
        Ok(Self { path: path.to_owned(), checkpoint, placement, options, cpu })
    }

    /// The most layers that fit into this machine's memory, on all of its ranks together.
    pub fn layers_max(&self, memory: Option<u64>) -> Result<usize> {
        let free = memory_available().map(|free| free / 100 * MEMORY_PERCENT);
        let available = memory.or(free).unwrap_or(u64::MAX);
        let all = self.checkpoint.description().layers.len();
        let fits = |count: usize| -> Result<bool> {
            let layers = LayerRange::new(0, u32::try_from(count)?).expect("one layer at least");
            Ok(self.footprints(layers)?.iter().map(Footprint::total).sum::<u64>() <= available)
        };
        let (mut most, mut too_many) = (0, all + 1);
        while too_many - most > 1 {
            let middle = usize::midpoint(most, too_many);
            if fits(middle)? { most = middle } else { too_many = middle }
        }
        anyhow::ensure!(most > 0, "{} MiB are free, which is too little for one layer", available >> 20);
        Ok(most)
    }

    /// What the model has outside its layers, for coordinators that send tokens and want logits.
    pub fn embedding_and_head(&self) -> Result<EmbeddingAndHead<CpuBackend>> {
        let backend = CpuBackend::new(self.cpu)?;
        Ok(EmbeddingAndHead::load(backend, &self.checkpoint, &self.options)?)
    }

    /// The memory that each rank needs for a block.
    fn footprints(&self, layers: LayerRange) -> Result<Vec<Footprint>> {
        let (part, ranks) = (ModelPart::stage(layers), self.placement.world().ranks());
        footprints(&self.checkpoint, &self.options, self.cpu, part, ranks)
    }

    fn load_block(&self, layers: LayerRange) -> Result<Box<dyn Executor>> {
        let Self { path, checkpoint, options, cpu, .. } = self;
        let model = OpenedModel { path, checkpoint, options: *options, cpu: *cpu };
        Ok(match &self.placement {
            BlockPlacement::Here => {
                check_memory(&self.footprints(layers)?)?;
                let stage = Stage::load(CpuBackend::new(*cpu)?, checkpoint, options, layers, &mut |_| {})?;
                checkpoint.release();
                Box::new(stage)
            }
            BlockPlacement::Ranks(ranks) => {
                check_memory(&self.footprints(layers)?)?;
                Box::new(group::start(ranks, &model, Some(layers), &mut |_| {})?)
            }
            BlockPlacement::Cluster(machines) => {
                Box::new(cluster::form(machines, &model, Some(layers), &mut |_: usize| {})?)
            }
        })
    }
}

impl BlockLoader for Loader {
    fn load(&mut self, layers: LayerRange) -> Result<LoadedBlock, String> {
        let executor = self.load_block(layers).map_err(|error| format!("{error:#}"))?;
        let shape = BlockShape {
            layers,
            has_parts: matches!(self.placement, BlockPlacement::Here),
            hidden: self.checkpoint.description().hidden,
            positions_max: self.options.limits.positions,
            rows_max: executor.capacity().rows_max,
        };
        Ok(LoadedBlock { executor, shape })
    }
}
