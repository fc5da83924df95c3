//! `SwarmChain`: a model whose layers are served by a swarm.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blocks::client::{ClientOptions, SwarmClient, SwarmExecutor};
use blocks::kwaai::{FinderReport, KwaaiModel};
use blocks::node::{Following, SwarmNode};
use blocks::wire::Encoding;
use engine::{
    Capacity, CoordinatorStage, Executor, ExecutorError, Health, MissingLayers, OpenedSession, Prefix, StepOutput,
    StepPlan,
};
use kernels::cpu::CpuBackend;
use libp2p_node::{Identity, NetworkKey, NodeOptions};
use tokio::runtime::Runtime;
use types::SessionId;

use super::model_digest::model_digest;
use super::monitor::SwarmMonitor;
use super::options::{SwarmActivations, SwarmClientOptions, SwarmNetworkOptions, SwarmPlacement, VERIFY_DEFAULT};
use crate::executors::{LoadObserver, LoadedModel, OpenedModel};
use crate::placement::SWARM_CLIENT_PART;

/// Worker threads of the network.
const NETWORK_THREADS: usize = 2;
/// How long the first chain waits for a better one, once there is one: peers are still being found.
const SETTLE: Duration = Duration::from_secs(1);

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

impl SwarmPlacement {
    /// Joins the swarm, and waits until its peers serve all layers.
    pub fn connect(&self, model: &OpenedModel<'_>, observer: &mut dyn LoadObserver) -> Result<Box<dyn LoadedModel>> {
        let SwarmClientOptions { network, verify, swarm_activations, swarm_star, kwaai, swarm_wait } = &self.0;
        let OpenedModel { path, checkpoint, options, cpu } = *model;
        let backend = CpuBackend::new(cpu)?;
        let ends = CoordinatorStage::load(backend, checkpoint, &options, SWARM_CLIENT_PART, &mut |_| {});
        let ends = ends.context("load the embedding and the head")?;
        checkpoint.release();
        let layers = checkpoint.description().layers.len();
        let digest = model_digest(path, checkpoint)?;
        let runtime = network_runtime()?;
        let _entered = runtime.enter();
        let node_options = NodeOptions { named: kwaai.addresses(), ..network.node_options(Identity::ephemeral())? };
        let node = SwarmNode::start(node_options, Vec::new()).context("join the swarm")?;
        let following = node.follow(Some(digest));
        let description = checkpoint.description();
        let kwaai_model = KwaaiModel { digest, layers, hidden: description.hidden, vocab: description.vocab };
        let (foreign, registries) = kwaai.servers(path, &node, kwaai_model)?;
        let encoding = match swarm_activations {
            SwarmActivations::F32 => Encoding::F32,
            SwarmActivations::F16 => Encoding::F16,
        };
        let verify = verify.unwrap_or(VERIFY_DEFAULT);
        let client_options = ClientOptions { encoding, is_star: *swarm_star, verify, ..ClientOptions::default() };
        let view = Arc::clone(node.view());
        let handle = runtime.handle().clone();
        let executor = SwarmExecutor::new(ends, layers, digest, node.dial(), view, client_options, foreign, handle);
        let client = executor.client();
        drop(_entered);
        let tokens_min = executor.capacity().page_tokens;
        observer.others("peers", Arc::new(SwarmMonitor::new(client.clone(), node.clone(), cpu, tokens_min)));
        let is_verified = verify > 0.0;
        let chain =
            SwarmChain { executor, client, node, registries, is_verified, _following: following, _runtime: runtime };
        chain.wait(Duration::from_secs(*swarm_wait), observer)?;
        Ok(Box::new(chain))
    }
}

/// The runtime on which the node and the sessions run.
pub fn network_runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let builder = builder.worker_threads(NETWORK_THREADS).thread_name("consort-p2p").enable_all();
    builder.build().context("start the network's threads")
}

/// The executor of a model in a swarm, with all that it needs.
struct SwarmChain {
    executor: SwarmExecutor<CpuBackend>,
    client: SwarmClient,
    node: SwarmNode,
    /// What KwaaiNet's registries say.
    registries: Option<Arc<FinderReport>>,
    /// What peers return is checked.
    is_verified: bool,
    _following: Following,
    /// Dropped last: the others have tasks in it.
    _runtime: Runtime,
}

impl SwarmChain {
    /// What may be the reason that no chain is found.
    fn surroundings(&self) -> String {
        let handle = self.node.handle();
        if let Some(registries) = &self.registries {
            let said = registries.text().unwrap_or_else(|| "the registries gave no answer yet".to_owned());
            return format!(
                "{said}; --kwaai-registry names another registry, --kwaai-name the model as it is called there"
            );
        }
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
                    let spans = chain.spans.iter();
                    let spans = spans.map(|span| format!("{} on {}", span.layers, self.client.peer_name(&span.peer)));
                    observer.note(&format!("layers {}", spans.collect::<Vec<_>>().join(", ")));
                    let alone = if self.is_verified { self.client.unverifiable(&chain.spans) } else { Vec::new() };
                    if !alone.is_empty() {
                        let layers: Vec<_> = alone.iter().map(ToString::to_string).collect();
                        let layers = layers.join(", ");
                        observer.note(&format!("only one peer serves layers {layers}: its results are not verified"));
                    }
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

    fn poll_collect(&mut self, output: &mut StepOutput, wait: Duration) -> Result<bool, ExecutorError> {
        self.executor.poll_collect(output, wait)
    }

    fn missing(&self) -> Option<MissingLayers> {
        self.executor.missing()
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.executor.poll_health(wait)
    }
}

impl LoadedModel for SwarmChain {
    fn layer_bytes(&self) -> usize {
        0
    }

    fn head_bytes(&self) -> usize {
        self.executor.head_bytes()
    }
}
