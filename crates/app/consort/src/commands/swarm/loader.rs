//! `Loader`: loads the blocks that this machine serves: in this process, on ranks, or on machines of its LAN.

use std::path::{Path, PathBuf};

use anyhow::Result;
use engine::{EmbeddingAndHead, Executor, Stage};
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use peers::block::BlockShape;
use peers::node::{BlockLoader, LoadedBlock};
use ranks::{check_memory, memory_available};
use types::{LayerRange, Rank};

use crate::options::{CONTEXT_DEFAULT, ModelOptions, ThreadOption};

/// Rows of one step, of all clients together, and of one run of a client.
const STEP_ROWS: usize = 512;
/// The part of the memory that blocks may take, in percent.
const MEMORY_PERCENT: u64 = 80;

pub struct Loader {
    path: PathBuf,
    checkpoint: Checkpoint,
    model: ModelOptions,
    options: LoadOptions,
    cpu: CpuOptions,
}

impl Loader {
    pub fn new(
        path: &Path,
        checkpoint: Checkpoint,
        model: &ModelOptions,
        threads: &ThreadOption,
        kv_tokens: Option<usize>,
        sessions: usize,
    ) -> Result<Self> {
        let positions = model.context(&checkpoint, CONTEXT_DEFAULT)?;
        let tokens = kv_tokens.unwrap_or(4 * positions).max(positions);
        let kv_pages = tokens.div_ceil(PAGE_TOKENS);
        let sequences = sessions.max(1);
        let step = StepLimits { rows: STEP_ROWS.max(sequences), sequences, pages: 2 * kv_pages };
        // A block returns states, and no logits; the limit bounds the sequences of a step.
        let limits = Limits { step, logit_rows: sequences, kv_pages, positions };
        let (options, cpu) = model.block_options(&checkpoint, limits, threads)?;
        Ok(Self { path: path.to_owned(), checkpoint, model: model.clone(), options, cpu })
    }

    /// The most layers that fit into this machine's memory, on all of its ranks together.
    pub fn layers_max(&self, memory: Option<u64>) -> Result<usize> {
        let free = memory_available().map(|free| free / 100 * MEMORY_PERCENT);
        let available = memory.or(free).unwrap_or(u64::MAX);
        let all = self.checkpoint.description().layers.len();
        let fits = |count: usize| -> Result<bool> {
            let layers = LayerRange::new(0, u32::try_from(count)?).expect("one layer at least");
            let ranks = self.model.block_footprints(&self.checkpoint, &self.options, layers)?;
            Ok(ranks.iter().map(Footprint::total).sum::<u64>() <= available)
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

    fn load_stage(&self, layers: LayerRange) -> Result<Box<dyn Executor>> {
        let backend = CpuBackend::new(self.cpu)?;
        let part = ModelPart::stage(layers);
        check_memory(&[Footprint::new(&backend, &self.checkpoint, &self.options, part, Rank::SINGLE)?])?;
        let stage = Stage::load(backend, &self.checkpoint, &self.options, layers, &mut |_| {})?;
        self.checkpoint.release();
        Ok(Box::new(stage))
    }
}

impl BlockLoader for Loader {
    fn load(&mut self, layers: LayerRange) -> Result<LoadedBlock, String> {
        let loaded = match self.model.load_block(&self.path, &self.checkpoint, &self.options, self.cpu, layers) {
            Ok(None) => self.load_stage(layers).map(|stage| (stage, true)),
            Ok(Some(executor)) => Ok((executor, false)),
            Err(error) => Err(error),
        };
        let (executor, has_parts) = loaded.map_err(|error| format!("{error:#}"))?;
        let shape = BlockShape {
            layers,
            has_parts,
            hidden: self.checkpoint.description().hidden,
            positions_max: self.options.limits.positions,
            rows_max: executor.capacity().rows_max,
        };
        Ok(LoadedBlock { executor, shape })
    }
}
