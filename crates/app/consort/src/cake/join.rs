//! `consort join --protocol cake`: lends this machine to cake masters.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ::cake::{
    CakeAnnouncement, CakeGpu, CakeKey, CakeStageError, CakeStoreLimits, CakeWorker, CakeWorkerSettings,
    DISCOVERY_PORT, ExecutorLoader, answer_queries,
};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engine::{CHUNK_DEFAULT, Executor, Stage};
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use ranks::{check_memory, memory_available};
use tracing::{info, warn};
use types::{LayerRange, Rank};

use super::chain::cake_key;
use crate::commands::join::{DISK_FREE_MIN, JoinArgs, host_name};
use crate::commands::ranks::is_shutting_down;
use crate::listening;
use crate::options::execution::kv_default;
use crate::options::{ModelMath, cpus};
use crate::store::Settings;
use crate::usage::UsageError;

/// Tokens of the longest sequence, if the model supports that many.
const POSITIONS_MAX: usize = 32 << 10;
/// Sequences that run in one step.
const SEQUENCES: usize = 64;
/// The KV cache gets one part in this many of the memory that the weights leave free.
const KV_MEMORY_DIVISOR: u64 = 3;
/// The KV cache holds no more than this many of the longest sequences.
const CONTEXTS_MAX: usize = 16;
/// Assumed where the system does not report its free memory.
const MEMORY_DEFAULT: u64 = 8 << 30;
/// What cake says of any CPU. Masters divide layers by it.
const CPU_TFLOPS: f32 = 2.0;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ProtocolOption {
    /// Encrypted, for `consort serve --cluster`
    #[default]
    Consort,
    /// Not encrypted, for masters of cake
    Cake,
}

#[derive(Args, Debug)]
pub struct CakeJoinOptions {
    /// Protocol to speak
    #[arg(long, value_enum, default_value_t)]
    protocol: ProtocolOption,
    /// With --protocol cake: folder with the model, so that masters send no weights
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// With --protocol cake: UDP port where masters look for workers
    #[arg(long, value_name = "PORT", default_value_t = DISCOVERY_PORT)]
    cake_discovery_port: u16,
}

/// Serving masters of cake.
pub struct CakeService {
    model: Option<PathBuf>,
    discovery_port: u16,
}

impl CakeJoinOptions {
    /// `None` if our own protocol is spoken.
    pub fn service(&self, no_mdns: bool) -> Result<Option<CakeService>, UsageError> {
        match self.protocol {
            ProtocolOption::Cake if no_mdns => Err(UsageError::new("--no-mdns does not apply to --protocol cake")),
            ProtocolOption::Cake => {
                Ok(Some(CakeService { model: self.model.clone(), discovery_port: self.cake_discovery_port }))
            }
            ProtocolOption::Consort if self.model.is_some() => {
                Err(UsageError::new("--model needs --protocol cake: other machines send what their plan needs"))
            }
            ProtocolOption::Consort if self.cake_discovery_port != DISCOVERY_PORT => {
                Err(UsageError::new("--cake-discovery-port needs --protocol cake"))
            }
            ProtocolOption::Consort => Ok(None),
        }
    }
}

impl CakeService {
    /// Serves masters until the process is asked to end.
    pub fn serve(self, join: JoinArgs) -> Result<()> {
        let JoinArgs { listen, store_max, memory: memory_max, .. } = join;
        let folder = match join.store {
            Some(folder) => folder,
            None => Settings::from_environment()?.own_cache,
        };
        let (name, threads) =
            (join.name.map_or_else(host_name, Ok)?, join.threads.map_or_else(cpus, NonZeroUsize::get));
        let key = cake_key(&join.key)?;
        let store_limits = CakeStoreLimits { bytes_max: store_max, free_bytes_min: DISK_FREE_MIN };
        let store = folder.join("cake");
        let settings = CakeWorkerSettings { key: Some(key.clone()), store, store_limits, model: self.model };
        let loader = StageLoader { threads, level: Level::detect(), memory_max };
        let worker = CakeWorker::new(settings, Arc::new(loader.into_loader())).context("serve the model")?;
        let listener =
            TcpListener::bind(listen).map_err(|error| listening::explain(&listen.to_string(), "--listen", &error))?;
        let address = listener.local_addr().context("find out the address")?;
        let announcement = announcement(&key, name.as_str().to_owned(), address.port(), memory_max);
        let has_ended = AtomicBool::new(false);
        let is_over = || has_ended.load(Ordering::Relaxed) || is_shutting_down();
        thread::scope(|scope| {
            scope.spawn(|| answer_masters(self.discovery_port, &announcement, &is_over));
            info!(threads, cpu = loader.level.name(), "ready to run layers for cake masters: listening on {address}");
            let served = worker.serve(&listener, &is_over).context("serve cake masters");
            has_ended.store(true, Ordering::Relaxed);
            served
        })
    }
}

/// Answers masters that look for workers. Without the port they have to be told the address.
fn answer_masters(port: u16, announcement: &CakeAnnouncement, is_over: &(dyn Fn() -> bool + Sync)) {
    let answer = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))?;
        info!("cake masters find this machine on UDP port {}", socket.local_addr()?.port());
        answer_queries(&socket, announcement, is_over)
    };
    if let Err(error) = answer() {
        warn!("cake masters cannot find this machine and have to be told its address: UDP port {port}: {error}");
    }
}

fn announcement(key: &CakeKey, name: String, port: u16, memory_max: Option<u64>) -> CakeAnnouncement {
    let memory = memory_available().unwrap_or(MEMORY_DEFAULT);
    let cpu = CakeGpu {
        name: format!("CPU ({})", std::env::consts::ARCH),
        vram_bytes: memory_max.map_or(memory, |max| max.min(memory)),
        tflops: CPU_TFLOPS,
    };
    CakeAnnouncement {
        cluster_hash: key.cluster_hash(),
        hostname: name.clone(),
        worker_name: name,
        port,
        gpus: vec![cpu],
        backend: "cpu".to_owned(),
        os: std::env::consts::OS.to_owned(),
    }
}

/// Loads ranges of layers.
#[derive(Clone, Copy)]
struct StageLoader {
    threads: usize,
    level: Level,
    memory_max: Option<u64>,
}

impl StageLoader {
    fn into_loader(self) -> ExecutorLoader {
        let load = move |checkpoint: &Checkpoint, layers| {
            let loaded = self.load(checkpoint, layers);
            checkpoint.release();
            loaded.map_err(|error| CakeStageError(format!("{error:#}")))
        };
        ExecutorLoader::new(Box::new(load), Box::new(positions))
    }

    fn load(self, checkpoint: &Checkpoint, layers: LayerRange) -> Result<Box<dyn Executor>> {
        let kv = kv_default(checkpoint, self.level);
        let ModelMath { decode, prompt } = ModelMath::of(checkpoint, None, self.level);
        let cpu = CpuOptions { threads: self.threads, level: self.level, kv, decode, prompt };
        let backend = CpuBackend::new(cpu)?;
        let options = LoadOptions { keep: None, limits: self.limits(&backend, checkpoint, layers)? };
        let footprint = footprint(&backend, checkpoint, &options, layers)?;
        check_memory(&[footprint])?;
        if let Some(max) = self.memory_max.filter(|max| footprint.total() > *max) {
            anyhow::bail!("layers {layers} take {} bytes, and --memory allows {max}", footprint.total());
        }
        Ok(Box::new(Stage::load(backend, checkpoint, &options, layers, &mut |_| {})?))
    }

    /// The KV cache gets a part of the memory that the weights leave.
    fn limits(self, backend: &CpuBackend, checkpoint: &Checkpoint, layers: LayerRange) -> Result<Limits> {
        let pages_each = positions(checkpoint).div_ceil(PAGE_TOKENS);
        let step = StepLimits { rows: CHUNK_DEFAULT, sequences: SEQUENCES, pages: SEQUENCES * pages_each };
        let limits = Limits { step, logit_rows: SEQUENCES, kv_pages: 1, positions: positions(checkpoint) };
        let least = footprint(backend, checkpoint, &LoadOptions { keep: None, limits }, layers)?;
        let available = memory_available().unwrap_or(MEMORY_DEFAULT);
        let memory = self.memory_max.map_or(available, |max| max.min(available));
        let rest = memory.saturating_sub(least.weights.saturating_add(least.working));
        let pages = usize::try_from(rest / KV_MEMORY_DIVISOR / least.kv.max(1)).unwrap_or(usize::MAX);
        Ok(Limits { kv_pages: pages.clamp(pages_each, pages_each * CONTEXTS_MAX), ..limits })
    }
}

fn footprint(
    backend: &CpuBackend,
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    layers: LayerRange,
) -> Result<Footprint> {
    Ok(Footprint::new(backend, checkpoint, options, ModelPart::stage(layers), Rank::SINGLE)?)
}

/// Tokens of the longest sequence.
fn positions(checkpoint: &Checkpoint) -> usize {
    checkpoint.description().positions_max.min(POSITIONS_MAX)
}
