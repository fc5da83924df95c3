//! The options of a model whose layers run on several machines, and how a chain is formed for it.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cluster::chain::{Chain, ChainBuilder, ChainTimes};
use cluster::coordinator::{Arithmetic, ClusterModel, ClusterModelConfig, Coordinator, CoordinatorOptions, NodeFinder};
use cluster::discovery::{Browser, BrowserSettings, DiscoveryEvent, Interfaces, MDNS_PORT};
use cluster::measure::{ProbeSettings, measure_machine};
use kernels::PAGE_TOKENS;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::{Checkpoint, LoadOptions};
use net::ClusterKey;
use net::PeerAddress;
use plan::{Optimise, Workload};
use tracing::info;
use weights::HashCache;

use crate::chain_monitor::ChainMonitor;
use crate::load_observer::LoadObserver;
use crate::options::CpuLevelOption;
use crate::store::Settings;
use crate::usage::UsageError;

/// How long a machine may be silent before it counts as lost.
pub const SILENCE: Duration = Duration::from_millis(1500);
/// How long the first chain waits for machines to be found.
const SETTLE: Duration = Duration::from_secs(3);
/// A step that takes longer means that a machine hangs.
const STEP_DEADLINE: Duration = Duration::from_secs(120);
/// The prompt for which a plan is made.
const PROMPT_TOKENS: usize = 512;

/// Where layers run, on several machines.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Layers on several machines")]
pub struct ClusterOptions {
    /// Run layers on machines of this network that run `consort join` with the same key
    #[arg(long)]
    pub cluster: bool,
    /// A machine that runs `consort join`, where it is not found by itself
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    pub peer: Vec<PeerAddress>,
    /// How many layers each --peer or --cake-worker gets, in their order; this machine has the rest
    #[arg(long, value_name = "LAYERS,…", value_delimiter = ',')]
    pub split: Vec<usize>,
    /// One arithmetic on all machines, so that neither the split nor the loss of a machine changes a bit: these CPU instructions
    /// [default: the best that all machines have at the start]
    #[arg(long, value_name = "LEVEL", value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    pub exact: Option<CpuLevelOption>,
    /// What the plan minimises
    #[arg(long, value_enum, default_value_t)]
    pub optimise: OptimiseOption,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimiseOption {
    /// The time of a token of one request alone
    #[default]
    Latency,
    /// The time of a token of many requests together
    Throughput,
}

impl From<OptimiseOption> for Optimise {
    fn from(option: OptimiseOption) -> Self {
        match option {
            OptimiseOption::Latency => Self::Latency,
            OptimiseOption::Throughput => Self::Throughput,
        }
    }
}

/// The executor of a model on several machines.
pub type ClusterChain = Chain<CpuBackend, Coordinator>;

impl ClusterOptions {
    /// Whether layers may run on other machines.
    pub fn is_used(&self) -> bool {
        self.cluster || !self.peer.is_empty()
    }

    pub fn check(&self) -> Result<(), UsageError> {
        if !self.split.is_empty() && self.split.len() != self.peer.len() {
            let (counts, peers) = (self.split.len(), self.peer.len());
            return Err(UsageError::new(format!("--split has {counts} numbers for {peers} times --peer")));
        }
        if self.exact.is_some() && !self.is_used() {
            return Err(UsageError::new("--exact is for layers on several machines: it needs --cluster or --peer"));
        }
        Ok(())
    }

    /// Finds machines and forms a chain.
    pub fn form(
        &self,
        path: &Path,
        key: ClusterKey,
        options: LoadOptions,
        cpu: CpuOptions,
        observer: &mut dyn LoadObserver,
    ) -> Result<ClusterChain> {
        let arithmetic = self.arithmetic(cpu.level)?;
        let cpu = if let Arithmetic::Exact(level) = arithmetic { cpu.at(level) } else { cpu };
        let model = self.model(path, options, cpu)?;
        let (times, hidden) = (Arc::<ChainTimes>::default(), model.facts().hidden);
        let coordinator = CoordinatorOptions {
            key: key.clone(),
            silence: SILENCE,
            optimise: self.optimise.into(),
            arithmetic,
            split: (!self.split.is_empty()).then(|| self.split.clone()),
            peers: self.peers()?,
            settle: SETTLE,
        };
        let mut coordinator = Coordinator::start(coordinator, model).context("start the coordinator")?;
        observer.cluster(ChainMonitor::new(coordinator.watch(), Arc::clone(&times), hidden));
        if self.cluster {
            discover(&key, coordinator.finder())?;
        }
        let mut last = None;
        loop {
            if let Some(formed) = coordinator.poll(Duration::from_millis(200)) {
                return Ok(Chain::new(coordinator, formed, times, STEP_DEADLINE));
            }
            let report = coordinator.report();
            if report.waiting.is_some() && report.waiting != last {
                observer.waiting(report.waiting.as_deref().unwrap_or_default());
                last = report.waiting;
            }
        }
    }

    /// The arithmetic of all machines, if this one's best level is `own`.
    fn arithmetic(&self, own: Level) -> Result<Arithmetic> {
        match self.exact.map(CpuLevelOption::named) {
            None => Ok(Arithmetic::Best),
            Some(None) => Ok(Arithmetic::Common),
            Some(Some(level)) if level <= own => Ok(Arithmetic::Exact(level)),
            Some(Some(level)) => bail!("--exact={level}: this machine computes with {own}"),
        }
    }

    fn model(&self, path: &Path, options: LoadOptions, cpu: CpuOptions) -> Result<ClusterModel> {
        let checkpoint = Checkpoint::open(path).context("open the model")?;
        let description = checkpoint.description();
        let format = checkpoint.stored_formats().first().map(|stored| options.keep.unwrap_or(stored.dtype));
        let CpuOptions { threads, level, decode, prompt, .. } = cpu;
        let mut probe = ProbeSettings { threads, level, decode, prompt, ..ProbeSettings::default() };
        if let Some(format) = format.filter(|format| format.row_bytes(description.hidden).is_some()) {
            (probe.format, probe.hidden) = (format, description.hidden);
        }
        let own = measure_machine(&probe)?.into_node("this machine".to_owned(), None);
        let limits = options.limits;
        let workload = Workload {
            kv_tokens: (limits.kv_pages * PAGE_TOKENS) as u64,
            positions: (limits.positions / 4) as u64,
            batch: limits.step.sequences,
            prompt_tokens: PROMPT_TOKENS.min(limits.positions),
            chunk_rows: limits.step.rows,
        };
        let hashes = HashCache::new(&Settings::from_environment()?.own_cache.join("hashes"));
        let name = path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
        let config = ClusterModelConfig { name, checkpoint, options, cpu, own, workload };
        Ok(ClusterModel::new(config, &hashes, &|_| {})?)
    }

    fn peers(&self) -> Result<Vec<SocketAddr>> {
        self.peer.iter().map(resolve).collect()
    }
}

/// The first address of a name.
fn resolve(peer: &PeerAddress) -> Result<SocketAddr> {
    let mut addresses = peer.as_str().to_socket_addrs().with_context(|| format!("find {peer}"))?;
    match addresses.next() {
        Some(address) => Ok(address),
        None => bail!("{peer} has no address"),
    }
}

/// Looks for machines in the background, until the coordinator ends.
fn discover(key: &ClusterKey, finder: NodeFinder) -> Result<()> {
    let (fingerprint, interfaces) = (key.fingerprint(), Interfaces::default());
    let settings = BrowserSettings { fingerprint, interfaces, mdns_port: MDNS_PORT, peers: Vec::new() };
    let browser = Browser::start(settings).context("look for machines on this network")?;
    let watch = move || {
        for event in browser.events() {
            let DiscoveryEvent::Found(node) = event else { continue };
            let name = node.name.as_ref().map_or("a machine", |name| name.as_str());
            match &node.unusable {
                Some(why) => info!("{name} is not used: {why}"),
                None => {
                    let address = node.addresses.iter().find_map(|address| resolve(address).ok());
                    if !address.is_none_or(|address| finder.found(address)) {
                        return;
                    }
                }
            }
        }
    };
    thread::Builder::new().name("discovery".to_owned()).spawn(watch).context("look for machines")?;
    Ok(())
}
