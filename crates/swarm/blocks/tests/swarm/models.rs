//! The models of `fixtures/oracle`, as blocks and as clients.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blocks::block::{BlockHandle, BlockLimits, BlockShape};
use blocks::client::{ClientOptions, SwarmExecutor};
use directory::{ModelDigest, PeerId};
use engine::{CoordinatorStage, Executor, LocalExecutor, Stage};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions, ModelPart};
use serde_json::Value;
use tokio::runtime::Handle;
use types::{LayerRange, TokenId};

use crate::gated::{Gate, GatedStage};
use crate::lying::{Lie, LyingStage};
use crate::network::Network;

pub const LIMITS: Limits =
    Limits { step: StepLimits { rows: 64, sequences: 16, pages: 128 }, logit_rows: 64, kv_pages: 64, positions: 600 };
const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

pub struct Model {
    pub checkpoint: Checkpoint,
    pub layers: usize,
    pub digest: ModelDigest,
}

impl Model {
    pub fn open(path: &Path) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        let layers = checkpoint.description().layers.len();
        Self { checkpoint, layers, digest: ModelDigest([7; 32]) }
    }

    pub fn qwen3() -> Self {
        Self::open(&oracle().join("qwen3/model-f32"))
    }

    pub fn local(&self) -> LocalExecutor<CpuBackend> {
        LocalExecutor::load(backend(), &self.checkpoint, &OPTIONS, &mut |_| {}).unwrap()
    }

    /// A block of some layers, ready to serve.
    pub fn block(&self, layers: LayerRange, limits: BlockLimits) -> BlockHandle {
        let block = BlockHandle::warming_up();
        self.load(&block, layers, limits);
        block
    }

    /// A block that returns something else than it computed.
    pub fn lying_block(&self, layers: LayerRange, lie: Lie) -> BlockHandle {
        self.block_of(layers, Box::new(LyingStage::new(self.stage(layers), lie)), BlockLimits::default())
    }

    /// A block with a stage of a test.
    pub fn block_of(&self, layers: LayerRange, stage: Box<dyn Executor>, limits: BlockLimits) -> BlockHandle {
        let block = BlockHandle::warming_up();
        block.serve(stage, self.shape(layers), limits).unwrap();
        block
    }

    /// A block whose steps end when a test lets them.
    pub fn gated_block(&self, layers: LayerRange, limits: BlockLimits) -> (BlockHandle, Arc<Gate>) {
        let (block, gate) = (BlockHandle::warming_up(), Arc::<Gate>::default());
        let stage = GatedStage { stage: self.stage(layers), gate: Arc::clone(&gate) };
        block.serve(Box::new(stage), self.shape(layers), limits).unwrap();
        (block, gate)
    }

    /// Loads the weights of a block.
    pub fn load(&self, block: &BlockHandle, layers: LayerRange, limits: BlockLimits) {
        block.serve(Box::new(self.stage(layers)), self.shape(layers), limits).unwrap();
    }

    pub fn stage(&self, layers: LayerRange) -> Stage<CpuBackend> {
        Stage::load(backend(), &self.checkpoint, &OPTIONS, layers, &mut |_| {}).unwrap()
    }

    fn shape(&self, layers: LayerRange) -> BlockShape {
        BlockShape {
            layers,
            has_parts: true,
            hidden: self.checkpoint.description().hidden,
            positions_max: LIMITS.positions,
            rows_max: LIMITS.step.rows,
        }
    }

    pub fn client(&self, network: &Arc<Network>, options: ClientOptions) -> SwarmExecutor<CpuBackend> {
        let ends =
            CoordinatorStage::load(backend(), &self.checkpoint, &OPTIONS, ModelPart::coordinator(0), &mut |_| {})
                .unwrap();
        let dial = network.dial_of(peer(0));
        let view = Arc::clone(network.view());
        SwarmExecutor::new(ends, self.layers, self.digest, dial, view, options, HashMap::new(), Handle::current())
    }
}

pub fn peer(number: u8) -> PeerId {
    PeerId::new(&[b'p', number]).unwrap()
}

pub fn range(start: usize, end: usize) -> LayerRange {
    LayerRange::new(start as u32, end as u32).unwrap()
}

fn oracle() -> PathBuf {
    testing::oracle("")
}

/// All models of `fixtures/oracle`: each architecture in the formats that it has.
pub fn oracle_models() -> Vec<PathBuf> {
    let inside = ["model-f32", "model-bf16", "gguf/tiny-llama-q8_0.gguf", "gguf/tiny-qwen3-q8_0.gguf"];
    let folders = fs::read_dir(oracle()).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = folders.flat_map(|folder| inside.map(|inside| folder.join(inside))).collect();
    models.retain(|path| path.exists());
    models.sort();
    assert!(models.len() >= 15, "{models:?}");
    models
}

/// The prompts of a model.
pub fn prompts(model: &Path) -> Vec<Vec<TokenId>> {
    let folder = model.ancestors().find(|folder| folder.join("manifest.json").exists()).unwrap();
    let manifest: Value = serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap();
    let tokens = |ids: &Value| ids.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect();
    manifest["prompts"].as_array().unwrap().iter().map(|prompt| tokens(&prompt["ids"])).collect()
}

pub fn qwen3_prompts() -> Vec<Vec<TokenId>> {
    prompts(&oracle().join("qwen3/model-f32"))
}
