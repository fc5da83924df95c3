//! Loads the model while the server already accepts connections, and reports progress.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use engine::{Engine, EngineOptions, Executor, PREFILL_STEP_DEFAULT, REBUILD_TIMEOUT_DEFAULT, Service, WAITING_MAX};
use kernels::cpu::Level;
use model::{Checkpoint, StoredFormat};
use server::{App, ClusterMonitor, CpuDescription, Inviter, LoadStage, ModelDescription, Progress, ServedModel};
use tokio::sync::oneshot;
use tracing::info;

use super::ServeArgs;
use super::capacity::CapacityOptions;
use crate::executors::{LoadObserver, WeightsBar};
use crate::model_config::ModelConfig;
use crate::placement::Placement;
use crate::text_assets::TextAssets;
use crate::usage::UsageError;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How much runs at once")]
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

/// Loads the model on a thread of its own and reports progress to `app`, which is served at `url`. An error is sent to
/// `failed`.
pub fn spawn_loader(
    serve: ServeArgs,
    model: ModelConfig,
    app: Arc<App>,
    url: String,
    failed: oneshot::Sender<anyhow::Error>,
) -> Result<()> {
    let begun = Instant::now();
    let load = move || match load(&serve, &model, &app) {
        Ok((served, LoadSummary { ranks, threads, level, kv_tokens, kv_bytes })) => {
            let (context, memory_bytes) = (served.context, served.memory_bytes);
            app.set_stage(LoadStage::Ready(Arc::new(served)));
            let seconds = (begun.elapsed().as_secs_f64() * 100.0).round() / 100.0;
            let cpu = level.name();
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
                app.config().model
            );
        }
        Err(error) => {
            // The error has paths of this machine; it is printed when the process ends.
            app.set_stage(LoadStage::Failed("the model could not be loaded: the server's log says why".to_owned()));
            // The receiver is gone if the server is shutting down.
            let _ = failed.send(error);
        }
    };
    thread::Builder::new().name("load".to_owned()).spawn(load).context("start a thread to load the model")?;
    Ok(())
}

/// How a model runs, for the log.
struct LoadSummary {
    ranks: usize,
    /// Of each rank.
    threads: usize,
    level: Level,
    kv_tokens: usize,
    kv_bytes: u64,
}

fn load(serve: &ServeArgs, model: &ModelConfig, app: &App) -> Result<(ServedModel, LoadSummary)> {
    set_progress(app, "finding its files", 0, 1);
    let files = model.resolve(serve.model.as_deref())?;
    let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
    let text = TextAssets::open(&files.path, &checkpoint).context("read the tokenizer and template")?;

    let digest = checkpoint.digest().to_string();
    let description = describe(&files.path, &checkpoint);
    let (capacity, kv_bytes) = serve.cache.capacity.capacity(model, &checkpoint, serve.cache.speculate)?;
    let layers = checkpoint.description().layers.len();
    info!(layers, context = capacity.positions, kv_tokens = capacity.tokens, "loading {}", files.name);
    let threads = model.threads(&serve.threads);
    let mut observer = ServeObserver { app, layers, quarters: 0, weights: WeightsBar::default() };
    let loaded = model.load_with(&files.path, &checkpoint, threads, capacity, &mut observer)?;
    drop(observer);
    let weights = loaded.layer_bytes() + loaded.head_bytes();
    set_progress(app, "preparing its vocabulary", 0, 1);
    let options = EngineOptions {
        chunk: model.execution.chunk(),
        prefill_step: Some(Duration::from_millis(serve.cache.prefill_step_ms)).filter(|limit| !limit.is_zero()),
        waiting_max: serve.cache.max_waiting,
        prefix_cache: !serve.cache.no_prefix_cache,
        draft_tokens_max: serve.cache.speculate,
        rebuild_timeout: Duration::from_secs(serve.cache.replay),
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

fn set_progress(app: &App, doing: &str, done: usize, total: usize) {
    let progress = Progress { doing: doing.to_owned(), done: done as u64, total: total as u64 };
    app.set_stage(LoadStage::Loading(progress));
}

/// Tells clients and the log how far loading is.
struct ServeObserver<'a> {
    app: &'a App,
    /// Of the model.
    layers: usize,
    /// Quarters of them that the log knows of.
    quarters: usize,
    weights: WeightsBar,
}

impl LoadObserver for ServeObserver<'_> {
    fn layers(&mut self, done: usize) {
        set_progress(self.app, "loading its layers", done, self.layers);
        let quarters = done * 4 / self.layers.max(1);
        if quarters > self.quarters {
            self.quarters = quarters;
            info!("{done} of {} layers are loaded", self.layers);
        }
    }

    fn others(&mut self, what: &str, monitor: Arc<dyn ClusterMonitor>) {
        set_progress(self.app, &format!("looking for {what}"), 0, 1);
        self.app.set_cluster(monitor);
    }

    fn inviter(&mut self, inviter: Arc<dyn Inviter>) {
        self.app.set_inviter(inviter);
    }

    fn waiting(&mut self, why: &str) {
        info!("waiting for machines: {why}");
        set_progress(self.app, "waiting for machines", 0, 1);
    }

    fn weights(&mut self, received: u64, total: u64) {
        self.weights.update(received, total);
        self.app.set_stage(LoadStage::Loading(Progress { doing: "sending weights".to_owned(), done: received, total }));
    }

    fn note(&mut self, text: &str) {
        info!("{text}");
    }
}

/// What the files say about the model, for clients.
fn describe(path: &Path, checkpoint: &Checkpoint) -> ModelDescription {
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
