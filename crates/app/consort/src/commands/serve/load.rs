//! Loads models while the server already accepts connections, and reports progress.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use engine::{Engine, EngineOptions, Executor, PREFILL_STEP_DEFAULT, REBUILD_TIMEOUT_DEFAULT, Service, WAITING_MAX};
use kernels::cpu::Level;
use model::{Checkpoint, StoredFormat};
use server::{
    App, ClusterMonitor, CpuDescription, Inviter, LoadStage, ModelDescription, ModelDetails, ModelSlot, Progress,
    ServedModel,
};
use tokio::sync::oneshot;
use tracing::info;

use super::capacity::{CapacityOptions, Share};
use super::{greeting, logs};
use crate::executors::{LoadObserver, WeightsBar};
use crate::model_config::ModelConfig;
use crate::options::{ThreadOption, heading};
use crate::placement::Placement;
use crate::store::ModelFiles;
use crate::text_assets::TextAssets;
use crate::usage::UsageError;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::MACHINE)]
pub struct CacheOptions {
    #[command(flatten)]
    capacity: CapacityOptions,
    /// Maximum requests in the queue; further requests get status 429 with Retry-After
    #[arg(long, value_name = "COUNT", default_value_t = WAITING_MAX)]
    max_waiting: usize,
    /// Milliseconds that a step may take with a part of a prompt in it while other requests generate tokens: a long prompt
    /// then runs in smaller parts, of at least 16 tokens; 0 turns this off
    #[arg(long, value_name = "MS", default_value_t = PREFILL_STEP_DEFAULT.as_millis() as u64)]
    prefill_step_ms: u64,
    /// Speculative decoding: maximum draft tokens per step, copied from earlier text where it repeats; the output stays the
    /// same
    #[arg(long, value_name = "TOKENS", default_value_t = 0, value_parser = draft_tokens)]
    speculate: usize,
    /// Compute every prompt in full, without reusing the KV cache of a common prefix
    #[arg(long)]
    no_prefix_cache: bool,
    /// When a rank or a machine is lost: seconds that requests wait for its replacement before they fail
    #[arg(long, value_name = "SECONDS", default_value_t = REBUILD_TIMEOUT_DEFAULT.as_secs())]
    replay: u64,
}

/// How models are loaded, as the options say.
#[derive(Clone)]
pub struct ModelLoader {
    pub config: ModelConfig,
    pub threads: ThreadOption,
    pub cache: CacheOptions,
}

/// Loads the one model of a server on a thread of its own, and reports progress to `app`, which is served at `url`. An error
/// is sent to `failed`.
pub fn spawn_loader(
    loader: ModelLoader,
    model: String,
    app: &App,
    url: String,
    failed: oneshot::Sender<anyhow::Error>,
) -> Result<()> {
    let begun = Instant::now();
    let slot = app.models().default_slot().context("a server has a model")?;
    let load = move || {
        set_progress(&slot, "finding its files", 0, 1);
        let loaded = loader.config.resolve(Some(&model)).and_then(|files| loader.load(&files, Share::Most, &slot));
        match loaded {
            Ok((served, LoadSummary { ranks, threads, level, kv_tokens, kv_bytes })) => {
                let (context, memory_bytes) = (served.context, served.memory_bytes);
                slot.set_stage(LoadStage::Ready(Arc::new(served)));
                let seconds = (begun.elapsed().as_secs_f64() * 100.0).round() / 100.0;
                let cpu = level.name();
                if logs::has_person() {
                    greeting::tell_ready(slot.name(), begun.elapsed(), context);
                    return;
                }
                info!(
                    url,
                    context,
                    kv_tokens,
                    kv_bytes,
                    memory_bytes,
                    ranks,
                    threads,
                    cpu,
                    seconds,
                    "ready: {}",
                    slot.name()
                );
            }
            Err(error) => {
                // The error has paths of this machine; it is printed when the process ends.
                let why = "the model could not be loaded: the server's log says why";
                slot.set_stage(LoadStage::Failed(why.to_owned()));
                // The receiver is gone if the server is shutting down.
                let _ = failed.send(error);
            }
        }
    };
    thread::Builder::new().name("load".to_owned()).spawn(load).context("start a thread to load the model")?;
    Ok(())
}

/// How a model runs, for the log.
pub struct LoadSummary {
    ranks: usize,
    /// Of each rank.
    threads: usize,
    level: Level,
    kv_tokens: usize,
    kv_bytes: u64,
}

impl ModelLoader {
    /// Loads a model, and tells its slot how far that is.
    pub fn load(&self, files: &ModelFiles, share: Share, slot: &ModelSlot) -> Result<(ServedModel, LoadSummary)> {
        let (model, cache) = (&self.config, &self.cache);
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let text = TextAssets::of(files, &checkpoint).context("read the tokenizer and template")?;

        let digest = checkpoint.digest().to_string();
        let description = describe(&files.path, &checkpoint);
        let (capacity, kv_bytes) = cache.capacity.capacity(model, &checkpoint, cache.speculate, share)?;
        let layers = checkpoint.description().layers.len();
        if !logs::has_person() {
            info!(layers, context = capacity.positions, kv_tokens = capacity.tokens, "loading {}", files.name);
        }
        let threads = model.threads(&self.threads);
        let mut observer = ServeObserver { slot, layers, quarters: 0, weights: WeightsBar::default() };
        let loaded = model.load_with(&files.path, &checkpoint, threads, capacity, &mut observer)?;
        drop(observer);
        let weights = loaded.layer_bytes() + loaded.head_bytes();
        set_progress(slot, "preparing its vocabulary", 0, 1);
        let options = EngineOptions {
            chunk: model.execution.chunk(),
            prefill_step: Some(Duration::from_millis(cache.prefill_step_ms)).filter(|limit| !limit.is_zero()),
            waiting_max: cache.max_waiting,
            prefix_cache: !cache.no_prefix_cache,
            draft_tokens_max: cache.speculate,
            rebuild_timeout: Duration::from_secs(cache.replay),
        };
        let engine = Engine::with_options(loaded as Box<dyn Executor>, options);
        let service = Service::start(engine).context("start the engine's thread")?;
        let TextAssets { tokenizer, defaults, template } = text;
        let mut served = ServedModel::new(service, tokenizer, template, defaults)?;
        served.digest = Some(digest);
        let (ranks, level) = (model.placement.ranks(), model.execution.level()?);
        served.memory_bytes = weights as u64 + kv_bytes;
        served.kv_bytes = kv_bytes;
        served.cpu = Some(CpuDescription { level: level.name().to_owned(), threads });
        served.description = description;
        Ok((served, LoadSummary { ranks, threads, level, kv_tokens: capacity.tokens, kv_bytes }))
    }

    /// The memory that a model takes on this machine once it is loaded beside others.
    pub fn memory_needed(&self, checkpoint: &Checkpoint) -> Result<u64> {
        let (capacity, _) =
            self.cache.capacity.capacity(&self.config, checkpoint, self.cache.speculate, Share::Least)?;
        let footprints = self.config.footprint(checkpoint, capacity)?;
        Ok(footprints.iter().map(|footprint| footprint.weights + footprint.working + footprint.kv).sum())
    }

    /// What the files of a model say. `context` is that of the model if it was loaded beside others.
    pub fn details(&self, files: &ModelFiles) -> Result<ModelDetails> {
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let text = TextAssets::of(files, &checkpoint).context("read the tokenizer and template")?;
        let capacity = self.cache.capacity.capacity(&self.config, &checkpoint, self.cache.speculate, Share::Least);
        Ok(ModelDetails {
            description: describe(&files.path, &checkpoint),
            template: text.template.as_ref().map(|template| template.source().to_owned()),
            has_reasoning: text.template.as_ref().is_some_and(|template| template.reply_format().has_reasoning()),
            context: capacity?.0.positions,
            vocab: text.tokenizer.vocab_size(),
            defaults: text.defaults,
        })
    }
}

fn set_progress(slot: &ModelSlot, doing: &str, done: usize, total: usize) {
    let progress = Progress { doing: doing.to_owned(), done: done as u64, total: total as u64 };
    slot.set_stage(LoadStage::Loading(progress));
}

/// Tells clients and the log how far loading is.
struct ServeObserver<'a> {
    slot: &'a ModelSlot,
    /// Of the model.
    layers: usize,
    /// Quarters of them that the log knows of.
    quarters: usize,
    weights: WeightsBar,
}

impl LoadObserver for ServeObserver<'_> {
    fn layers(&mut self, done: usize) {
        set_progress(self.slot, "loading its layers", done, self.layers);
        let quarters = done * 4 / self.layers.max(1);
        if quarters > self.quarters {
            self.quarters = quarters;
            if !logs::has_person() {
                info!("{done} of {} layers are loaded", self.layers);
            }
        }
    }

    fn others(&mut self, what: &str, monitor: Arc<dyn ClusterMonitor>) {
        set_progress(self.slot, &format!("looking for {what}"), 0, 1);
        self.slot.set_cluster(monitor);
    }

    fn inviter(&mut self, inviter: Arc<dyn Inviter>) {
        self.slot.set_inviter(inviter);
    }

    fn waiting(&mut self, why: &str) {
        info!("waiting for machines: {why}");
        set_progress(self.slot, "waiting for machines", 0, 1);
    }

    fn weights(&mut self, received: u64, total: u64) {
        self.weights.update(received, total);
        let progress = Progress { doing: "sending weights".to_owned(), done: received, total };
        self.slot.set_stage(LoadStage::Loading(progress));
    }

    fn note(&mut self, text: &str) {
        info!("{text}");
    }
}

/// What the files say about the model, for clients.
pub fn describe(path: &Path, checkpoint: &Checkpoint) -> ModelDescription {
    let (description, stored) = (checkpoint.description(), checkpoint.stored_formats());
    ModelDescription {
        architecture: description.architecture.name.to_owned(),
        file_format: if checkpoint.gguf().is_some() { "gguf" } else { "safetensors" }.to_owned(),
        weight_format: weight_format(checkpoint, &stored),
        parameters: stored.iter().map(|stored| stored.elements).sum(),
        file_bytes: stored.iter().map(|stored| stored.bytes).sum(),
        modified: path.metadata().and_then(|file| file.modified()).ok(),
        context_trained: description.positions_max,
        hidden: description.hidden,
        layers: description.layers.len(),
        heads: description.heads,
        kv_heads: description.kv_heads,
    }
}

/// The name under which a model is published: that of a mixture of formats if the GGUF names one, else the format of most
/// weights.
fn weight_format(checkpoint: &Checkpoint, stored: &[StoredFormat]) -> String {
    let mixture = checkpoint.gguf().and_then(|file| file.get("general.file_type")?.as_u64());
    let mixture = mixture.and_then(|number| GGUF_MIXTURES.iter().find(|(known, _)| *known == number));
    match (mixture, stored.first()) {
        (Some((_, name)), _) => (*name).to_owned(),
        (None, Some(most)) => most.dtype.name().to_uppercase(),
        (None, None) => String::new(),
    }
}

/// Values of `general.file_type` that stand for several formats.
const GGUF_MIXTURES: [(u64, &str); 7] =
    [(11, "Q3_K_S"), (12, "Q3_K_M"), (13, "Q3_K_L"), (14, "Q4_K_S"), (15, "Q4_K_M"), (16, "Q5_K_S"), (17, "Q5_K_M")];

impl CacheOptions {
    pub fn check(&self, placement: &Placement) -> Result<(), UsageError> {
        let refused = match placement {
            Placement::Cake(_) if self.speculate > 0 => "cake workers",
            Placement::Swarm(swarm) if self.speculate > 0 && swarm.has_kwaai_servers() => "servers of KwaaiNet",
            _ => return Ok(()),
        };
        Err(UsageError::new(format!("--speculate does not work with {refused}: they cannot take tokens back")))
    }
}

/// Parses `--speculate`. Longer drafts are hardly ever accepted in full.
fn draft_tokens(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&count| count <= 16).ok_or_else(|| "it must be a number from 0 to 16".to_owned())
}
