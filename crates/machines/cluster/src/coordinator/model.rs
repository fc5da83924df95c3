//! `ClusterModel`: the model that a cluster runs, as its coordinator has it: the files, their manifest with the hashes of all
//! tensors, how it is loaded, and the facts that the planner needs.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::CoordinatorStage;
use kernels::PAGE_TOKENS;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::{Checkpoint, FeedForward, Footprint, LoadError, LoadOptions, Manifest, ModelPart};
use net::{ClusterKey, MessageStream, WaitLimit};
use ranks::protocol::shard::{CpuLevel, WireLimits};
use types::{LayerRange, Rank, WorldSize};

use crate::purpose::{ConnectionId, WEIGHTS};
use crate::wire::control::{StageSpec, WireFacts};
use plan::{HeadFacts, LayerFacts, Link, ModelFacts, NodeFacts, Workload};
use weights::{CONNECTIONS_DEFAULT, HashCache, TensorSource, TransferError, Upload, upload};

/// The link that is assumed between two nodes that have not measured it: a cable and a switch.
const LINK_DEFAULT: Link = Link { round_trip_seconds: 0.5e-3, bytes_per_s: 100e6 };
/// How long one connection for weights may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum ClusterModelError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("read {}", path.display())]
    Hash { path: PathBuf, source: io::Error },
}

pub struct ClusterModelConfig {
    /// For people.
    pub name: String,
    pub checkpoint: Checkpoint,
    /// The layers that the cluster runs, between activations and states. `None`: the whole model, from tokens to samples.
    pub layers: Option<LayerRange>,
    pub options: LoadOptions,
    pub cpu: CpuOptions,
    /// The coordinator's machine.
    pub own: NodeFacts,
    pub workload: Workload,
}

pub struct ClusterModel {
    checkpoint: Checkpoint,
    manifest: Manifest,
    /// The index of a tensor in the manifest.
    by_hash: HashMap<[u8; 32], usize>,
    /// What the cluster runs, and its layers.
    part: ModelPart,
    layers: LayerRange,
    options: LoadOptions,
    cpu: CpuOptions,
    facts: ModelFacts,
    workload: Workload,
    own: NodeFacts,
    /// For numbers of ranks that nodes have: why they cannot share each layer, if so.
    splits: Mutex<BTreeMap<u16, Option<String>>>,
}

impl ClusterModel {
    /// Hashes the tensors that the cluster needs, unless `hashes` knows them. `progress` gets the number of bytes that were hashed since
    /// its last call.
    pub fn new(
        config: ClusterModelConfig,
        hashes: &HashCache,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Self, ClusterModelError> {
        let ClusterModelConfig { name, checkpoint, layers, options, cpu, own, workload } = config;
        let part = layers.map_or_else(|| ModelPart::whole(checkpoint.description()), ModelPart::stage);
        let layers = part.layers.expect("a model has layers");
        let mut manifest = checkpoint.manifest()?;
        let needed = manifest.tensors_of(part)?;
        hash_tensors(&checkpoint, &mut manifest, &needed, hashes, cpu.threads, progress)?;
        let hashed = manifest.tensors().iter().enumerate();
        let by_hash = hashed.filter_map(|(index, tensor)| Some((tensor.hash?, index))).collect();
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..cpu }).map_err(LoadError::from)?;
        let facts = model_facts(&name, &backend, &checkpoint, &options, (part, layers))?;
        let splits = Mutex::default();
        Ok(Self { checkpoint, manifest, by_hash, part, layers, options, cpu, facts, workload, own, splits })
    }

    /// Of the layers that the cluster runs. The planner counts from the first of them.
    pub fn facts(&self) -> &ModelFacts {
        &self.facts
    }

    /// The layers that the cluster runs.
    pub fn layers(&self) -> LayerRange {
        self.layers
    }

    pub fn workload(&self) -> Workload {
        self.workload
    }

    pub(super) fn default_link(&self) -> Link {
        LINK_DEFAULT
    }

    /// The best level of the coordinator's machine.
    pub(super) fn level(&self) -> Level {
        self.cpu.level
    }

    /// The coordinator's machine. What its part of the last chain takes counts as free. With `exact`, all machines compute with
    /// this level.
    pub(super) fn own_facts(&self, exact: Option<Level>) -> NodeFacts {
        NodeFacts { level: exact.unwrap_or(self.own.level), ..self.own.clone() }
    }

    pub(super) fn node_facts(&self, address: SocketAddr, facts: &WireFacts, exact: Option<Level>) -> NodeFacts {
        let ranks = if exact.is_some() { 1 } else { facts.ranks };
        // The planner counts working memory once.
        let working = self.facts.stage_working_bytes.saturating_mul(u64::from(ranks.max(1)) - 1);
        NodeFacts {
            name: facts.name.clone(),
            address: Some(address.into()),
            level: exact.unwrap_or(facts.level.into()),
            threads: facts.threads as usize,
            memory_free: facts.memory_bytes.saturating_sub(working),
            read_bytes_per_s: facts.weight_bytes_per_s,
            multiply_adds_per_s: facts.multiply_adds_per_s,
            step_seconds: facts.step_seconds,
        }
    }

    /// Why so many ranks cannot share each layer, if so.
    pub(super) fn cannot_split(&self, ranks: u16) -> Option<String> {
        let Some(world) = WorldSize::new(ranks) else { return Some("it says that it has no ranks".to_owned()) };
        let mut known = self.splits.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry(ranks).or_insert_with(|| self.try_split(world).err().map(|error| error.to_string())).clone()
    }

    fn try_split(&self, world: WorldSize) -> Result<(), LoadError> {
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..self.cpu })?;
        if world == WorldSize::ONE {
            return Ok(());
        }
        let part = ModelPart::stage(self.layers);
        let footprint = |rank| Footprint::new(&backend, &self.checkpoint, &self.options, part, rank).map(drop);
        world.ranks().try_for_each(footprint)
    }

    /// Rows of the largest step.
    pub(super) fn rows_max(&self) -> usize {
        self.options.limits.step.rows
    }

    pub(super) fn stage_spec(&self, layers: LayerRange, exact: Option<Level>) -> StageSpec {
        let cpu = exact.map_or(self.cpu, |level| self.cpu.at(level));
        StageSpec {
            model: self.facts.name.clone(),
            manifest: self.manifest.clone(),
            layer_start: layers.start() as u32,
            layer_end: layers.end() as u32,
            keep: self.options.keep.map(|format| format.name().to_owned()),
            exact: exact.map(CpuLevel::from),
            kv: cpu.kv.into(),
            decode: cpu.decode.into(),
            prompt: cpu.prompt.into(),
            limits: WireLimits::from(&self.options.limits),
        }
    }

    /// The coordinator's part with so many layers.
    pub(super) fn own_part(&self, layers: usize) -> ModelPart {
        self.part.first(layers)
    }

    /// Loads the coordinator's part, to compute with this level.
    pub(super) fn load_own(&self, part: ModelPart, level: Level) -> Result<CoordinatorStage<CpuBackend>, String> {
        let backend = CpuBackend::new(self.cpu.at(level)).map_err(|error| error.to_string())?;
        let footprint = Footprint::new(&backend, &self.checkpoint, &self.options, part, Rank::SINGLE);
        let footprint = footprint.map_err(|error| error.to_string())?;
        ranks::check_memory(&[footprint]).map_err(|error| error.to_string())?;
        let stage = CoordinatorStage::load(backend, &self.checkpoint, &self.options, part, &mut |_| {});
        self.checkpoint.release();
        stage.map_err(|error| error.to_string())
    }

    /// Serves a node's requests for tensors, until it has what it needs.
    pub(super) fn send_weights(
        &self,
        address: SocketAddr,
        key: &ClusterKey,
        silence: Duration,
        transfer: u64,
        is_over: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), TransferError> {
        let hello = ConnectionId { purpose: WEIGHTS, number: transfer, index: 0 }.hello(silence);
        let dial =
            || MessageStream::connect(address, key, &hello, &WaitLimit::until(Instant::now() + CONNECT_DEADLINE));
        let sent =
            upload(&Upload { dial: &dial, connections: CONNECTIONS_DEFAULT, source: self, sent: &|_| {}, is_over });
        // The pages of the files would stay, of more layers with each chain. They are read again if they are needed again.
        self.checkpoint.release();
        sent
    }
}

impl TensorSource for ClusterModel {
    fn tensor(&self, hash: &[u8; 32]) -> Option<&[u8]> {
        let tensor = &self.manifest.tensors()[*self.by_hash.get(hash)?];
        self.checkpoint.tensor_bytes(tensor).ok()
    }
}

/// Hashes these tensors, file by file.
fn hash_tensors(
    checkpoint: &Checkpoint,
    manifest: &mut Manifest,
    indices: &[usize],
    hashes: &HashCache,
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), ClusterModelError> {
    let mut files: BTreeMap<PathBuf, Vec<(usize, std::ops::Range<u64>)>> = BTreeMap::new();
    for &index in indices {
        if let Some((path, range)) = checkpoint.tensor_location(&manifest.tensors()[index]) {
            files.entry(path.to_owned()).or_default().push((index, range.start as u64..range.end as u64));
        }
    }
    for (path, tensors) in files {
        let ranges: Vec<_> = tensors.iter().map(|(_, range)| range.clone()).collect();
        let found = hashes.hashes(&path, &ranges, threads, progress);
        let found = found.map_err(|source| ClusterModelError::Hash { path, source })?;
        tensors.iter().zip(found).for_each(|((index, _), hash)| manifest.set_hash(*index, hash));
    }
    Ok(())
}

/// What the planner needs to know of a model, or of a part of one.
fn model_facts(
    name: &str,
    backend: &CpuBackend,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    (part, range): (ModelPart, LayerRange),
) -> Result<ModelFacts, LoadError> {
    let description = checkpoint.description();
    let footprint = |part| Footprint::new(backend, checkpoint, options, part, Rank::SINGLE);
    let kv_tokens = (options.limits.kv_pages * PAGE_TOKENS).max(1) as u64;
    let manifest = checkpoint.manifest()?;
    let elements = |part| -> Result<u64, LoadError> {
        let indices = manifest.tensors_of(part)?;
        let shapes = indices.iter().map(|&index| &manifest.tensors()[index].shape);
        Ok(shapes.map(|shape| shape.iter().map(|&dim| dim as u64).product::<u64>()).sum())
    };
    let one =
        |index: usize| ModelPart::stage(LayerRange::new(index as u32, index as u32 + 1).expect("a range of one layer"));
    let mut layers = Vec::with_capacity(range.count());
    for index in range.iter() {
        let (Footprint { weights, kv, .. }, elements) = (footprint(one(index))?, elements(one(index))?);
        // Of a layer with experts a token uses a few; the rest of the layer is small beside them.
        let used = match description.layers[index].feed_forward {
            FeedForward::Dense { .. } => 1.0,
            FeedForward::Experts { routing, .. } => routing.chosen as f64 / routing.experts as f64,
        };
        layers.push(LayerFacts {
            weight_bytes: weights,
            token_bytes: (weights as f64 * used) as u64,
            kv_bytes: kv / kv_tokens,
            multiply_adds: (elements as f64 * used) as u64,
        });
    }
    let head = footprint(part.first(0))?;
    let table = (description.vocab as u64).saturating_mul(description.hidden as u64);
    let multiply_adds = if part.has_embedding_and_head { table } else { 0 };
    let read_bytes = if description.tied { head.weights } else { head.weights / 2 };
    Ok(ModelFacts {
        name: name.to_owned(),
        hidden: description.hidden,
        layers,
        head: HeadFacts { weight_bytes: head.weights, read_bytes, multiply_adds, working_bytes: head.working },
        stage_working_bytes: footprint(one(range.start()))?.working,
    })
}
