//! The options of the swarm: how this machine joins it, and how a model is run by its peers.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use engine::{
    Capacity, CoordinatorStage, Executor, ExecutorError, Health, OpenedSession, Prefix, StepOutput, StepPlan,
};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, LoadOptions, ModelPart};
use p2p::{Identity, Multiaddr, NetworkKey, NodeOptions};
use peers::client::{ClientOptions, SwarmClient, SwarmExecutor};
use peers::kwaai::KwaaiModel;
use peers::node::{Following, SwarmNode};
use peers::wire::Encoding;
use tokio::runtime::Runtime;
use types::SessionId;

use crate::kwaai_options::KwaaiOptions;
use crate::load_observer::LoadObserver;
use crate::model_digest::model_digest;
use crate::swarm_monitor::SwarmMonitor;
use crate::usage::UsageError;

/// Worker threads of the network.
const NETWORK_THREADS: usize = 2;
/// How long the first chain waits for a better one, once there is one: peers are still being found.
const SETTLE: Duration = Duration::from_secs(1);

/// What a client of a swarm has of the model: the embedding and the head.
pub const SWARM_CLIENT_PART: ModelPart = ModelPart { layers: None, has_embedding_and_head: true };

/// How this machine joins a swarm.
#[derive(Args, Clone, Debug, Default)]
pub struct SwarmNetworkOptions {
    /// A peer to join the swarm through, such as /ip4/203.0.113.7/tcp/4101/p2p/12D3Koo…; can be repeated. On one LAN peers find
    /// each other
    #[arg(long, value_name = "MULTIADDRESS", value_delimiter = ',')]
    pub bootstrap: Vec<Multiaddr>,
    /// File with the key of a private swarm: 64 hexadecimal digits. Others cannot connect
    #[arg(long, value_name = "FILE")]
    pub swarm_key: Option<PathBuf>,
    /// Neither announce this machine on the LAN nor look for others there
    #[arg(long)]
    pub no_lan: bool,
}

/// A model whose layers are served by a swarm.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Layers served by a swarm")]
pub struct SwarmOptions {
    /// Run the layers on peers of a swarm that run `consort swarm serve` with the same model
    #[arg(long)]
    pub swarm: bool,
    #[command(flatten)]
    pub network: SwarmNetworkOptions,
    /// The part of the steps, 0 to 1, of which another peer recomputes some layers, to find peers that lie
    #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part)]
    pub verify: f64,
    /// How activations travel; f16 halves the bytes, and changes the last bits
    #[arg(long, value_enum, default_value_t)]
    pub swarm_activations: SwarmActivations,
    /// Carry all activations to and from each peer, rather than have peers pass them on
    #[arg(long)]
    pub swarm_star: bool,
    #[command(flatten)]
    pub kwaai: KwaaiOptions,
    /// Seconds to wait for peers that serve all layers
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub swarm_wait: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SwarmActivations {
    /// Without loss
    #[default]
    F32,
    F16,
}

fn part(text: &str) -> Result<f64, String> {
    let part: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    if (0.0..=1.0).contains(&part) { Ok(part) } else { Err(format!("{text} is not between 0 and 1")) }
}

impl SwarmNetworkOptions {
    /// Without an address to listen on, the node only dials.
    pub fn node_options(&self, identity: Identity) -> Result<NodeOptions> {
        let network_key = match &self.swarm_key {
            Some(file) => Some(NetworkKey::read(file).with_context(|| format!("read {}", file.display()))?),
            None => None,
        };
        let (bootstrap, mdns) = (self.bootstrap.clone(), !self.no_lan);
        Ok(NodeOptions { bootstrap, network_key, mdns, ..NodeOptions::new(identity) })
    }
}

impl SwarmOptions {
    pub fn check(&self) -> Result<(), UsageError> {
        let is_given = !self.network.bootstrap.is_empty()
            || self.network.swarm_key.is_some()
            || self.verify > 0.0
            || self.swarm_star
            || self.kwaai.has_servers();
        match is_given && !self.swarm {
            true => Err(UsageError::new(
                "--bootstrap, --swarm-key, --verify, --swarm-star, --kwaai-peer and --kwaai-registry are for --swarm",
            )),
            false => Ok(()),
        }
    }

    /// Joins the swarm, and waits until its peers serve all layers.
    pub fn connect(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        cpu: CpuOptions,
        observer: &mut dyn LoadObserver,
    ) -> Result<SwarmChain> {
        let backend = CpuBackend::new(cpu)?;
        let ends = CoordinatorStage::load(backend, checkpoint, options, SWARM_CLIENT_PART, &mut |_| {});
        let ends = ends.context("load the embedding and the head")?;
        checkpoint.release();
        let layers = checkpoint.description().layers.len();
        let model = model_digest(path, checkpoint)?;
        let runtime = network_runtime()?;
        let _entered = runtime.enter();
        let node = SwarmNode::start(self.network.node_options(Identity::ephemeral())?, Vec::new())
            .context("join the swarm")?;
        let following = node.follow(Some(model));
        let description = checkpoint.description();
        let kwaai_model = KwaaiModel { digest: model, layers, hidden: description.hidden, vocab: description.vocab };
        let foreign = self.kwaai.servers(path, &node, kwaai_model)?;
        let encoding = match self.swarm_activations {
            SwarmActivations::F32 => Encoding::F32,
            SwarmActivations::F16 => Encoding::F16,
        };
        let client_options = ClientOptions { encoding, is_star: self.swarm_star, verify: self.verify };
        let view = Arc::clone(node.view());
        let handle = runtime.handle().clone();
        let executor = SwarmExecutor::new(ends, layers, model, node.dial(), view, client_options, foreign, handle);
        let client = executor.client();
        drop(_entered);
        let tokens_min = executor.capacity().page_tokens;
        observer.swarm(SwarmMonitor::new(client.clone(), node.clone(), cpu, tokens_min));
        let chain = SwarmChain { executor, client, node, _following: following, _runtime: runtime };
        chain.wait(Duration::from_secs(self.swarm_wait), observer)?;
        Ok(chain)
    }
}

/// The runtime on which the node and the sessions run.
pub fn network_runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(NETWORK_THREADS).thread_name("consort-p2p").enable_all();
    builder.build().context("start the network's threads")
}

/// The executor of a model in a swarm, with all that it needs.
pub struct SwarmChain {
    executor: SwarmExecutor<CpuBackend>,
    client: SwarmClient,
    node: SwarmNode,
    _following: Following,
    /// Dropped last: the others have tasks in it.
    _runtime: Runtime,
}

impl SwarmChain {
    pub fn head_bytes(&self) -> usize {
        self.executor.head_bytes()
    }

    /// What may be the reason that no chain is found.
    fn surroundings(&self) -> String {
        let handle = self.node.handle();
        match (handle.peers().len(), handle.bootstrap_failure()) {
            (0, Some(why)) => why,
            (0, None) => "no other peer was found; name one with --bootstrap".to_owned(),
            (peers, _) => match self.node.view().records(None).len() {
                0 => format!("none of {peers} connected peers serves the model; theirs must be of the same files"),
                serving => format!("{peers} peers are connected, and {serving} are known to serve layers of the model"),
            },
        }
    }

    fn wait(&self, max: Duration, observer: &mut dyn LoadObserver) -> Result<()> {
        let started = Instant::now();
        let (mut found, mut told) = (None, String::new());
        loop {
            match self.client.plan(self.capacity().page_tokens) {
                Ok(chain) if found.is_some_and(|since: Instant| since.elapsed() >= SETTLE) => {
                    let spans =
                        chain.spans.iter().map(|span| format!("{} on {}", span.layers, p2p::peer_text(&span.peer)));
                    observer.note(&format!("layers {}", spans.collect::<Vec<_>>().join(", ")));
                    return Ok(());
                }
                Ok(_) => found = found.or_else(|| Some(Instant::now())),
                Err(error) => {
                    found = None;
                    let why = error.to_string();
                    if started.elapsed() >= max {
                        bail!("after {} s: {why}: {}", max.as_secs(), self.surroundings());
                    }
                    if why != told {
                        observer.waiting(&why);
                        told = why;
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Executor for SwarmChain {
    fn depth(&self) -> usize {
        self.executor.depth()
    }

    fn capacity(&self) -> Capacity {
        self.executor.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.executor.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.executor.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.executor.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.executor.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.executor.collect(output)
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.executor.poll_health(wait)
    }
}
