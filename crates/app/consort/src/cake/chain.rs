//! A chain of cake workers: how they are found, and how the chain is formed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ::cake::{
    CakeChainBuilder, CakeChainConfig, CakeKey, CakeLayerPrefix, CakeSetupProgress, CakeStagePlan, WORKERS_MAX,
    broadcast_addresses, discover, split_by_memory,
};
use anyhow::{Context, Result, bail};
use cluster::chain::{Chain, ChainTimes};
use engine::CoordinatorStage;
use indicatif::ProgressBar;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Footprint, LoadOptions, ModelPart};
use net::PeerAddress;
use ranks::{check_memory, memory_available};
use tracing::{info, warn};
use types::{LayerRange, Rank};

use super::monitor::{CakeMonitor, MonitoredBuilder};
use super::options::{CakeDiscovery, CakePlacement};
use crate::executors::{LoadObserver, LoadedModel, OpenedModel};
use crate::options::KeyOptions;
use crate::progress;
use crate::terminal;
use crate::usage::UsageError;

/// How long cake workers are looked for.
const DISCOVERY: Duration = Duration::from_secs(3);
/// How long a worker may take for a step. The protocol has no signs of life.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);

/// A worker that was named or has answered.
struct FoundWorker {
    host: String,
    /// What it says of its memory.
    memory: Option<u64>,
}

impl CakePlacement {
    /// Finds workers, gives them layers, and forms a chain.
    pub fn form(&self, model: &OpenedModel<'_>, observer: &mut dyn LoadObserver) -> Result<Box<dyn LoadedModel>> {
        let key = cake_key(&self.key)?;
        note_plaintext();
        let workers = self.find_workers(&key)?;
        let layers = model.checkpoint.description().layers.len();
        let counts = match &self.split[..] {
            [] => {
                let memories: Vec<_> = workers.iter().map(|worker| worker.memory).collect();
                split_by_memory(layers, memory_available().unwrap_or_default(), &memories)
            }
            counts => counts.to_vec(),
        };
        let hosts = workers.into_iter().map(|worker| worker.host);
        self.form_stages(key, stage_plans(hosts.zip(counts), layers)?, model, observer)
    }

    /// Forms a chain of these workers, in the order of their layers. Those before the first worker's are this machine's.
    fn form_stages(
        &self,
        key: CakeKey,
        stages: Vec<CakeStagePlan>,
        model: &OpenedModel<'_>,
        observer: &mut dyn LoadObserver,
    ) -> Result<Box<dyn LoadedModel>> {
        let OpenedModel { path, checkpoint, options, cpu } = *model;
        if checkpoint.gguf().is_some() {
            bail!("cake workers run models of config.json and safetensors, and this one is a GGUF file");
        }
        let description = checkpoint.description();
        for stage in &stages {
            info!(worker = %stage.host, layers = %stage.layers, "a cake worker is to run layers");
        }
        let deadline = STEP_TIMEOUT * u32::try_from(stages.len() + 1).unwrap_or(u32::MAX);
        let times = Arc::<ChainTimes>::default();
        let monitor = CakeMonitor::new(&stages, description.hidden, cpu, Arc::clone(&times));
        let own = Checkpoint::open(path).context("open the model")?;
        let config = CakeChainConfig {
            stages,
            key,
            variant: self.variant,
            prefix: layer_prefix(checkpoint)?,
            folder: path.to_owned(),
            layers: description.layers.len(),
            hidden: description.hidden,
            vocab: description.vocab,
            limits: options.limits,
            step_timeout: STEP_TIMEOUT,
            load_own: Box::new(move |layers| load_own(&own, layers, &options, cpu)),
        };
        let (builder, formed) =
            SetupBar::new(config.stages.len()).show(|tell| CakeChainBuilder::start(config, tell))?;
        let builder = MonitoredBuilder::new(builder, &monitor);
        observer.others("cake workers", Arc::new(monitor));
        Ok(Box::new(Chain::new(builder, formed, times, deadline)))
    }

    fn find_workers(&self, key: &CakeKey) -> Result<Vec<FoundWorker>> {
        let mut workers: Vec<_> = self.workers.iter().map(FoundWorker::named).collect();
        let destinations = match self.discovery {
            CakeDiscovery::None => return Ok(workers),
            CakeDiscovery::At(address) => vec![address],
            CakeDiscovery::Network => broadcast_addresses().context("find the interfaces of this machine")?,
        };
        let found = discover(key, &destinations, DISCOVERY, WORKERS_MAX, &|| false).context("look for cake workers")?;
        for worker in found {
            let host = worker.address.to_string();
            let memory = worker.announcement.gpus.iter().fold(0, |sum: u64, gpu| sum.saturating_add(gpu.vram_bytes));
            match workers.iter_mut().find(|known| known.host == host) {
                Some(named) => named.memory = Some(memory),
                None => workers.push(FoundWorker { host, memory: Some(memory) }),
            }
        }
        for worker in &workers {
            let answered =
                if worker.memory.is_some() { "has answered and is used" } else { "has not answered; it is tried" };
            tell(&format!("cake worker {} {answered}", worker.host));
        }
        if workers.is_empty() {
            bail!(
                "no cake worker with this key that waits for layers answered within {DISCOVERY:?}: restart those that have run \
                 before, or name them with --cake-worker"
            );
        }
        Ok(workers)
    }
}

impl FoundWorker {
    fn named(address: &PeerAddress) -> Self {
        Self { host: address.to_string(), memory: None }
    }
}

/// A progress bar of the files that all workers are sent.
struct SetupBar {
    bar: ProgressBar,
    /// Bytes that were sent, and of all, by stage.
    stages: Mutex<Vec<(u64, u64)>>,
}

impl SetupBar {
    fn new(stages: usize) -> Self {
        Self { bar: progress::bytes(0).with_message("sending weights"), stages: Mutex::new(vec![(0, 0); stages]) }
    }

    /// The bar is gone when `work` has ended.
    fn show<T>(&self, work: impl FnOnce(&(dyn Fn(CakeSetupProgress) + Sync)) -> T) -> T {
        let result = work(&|progress| self.update(progress));
        self.bar.finish_and_clear();
        result
    }

    fn update(&self, CakeSetupProgress { stage, sent_bytes, total_bytes }: CakeSetupProgress) {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        stages[stage] = (sent_bytes, total_bytes);
        self.bar.set_length(stages.iter().map(|(_, total)| total).sum());
        self.bar.set_position(stages.iter().map(|(sent, _)| sent).sum());
    }
}

/// The key for cake's protocol, which takes any text. It is not taken from what this machine has saved: cake's protocol tells a
/// part of its hash to everybody.
pub fn cake_key(options: &KeyOptions) -> Result<CakeKey> {
    let text = options.given_text()?;
    CakeKey::new(&text).ok_or_else(|| UsageError::new("the cluster key is empty").into())
}

/// Says which workers are used: in the log, or to people where a command has none.
fn tell(text: &str) {
    match tracing::dispatcher::has_been_set() {
        true => info!("{text}"),
        false => terminal::note(text),
    }
}

/// Prints that nothing is encrypted, for commands without a log. In a log, it is said of each worker.
fn note_plaintext() {
    if !tracing::dispatcher::has_been_set() {
        terminal::note("what is sent to cake workers is not encrypted: anybody on the way can read and change it");
    }
}

/// The stages of workers with so many layers each; the last worker has the model's last layer. Workers without layers are left
/// out.
fn stage_plans(workers: impl Iterator<Item = (String, usize)>, layers: usize) -> Result<Vec<CakeStagePlan>> {
    let workers: Vec<_> = workers.collect();
    let sum = workers.iter().fold(0, |sum: usize, (_, count)| sum.saturating_add(*count));
    let Some(mut start) = layers.checked_sub(sum) else {
        return Err(UsageError::new(format!("--split gives away {sum} layers, the model has {layers}")).into());
    };
    let mut stages = Vec::new();
    for (host, count) in workers {
        match LayerRange::new(u32::try_from(start)?, u32::try_from(start + count)?) {
            Some(layers) => stages.push(CakeStagePlan { host, layers }),
            None => warn!(worker = %host, "a cake worker is not used: it would have no layers"),
        }
        start += count;
    }
    if stages.is_empty() {
        bail!("this machine has so much more memory than the cake workers that they would get no layers: use --split");
    }
    Ok(stages)
}

/// How the model's files name its layers.
fn layer_prefix(checkpoint: &Checkpoint) -> Result<CakeLayerPrefix> {
    let manifest = checkpoint.manifest()?;
    let first = CakeLayerPrefix::LanguageModel.name(0) + ".";
    let is_part = manifest.tensors().iter().any(|tensor| tensor.name.starts_with(&first));
    Ok(if is_part { CakeLayerPrefix::LanguageModel } else { CakeLayerPrefix::Model })
}

/// Loads the embedding, the head and the first layers.
fn load_own(
    checkpoint: &Checkpoint,
    layers: usize,
    options: &LoadOptions,
    cpu: CpuOptions,
) -> Result<CoordinatorStage<CpuBackend>, String> {
    let load = || -> Result<_> {
        let backend = CpuBackend::new(cpu)?;
        let part = ModelPart::coordinator(layers);
        check_memory(&[Footprint::new(&backend, checkpoint, options, part, Rank::SINGLE)?])?;
        Ok(CoordinatorStage::load(backend, checkpoint, options, part, &mut |_| {})?)
    };
    let loaded = load();
    checkpoint.release();
    loaded.map_err(|error| format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(counts: &[usize], layers: usize) -> Result<Vec<String>> {
        let workers = counts.iter().enumerate().map(|(index, &count)| (format!("w{index}:1"), count));
        let stages = stage_plans(workers, layers)?;
        Ok(stages.iter().map(|stage| format!("{} {}", stage.host, stage.layers)).collect())
    }

    #[test]
    fn workers_have_the_last_layers_in_their_order() {
        let range = |start, end| LayerRange::new(start, end).unwrap();
        assert_eq!(plans(&[2, 3], 8).unwrap(), [format!("w0:1 {}", range(3, 5)), format!("w1:1 {}", range(5, 8))]);
        assert_eq!(plans(&[0, 8], 8).unwrap(), [format!("w1:1 {}", range(0, 8))]);
        assert!(plans(&[4, 5], 8).unwrap_err().to_string().contains("gives away 9 layers, the model has 8"));
        assert!(plans(&[usize::MAX, 2], 8).is_err());
        assert!(plans(&[0], 8).unwrap_err().to_string().contains("no layers"));
    }
}
