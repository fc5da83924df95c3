//! A chain of machines of this network: how they are found, and how a chain is formed.

pub mod chain_monitor;
mod node_discovery;

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cluster::chain::{Chain, ChainBuilder as _};
use cluster::coordinator::{
    Arithmetic, ClusterModel, ClusterModelConfig, ClusterReport, Coordinator, CoordinatorOptions, Layout, NodeFinder,
    NodeState, ReplanOptions, Survey,
};
use cluster::measure::{ProbeSettings, measure_machine};
use kernels::PAGE_TOKENS;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::{Checkpoint, LoadOptions};
use net::PeerAddress;
use plan::{UnusableNode, Workload};
use types::LayerRange;
use weights::HashCache;

use super::{LoadObserver, OpenedModel};
use crate::cluster_key;
use crate::commands::join::host_name;
use crate::invitations::Invitations;
use crate::options::CpuLevelOption;
use crate::placement::{ClusterPlacement, RequestedLayout};
use crate::progress;
use crate::store::Settings;
use crate::terminal;
use node_discovery::NodeDiscovery;

pub use chain_monitor::ChainMonitor;

/// How long a machine may be silent before it counts as lost.
pub const SILENCE: Duration = Duration::from_millis(1500);
/// How long the first chain waits for machines to be found.
const SETTLE: Duration = Duration::from_secs(3);
/// A step that takes longer means that a machine hangs.
const STEP_DEADLINE: Duration = Duration::from_secs(120);
/// The prompt for which a plan is made.
const PROMPT_TOKENS: usize = 512;
/// The tokens before one that is generated, unless the context is short: a plan is for conversations, not for full contexts.
const POSITIONS: usize = 512;

/// How another machine gets in.
const INVITE: &str = "`consort cluster invite` lets another one join, which runs `consort join`";

/// The executor of a model on several machines.
pub type ClusterChain = Chain<CpuBackend, Coordinator>;

/// Finds machines and forms a chain, for some layers or for the whole model.
pub fn form(
    cluster: &ClusterPlacement,
    model: &OpenedModel<'_>,
    layers: Option<LayerRange>,
    observer: &mut dyn LoadObserver,
) -> Result<ClusterChain> {
    let prepared = prepare(cluster, model, layers, &mut |text| observer.note(text))?;
    let PreparedCluster { model, coordinator, search, key_text } = prepared;
    if let Ok(name) = host_name() {
        observer.inviter(Arc::new(Invitations::new(key_text, name)));
    }
    let (hidden, layout) = (model.facts().hidden, coordinator.layout.clone());
    let mut coordinator = Coordinator::start(coordinator, model).context("start the coordinator")?;
    let times = coordinator.times();
    let monitor = ChainMonitor::new(coordinator.watch(), Arc::clone(&times), hidden);
    observer.chain(&monitor);
    observer.others("machines", Arc::new(monitor));
    let discovery = search.start(coordinator.finder())?;
    let mut last = None;
    loop {
        if let Some(formed) = coordinator.poll(Duration::from_millis(200)) {
            let report = coordinator.report();
            notes(&report, &layout, &discovery).iter().for_each(|note| observer.note(note));
            return Ok(Chain::new(coordinator, formed, times, STEP_DEADLINE));
        }
        let report = coordinator.report();
        let (received, total) = report.weight_bytes();
        if total > 0 {
            observer.weights(received, total);
        }
        if report.waiting.is_some() && report.waiting != last {
            observer.waiting(report.waiting.as_deref().unwrap_or_default());
            last = report.waiting;
        }
    }
}

/// Finds machines and loads nothing. Also returns those that cannot be used.
pub fn survey(cluster: &ClusterPlacement, model: &OpenedModel<'_>) -> Result<(Survey, Vec<UnusableNode>)> {
    let PreparedCluster { model, coordinator, search, .. } =
        prepare(cluster, model, None, &mut |text| terminal::note(text))?;
    let mut discovery = NodeDiscovery::default();
    let spinner = progress::spinner("looking for machines");
    let survey = Survey::new(coordinator, model, |finder| search.start(finder).map(|found| discovery = found));
    spinner.finish_and_clear();
    let survey = survey??;
    other_clusters(&survey.report).iter().for_each(|text| terminal::note(text));
    let unusable = unusable(&survey.report).chain(discovery.unusable()).collect();
    Ok((survey, unusable))
}

fn prepare(
    cluster: &ClusterPlacement,
    model: &OpenedModel<'_>,
    layers: Option<LayerRange>,
    note: &mut dyn FnMut(&str),
) -> Result<PreparedCluster> {
    let OpenedModel { path, options, cpu, .. } = *model;
    let arithmetic = arithmetic(cluster.exact, cpu.level)?;
    let cpu = if let Arithmetic::Exact(level) = arithmetic { cpu.at(level) } else { cpu };
    let checkpoint = Checkpoint::open(path).context("open the model")?;
    let mut peers: Vec<_> = cluster.peers.iter().map(resolve).collect::<Result<_>>()?;
    let count = layers.map_or(checkpoint.description().layers.len(), LayerRange::count);
    let (layout, planned) = layout(&cluster.layout, count, note)?;
    let planned: Vec<_> = planned.into_iter().filter(|address| !peers.contains(address)).collect();
    // A machine of the plan may have another address by now. Then it is found by its name, for which the first chain waits.
    let dialled = if cluster.discovers {
        planned
    } else {
        peers.extend(planned);
        Vec::new()
    };
    let key_text = cluster.key.text_or_made(|file| {
        note(&format!("this machine has made a key for its cluster, in {}; {INVITE}", file.display()));
    })?;
    let key = cluster_key::parse(&key_text)?;
    let coordinator = CoordinatorOptions {
        key,
        silence: SILENCE,
        optimise: cluster.optimise,
        arithmetic,
        layout,
        peers,
        settle: SETTLE,
        replan: ReplanOptions::default(),
    };
    let search = NodeSearch { discovers: cluster.discovers, dialled };
    Ok(PreparedCluster { model: cluster_model(path, checkpoint, options, cpu, layers)?, coordinator, search, key_text })
}

/// The layout for a model with so many layers, and the addresses in the plan.
fn layout(requested: &RequestedLayout, layers: usize, note: &mut dyn FnMut(&str)) -> Result<(Layout, Vec<SocketAddr>)> {
    let plan = match requested {
        RequestedLayout::Planned => return Ok((Layout::Planned, Vec::new())),
        RequestedLayout::Split(counts) => return Ok((Layout::Split(counts.clone()), Vec::new())),
        RequestedLayout::File(plan) => plan,
    };
    let resolve = |host: &PeerAddress| match resolve(host) {
        Ok(address) => Some(address),
        Err(error) => {
            note(&format!("a machine of the plan is missing: {error:#}"));
            None
        }
    };
    plan.layout(layers, resolve).context("--plan")
}

/// The arithmetic of all machines, if this one's best level is `own`.
fn arithmetic(exact: Option<CpuLevelOption>, own: Level) -> Result<Arithmetic> {
    match exact.map(CpuLevelOption::named) {
        None => Ok(Arithmetic::Best),
        Some(None) => Ok(Arithmetic::Common),
        Some(Some(level)) if level <= own => Ok(Arithmetic::Exact(level)),
        Some(Some(level)) => bail!("--exact={level}: this machine computes with {own}"),
    }
}

fn cluster_model(
    path: &Path,
    checkpoint: Checkpoint,
    options: LoadOptions,
    cpu: CpuOptions,
    layers: Option<LayerRange>,
) -> Result<ClusterModel> {
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
        positions: POSITIONS.min(limits.positions / 4) as u64,
        batch: limits.step.sequences,
        prompt_tokens: PROMPT_TOKENS.min(limits.positions),
        chunk_rows: limits.step.rows,
    };
    let hashes = HashCache::new(&Settings::from_environment()?.own_cache.join("hashes"));
    let name = path.file_stem().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    let config = ClusterModelConfig { name, checkpoint, layers, options, cpu, own, workload };
    Ok(ClusterModel::new(config, &hashes, &|_| {})?)
}

/// What a coordinator starts with.
struct PreparedCluster {
    model: ClusterModel,
    coordinator: CoordinatorOptions,
    search: NodeSearch,
    /// For machines that are invited.
    key_text: String,
}

/// How nodes are found, beside those that a coordinator waits for.
struct NodeSearch {
    /// By mDNS.
    discovers: bool,
    dialled: Vec<SocketAddr>,
}

impl NodeSearch {
    /// Looks for nodes in the background, until the coordinator ends.
    fn start(self, finder: NodeFinder) -> Result<NodeDiscovery> {
        let discovery = NodeDiscovery::default();
        for address in self.dialled {
            finder.named(address);
        }
        if self.discovers {
            discovery.start(finder, |address| resolve(address).ok())?;
        }
        Ok(discovery)
    }
}

/// What users want to know of a chain that is formed.
fn notes(report: &ClusterReport, layout: &Layout, discovery: &NodeDiscovery) -> Vec<String> {
    let mut notes = Vec::new();
    if let Layout::Saved(saved) = layout {
        let asked = saved.stages.iter().map(|stage| (stage.node.is_none(), stage.layers));
        if !asked.eq(report.stages.iter().map(|(address, layers)| (address.is_none(), *layers))) {
            notes.push("the plan that was given cannot be kept: a machine is missing".to_owned());
        }
    }
    let stages = report.plan.iter().flat_map(|plan| &plan.stages);
    let stages: Vec<_> = stages.filter_map(|stage| Some(format!("{} on {}", stage.layers?, stage.name))).collect();
    notes.push(format!("layers {}", stages.join(", ")));
    notes.extend(unusable(report).chain(discovery.unusable()).map(|node| format!("not used: {node}")));
    if report.nodes.is_empty() {
        notes.push(format!("no other machine was found: {INVITE}"));
        notes.extend(other_clusters(report));
    }
    notes
}

/// What is said of machines that have another key. There may be any number of clusters in a network.
fn other_clusters(report: &ClusterReport) -> Option<String> {
    match report.other_clusters {
        0 => None,
        1 => Some("one machine here is of another cluster: it has another key".to_owned()),
        count => Some(format!("{count} machines here are of other clusters: they have other keys")),
    }
}

/// The nodes that no plan can use, as far as a coordinator knows.
fn unusable(report: &ClusterReport) -> impl Iterator<Item = UnusableNode> {
    report.nodes.iter().filter_map(|node| {
        let why = match &node.state {
            NodeState::Ready => node.not_used.clone()?,
            NodeState::Connecting => "it has not answered".to_owned(),
            NodeState::Failed { why } => why.clone(),
        };
        Some(UnusableNode { name: node.name.clone(), address: Some(node.address.into()), why })
    })
}
/// The first address of a name.
fn resolve(peer: &PeerAddress) -> Result<SocketAddr> {
    let mut addresses = peer.as_str().to_socket_addrs().with_context(|| format!("find {peer}"))?;
    match addresses.next() {
        Some(address) => Ok(address),
        None => bail!("{peer} has no address"),
    }
}
