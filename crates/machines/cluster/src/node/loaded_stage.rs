//! `LoadedStage`: a range of layers that a node has loaded, and how it gets there: tensors from the store or from the
//! coordinator, then the weights of the layers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use engine::Executor;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use kernels::{Backend as _, KvShape};
use model::{Checkpoint, Footprint, LoadOptions, ModelPart};
use tracing::info;
use types::{LayerRange, WorldSize};

use super::NodeShared;
use super::memory::MemoryShare;
use super::observer::IncomingWeights;
use super::stage_executor::{NodeRanks, StageExecutor, StageSource};
use super::stage_loop::StageShape;
use crate::purpose::{ConnectionId, WEIGHTS};
use crate::wire::control::StageSpec;
use net::LastHeard;
use weights::{Download, PinnedTensors, TensorId};

/// How long a transfer may go without a byte.
const TRANSFER_SILENCE: Duration = Duration::from_secs(30);
/// How often progress is reported.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Characters of a model's name that the log shows.
const NAME_CHARS_MAX: usize = 64;

/// How far a stage is loaded.
#[derive(Clone, Copy, Debug)]
pub(super) enum LoadProgress {
    /// So many bytes are to come, over connections for this transfer.
    Missing {
        transfer: u64,
        bytes: u64,
    },
    Loading {
        bytes: u64,
        layers: u32,
    },
}

pub(super) struct LoadedStage {
    label: StageLabel,
    spec: StageSpec,
    executor: StageExecutor,
    /// Of each rank.
    footprints: Vec<Footprint>,
    shape: StageShape,
    memory: MemoryShare,
    /// Its tensors stay in the store while it is loaded, so that it can be loaded again at once.
    _pinned: Arc<PinnedTensors>,
}

impl LoadedStage {
    /// Loads a stage. `report` returns false if nobody wants it any more.
    pub fn load(
        node: &NodeShared,
        spec: &StageSpec,
        coordinator: &LastHeard,
        report: &mut dyn FnMut(LoadProgress) -> bool,
    ) -> Result<Self, String> {
        let layers = stage_layers(spec)?;
        let options = load_options(spec)?;
        node.memory.check(memory_min(spec, layers, &options)?)?;
        let pinned = fetch(node, spec, coordinator, report)?;
        let part = ModelPart::stage(layers);
        let label = StageLabel::new(spec, layers);
        let checkpoint = Checkpoint::from_manifest(&spec.manifest, part, |_, tensor| {
            let hash = tensor.hash.ok_or_else(|| std::io::Error::other("the manifest lacks a hash"))?;
            pinned.path(&hash).map_err(std::io::Error::other)
        });
        let checkpoint = checkpoint.map_err(|error| error.to_string())?;
        let (cpu, ranks) = (node.cpu(spec)?, node.ranks_of(spec));
        let source = StageSource {
            manifest: &spec.manifest,
            checkpoint: &checkpoint,
            store: &node.store,
            layers,
            options: &options,
            cpu,
        };
        let shape = StageShape { rows_max: options.limits.step.rows, hidden: checkpoint.description().hidden };
        let mut progress = LayerProgress::new(report);
        let footprints = source.footprints(ranks.map_or(WorldSize::ONE, |ranks| ranks.world))?;
        let memory = node.memory.take(footprints.iter().map(Footprint::total).fold(0, u64::saturating_add))?;
        let executor = StageExecutor::load(&source, &footprints, ranks, &mut |layers| progress.update(layers))?;
        if !progress.is_wanted {
            return Err("it is not wanted any more".to_owned());
        }
        let stage = Self { label, spec: spec.clone(), executor, footprints, shape, memory, _pinned: pinned };
        let (weight_bytes, kv_bytes) = (stage.weight_bytes(), stage.kv_bytes());
        info!(model = stage.label.model, %layers, weight_bytes, kv_bytes, "layers are loaded");
        Ok(stage)
    }

    /// Makes it whole again, if a part of it was lost in the chain before.
    pub fn restore(&mut self, report: &mut dyn FnMut(LoadProgress) -> bool) -> Result<(), String> {
        let mut progress = LayerProgress::new(report);
        self.executor.restore(&mut |layers| progress.update(layers))
    }

    /// Whether it is what `spec` asks for.
    pub fn is(&self, spec: &StageSpec) -> bool {
        self.spec == *spec
    }

    /// Closes all sessions, for another chain.
    pub fn clear(&mut self) {
        self.executor.clear();
    }

    pub fn label(&self) -> &StageLabel {
        &self.label
    }

    pub fn executor(&mut self) -> &mut dyn Executor {
        self.executor.executor()
    }

    pub fn shape(&self) -> StageShape {
        self.shape
    }

    /// All that it holds.
    pub fn memory_bytes(&self) -> u64 {
        self.memory.bytes()
    }

    pub fn weight_bytes(&self) -> u64 {
        self.footprints.iter().map(|footprint| footprint.weights).sum()
    }

    pub fn kv_bytes(&self) -> u64 {
        self.footprints.iter().map(|footprint| footprint.kv).sum()
    }
}

/// Says that its memory is freed.
impl Drop for LoadedStage {
    fn drop(&mut self) {
        let StageLabel { model, layers } = &self.label;
        info!(model, %layers, "layers are unloaded");
    }
}

/// What a stage is, for people.
#[derive(Clone, Debug)]
pub(super) struct StageLabel {
    pub model: String,
    pub layers: LayerRange,
}

impl StageLabel {
    fn new(spec: &StageSpec, layers: LayerRange) -> Self {
        Self { model: spec.model.chars().take(NAME_CHARS_MAX).collect(), layers }
    }
}

/// Reports how many layers are loaded: when there are more, and from time to time.
struct LayerProgress<'a> {
    report: &'a mut dyn FnMut(LoadProgress) -> bool,
    is_wanted: bool,
    /// The last report.
    layers: usize,
    reported_at: Instant,
}

impl<'a> LayerProgress<'a> {
    fn new(report: &'a mut dyn FnMut(LoadProgress) -> bool) -> Self {
        Self { report, is_wanted: true, layers: 0, reported_at: Instant::now() }
    }

    fn update(&mut self, layers: usize) {
        if layers == self.layers && self.reported_at.elapsed() < PROGRESS_INTERVAL {
            return;
        }
        (self.layers, self.reported_at) = (layers, Instant::now());
        self.is_wanted &= (self.report)(LoadProgress::Loading { bytes: 0, layers: layers as u32 });
    }
}

fn stage_layers(spec: &StageSpec) -> Result<LayerRange, String> {
    spec.layers().ok_or_else(|| "a stage has at least one layer".to_owned())
}

/// The least memory of a stage, as far as the manifest tells: its matrices in the format to keep, and its KV cache. What more it
/// needs is known once its tensors are there.
fn memory_min(spec: &StageSpec, layers: LayerRange, options: &LoadOptions) -> Result<u64, String> {
    let needed = spec.manifest.tensors_of(ModelPart::stage(layers)).map_err(|error| error.to_string())?;
    let tensors = needed.iter().map(|&index| &spec.manifest.tensors()[index]);
    let kept = tensors.filter(|tensor| tensor.shape.len() >= 2).map(|tensor| {
        let elements = tensor.shape.iter().fold(1, |product: u64, &side| product.saturating_mul(side as u64));
        let (block, bytes) =
            options.keep.map_or((1, 0), |format| (format.block_elements() as u64, format.block_bytes() as u64));
        // A matrix that is not whole blocks stays as it is.
        if options.keep.is_some() { tensor.bytes.min(elements / block * bytes) } else { tensor.bytes }
    });
    let description = spec.manifest.description();
    let shape = KvShape { kv_heads: description.kv_heads, head_dim: description.head_dim };
    let backend = CpuBackend::new(CpuOptions { threads: 1, kv: spec.kv.into(), ..CpuOptions::default() });
    let layer = backend.map_err(|error| error.to_string())?.kv_bytes(shape, options.limits.kv_pages) as u64;
    Ok(kept.fold(layer.saturating_mul(layers.count() as u64), u64::saturating_add))
}

/// Has all tensors of a stage in the store, for as long as the result lives. `report` returns false if nobody wants them any
/// more.
pub(super) fn fetch(
    node: &NodeShared,
    spec: &StageSpec,
    coordinator: &LastHeard,
    report: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<Arc<PinnedTensors>, String> {
    let layers = stage_layers(spec)?;
    let needed = spec.manifest.tensors_of(ModelPart::stage(layers)).map_err(|error| error.to_string())?;
    let id = |index: &usize| {
        let tensor = &spec.manifest.tensors()[*index];
        tensor.hash.map(|hash| TensorId { hash, bytes: tensor.bytes })
    };
    let ids: Option<Vec<_>> = needed.iter().map(id).collect();
    let ids = ids.ok_or("the manifest lacks a hash")?;
    let pinned = Arc::new(node.store.pin(&ids).map_err(|error| error.to_string())?);
    receive(node, &StageLabel::new(spec, layers), &pinned, coordinator, report)?;
    Ok(pinned)
}

/// Receives the tensors that are not in the store.
fn receive(
    node: &NodeShared,
    label: &StageLabel,
    pinned: &Arc<PinnedTensors>,
    coordinator: &LastHeard,
    report: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<(), String> {
    static TRANSFERS: AtomicU64 = AtomicU64::new(1);
    let missing = pinned.verify(node.threads * node.world().get(), &|_| {}).map_err(|error| error.to_string())?;
    if missing.is_empty() {
        return Ok(());
    }
    let bytes = missing.iter().map(|id| id.bytes).sum();
    let number = TRANSFERS.fetch_add(1, Ordering::Relaxed);
    let expected = node.expected.expect(ConnectionId { purpose: WEIGHTS, number, index: 0 });
    if !report(LoadProgress::Missing { transfer: number, bytes }) {
        return Err("the coordinator is gone".to_owned());
    }
    let download = Download::new(Arc::clone(pinned), &missing, |_| {});
    let mut show = node.observer.receiving(&IncomingWeights { model: &label.model, layers: label.layers, bytes });
    thread::scope(|scope| {
        let (mut last, mut heard_at) = (0, Instant::now());
        loop {
            if let Some(connection) = expected.next(Instant::now() + Duration::from_millis(20), &|| false) {
                let download = &download;
                let mut connection = connection;
                connection.stream.receiver.share_last_heard(coordinator.clone());
                scope.spawn(move || {
                    let slot = connection.slot;
                    // The download goes on over the other connections, or over one that comes later.
                    if let Err(error) = download.receive(connection.stream) {
                        tracing::debug!("a connection for weights has ended: {error}");
                    }
                    drop(slot);
                });
            }
            let ended = download.wait(PROGRESS_INTERVAL);
            let received = download.progress().received;
            show(received);
            if let Some(ended) = ended {
                return ended.map_err(|error| error.to_string());
            }
            if received > last {
                (last, heard_at) = (received, Instant::now());
            }
            let is_wanted = report(LoadProgress::Loading { bytes: received, layers: 0 });
            if !is_wanted || heard_at.elapsed() > TRANSFER_SILENCE {
                download.cancel();
                return Err(format!("{received} of {bytes} bytes of weights have come"));
            }
        }
    })
}

fn load_options(spec: &StageSpec) -> Result<LoadOptions, String> {
    let format = |name: &String| name.parse().map_err(|_| format!("{name:?} is not a format of weights"));
    let limits = spec.limits.checked().map_err(|error| error.to_string())?;
    Ok(LoadOptions { keep: spec.keep.as_ref().map(format).transpose()?, limits })
}

impl NodeShared {
    /// The CPU options of a stage, or of each of its ranks: those of the coordinator, with this machine's threads and its best
    /// instructions, unless the coordinator asks for one arithmetic on all machines.
    fn cpu(&self, spec: &StageSpec) -> Result<CpuOptions, String> {
        let level = match spec.exact.map(Level::from) {
            None => self.level,
            Some(exact) if exact <= self.level => exact,
            Some(exact) => return Err(format!("this machine computes with {}, not with {exact}", self.level)),
        };
        let threads = if self.ranks_of(spec).is_some() { self.threads } else { self.threads * self.world().get() };
        let (decode, prompt) = (spec.decode.into(), spec.prompt.into());
        Ok(CpuOptions { threads, level, kv: spec.kv.into(), decode, prompt }.at(level))
    }

    /// Ranks that share the layers of a stage. Their sums are taken in another order than those of one process, so a stage that
    /// has to be exact runs in one process.
    fn ranks_of(&self, spec: &StageSpec) -> Option<&NodeRanks> {
        self.ranks.as_ref().filter(|_| spec.exact.is_none())
    }

    fn world(&self) -> WorldSize {
        self.ranks.as_ref().map_or(WorldSize::ONE, |ranks| ranks.world)
    }
}
