//! `Coordinator`: finds nodes, plans, has them load their layers, and forms chains, in a thread of its own.
//!
//! It is the [`ChainBuilder`] of a [`Chain`](crate::chain::Chain). A chain that is lost is formed again from the nodes that are
//! there. A node that fails is left out for a while, and for longer with each failure.

mod arithmetic;
mod current_chain;
mod forming;
mod model;
mod node_link;
mod node_paths;
mod node_table;
mod plan_report;
mod planning;
mod replanning;
mod report;
mod slowness;
mod standing;
mod survey;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use engine::CoordinatorStage;
use kernels::cpu::CpuBackend;
use net::ClusterKey;
use tracing::{info, warn};
use types::LayerRange;

use crate::chain::{ChainBuilder, ChainTimes, FormedChain, LinkEnd};
use crate::wire::control::{ControlReply, ControlRequest, WireFault};
pub use arithmetic::Arithmetic;
use current_chain::CurrentChain;
use forming::FormError;
pub use model::{ClusterModel, ClusterModelConfig, ClusterModelError};
use node_link::{NodeId, NodeLink};
use node_paths::NodePaths;
use node_table::NodeTable;
use plan::Optimise;
pub use plan_report::{PlanReport, PlannedHop, PlannedStageReport};
pub use planning::{Layout, LayoutError};
use replanning::Replanning;
pub use report::{ClusterReport, ClusterWatch, MissingWeights, NodeReport, NodeState};
use standing::Failure;
pub use survey::Survey;

/// How long the thread sleeps at most before it looks for nodes that are to be tried again.
const TICK: Duration = Duration::from_millis(100);

/// How a coordinator forms chains.
#[derive(Clone, Debug)]
pub struct CoordinatorOptions {
    pub key: ClusterKey,
    /// How long a machine may be silent before it counts as lost.
    pub silence: Duration,
    pub optimise: Optimise,
    pub arithmetic: Arithmetic,
    pub layout: Layout,
    /// Nodes that a chain waits for at first: those that were named.
    pub peers: Vec<SocketAddr>,
    /// How long the first chain waits for nodes to be found.
    pub settle: Duration,
    pub replan: ReplanOptions,
}

/// When a running chain gives way to a faster one.
#[derive(Clone, Copy, Debug)]
pub struct ReplanOptions {
    /// How long a chain runs at least.
    pub hold: Duration,
    /// How long steps are observed before machines are judged by them.
    pub observation: Duration,
}

impl Default for ReplanOptions {
    fn default() -> Self {
        Self { hold: Duration::from_secs(15), observation: Duration::from_secs(2) }
    }
}

enum CoordinatorEvent {
    /// A node was found, or a person gave its address.
    Found {
        address: SocketAddr,
        is_named: bool,
    },
    Connected(Box<NodeLink>),
    NotConnected {
        address: SocketAddr,
        failure: Failure,
        why: String,
    },
    Reply {
        node: NodeId,
        reply: ControlReply,
    },
    Gone {
        node: NodeId,
        why: String,
    },
    /// The first or the last stage of a chain is silent.
    Silent {
        chain: u64,
        end: LinkEnd,
    },
    Rebuild {
        why: String,
        stage: Option<Box<CoordinatorStage<CpuBackend>>>,
    },
    /// The coordinator was dropped.
    Ended,
}

/// Dropping it ends the thread and all connections.
pub struct Coordinator {
    events: Sender<CoordinatorEvent>,
    formed: Receiver<FormedChain<CpuBackend>>,
    replacements: Receiver<String>,
    times: Arc<ChainTimes>,
    report: ClusterWatch,
}

impl Coordinator {
    /// Starts to look for nodes, and to form a chain for the model.
    pub fn start(options: CoordinatorOptions, model: ClusterModel) -> std::io::Result<Self> {
        let (events, received) = channel();
        let (formed_sender, formed) = channel();
        let (replacements_sender, replacements) = channel();
        let report = ClusterWatch::default();
        let _ = events.send(CoordinatorEvent::Rebuild { why: "it starts".to_owned(), stage: None });
        let times = Arc::<ChainTimes>::default();
        let executor =
            ExecutorSide { formed: formed_sender, replacements: replacements_sender, times: Arc::clone(&times) };
        let worker = Worker::new(options, model, &events, received, executor, report.clone());
        thread::Builder::new().name("consort-cluster".to_owned()).spawn(move || worker.run())?;
        Ok(Self { events, formed, replacements, times, report })
    }

    /// For whoever discovers nodes.
    pub fn finder(&self) -> NodeFinder {
        NodeFinder(self.events.clone())
    }

    /// For the chain, which records how long its steps take. Machines are judged by it.
    pub fn times(&self) -> Arc<ChainTimes> {
        Arc::clone(&self.times)
    }

    pub fn report(&self) -> ClusterReport {
        self.report.get()
    }

    /// For whoever shows the cluster while it works.
    pub fn watch(&self) -> ClusterWatch {
        self.report.clone()
    }
}

/// Tells a coordinator of nodes.
#[derive(Clone)]
pub struct NodeFinder(Sender<CoordinatorEvent>);

impl NodeFinder {
    /// A node was discovered, perhaps one of another cluster. Returns whether the coordinator is still there.
    pub fn found(&self, address: SocketAddr) -> bool {
        self.0.send(CoordinatorEvent::Found { address, is_named: false }).is_ok()
    }

    /// A person gave the address of a node. Returns whether the coordinator is still there.
    pub fn named(&self, address: SocketAddr) -> bool {
        self.0.send(CoordinatorEvent::Found { address, is_named: true }).is_ok()
    }
}

impl ChainBuilder<CpuBackend> for Coordinator {
    fn rebuild(&mut self, why: &str, stage: Option<Box<CoordinatorStage<CpuBackend>>>) {
        let _ = self.events.send(CoordinatorEvent::Rebuild { why: why.to_owned(), stage });
    }

    fn poll(&mut self, wait: Duration) -> Option<FormedChain<CpuBackend>> {
        let formed = self.formed.recv_timeout(wait).ok()?;
        // They were meant for a chain before.
        self.replacements.try_iter().for_each(drop);
        Some(formed)
    }

    fn missing(&self) -> Option<(LayerRange, String)> {
        self.report.lock().missing()
    }

    fn replacement(&mut self) -> Option<String> {
        self.replacements.try_recv().ok()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.events.send(CoordinatorEvent::Ended);
    }
}

/// What the coordinator's thread and the executor share.
struct ExecutorSide {
    formed: Sender<FormedChain<CpuBackend>>,
    /// Why a running chain is to be replaced.
    replacements: Sender<String>,
    times: Arc<ChainTimes>,
}

struct Worker {
    options: CoordinatorOptions,
    model: Arc<ClusterModel>,
    received: Receiver<CoordinatorEvent>,
    executor: ExecutorSide,
    report: ClusterWatch,
    nodes: NodeTable,
    paths: NodePaths,
    replanning: Replanning,
    chain: Option<CurrentChain>,
    chains: u64,
    /// Since when a chain is to be formed.
    wanted: Option<Instant>,
    /// The coordinator's part of the last chain.
    stage: Option<Box<CoordinatorStage<CpuBackend>>>,
}

/// The executor is gone.
struct Ended;

impl Worker {
    /// Peers that were named are found at once.
    fn new(
        options: CoordinatorOptions,
        model: ClusterModel,
        events: &Sender<CoordinatorEvent>,
        received: Receiver<CoordinatorEvent>,
        executor: ExecutorSide,
        report: ClusterWatch,
    ) -> Self {
        for &address in &options.peers {
            // The receiver is here.
            let _ = events.send(CoordinatorEvent::Found { address, is_named: true });
        }
        Self {
            nodes: NodeTable::new(options.key.clone(), options.silence, events.clone()),
            options,
            model: Arc::new(model),
            received,
            executor,
            report,
            paths: NodePaths::default(),
            replanning: Replanning::default(),
            chain: None,
            chains: 0,
            wanted: None,
            stage: None,
        }
    }

    fn run(mut self) {
        loop {
            match self.may_form() {
                true if self.form_next().is_err() => return,
                true => {}
                false => self.replan(),
            }
            if self.wait(TICK).is_err() {
                return;
            }
        }
    }

    /// Whether it is time to form a chain: nodes that were named have answered, or the time to wait for them is over.
    fn may_form(&self) -> bool {
        let Some(since) = self.wanted else { return false };
        let is_first = self.chains == 0;
        let named = self.options.peers.iter().all(|&address| self.nodes.is_decided(address));
        let is_found = !is_first || since.elapsed() >= self.options.settle || !self.options.peers.is_empty() && named;
        is_found && self.paths.is_settled()
    }

    fn form_next(&mut self) -> Result<(), Ended> {
        match self.form() {
            Ok((formed, chain)) => {
                info!(chain = chain.number, stages = chain.stages.len(), "the chain is formed");
                self.chain = Some(chain);
                self.wanted = None;
                self.executor.formed.send(formed).map_err(|_| Ended)
            }
            Err(FormError::Ended) => Err(Ended),
            Err(FormError::Plan(error)) => {
                self.nodes.pardon();
                self.set_waiting(error.to_string());
                self.wait(TICK * 5)
            }
            Err(FormError::Node { node, why }) => {
                warn!("the chain could not be formed: {}: {why}", self.nodes.name(node));
                self.nodes.fail(node, &why);
                Ok(())
            }
            Err(FormError::Path { node, next, why }) => {
                warn!("the chain could not be formed: {}: {why}", self.nodes.name(node));
                self.paths.broken(node, next);
                Ok(())
            }
            Err(FormError::Own(why)) => {
                warn!("the chain could not be formed: {why}");
                self.set_waiting(why);
                self.wait(TICK * 10)
            }
        }
    }

    fn set_waiting(&self, why: String) {
        let mut report = self.report.lock();
        if report.waiting.as_ref() != Some(&why) {
            info!("waiting for nodes: {why}");
        }
        report.waiting = Some(why);
    }

    /// Handles events for this long.
    fn wait(&mut self, time: Duration) -> Result<(), Ended> {
        let until = Instant::now() + time;
        loop {
            match self.received.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(CoordinatorEvent::Ended) | Err(RecvTimeoutError::Disconnected) => return Err(Ended),
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => break,
            }
        }
        self.nodes.retry();
        for (node, other) in self.paths.due(Instant::now()) {
            self.measure_path(node, other);
        }
        Ok(())
    }

    /// Handles an event that concerns no request that is being waited for.
    fn handle(&mut self, event: CoordinatorEvent) {
        match event {
            CoordinatorEvent::Found { address, is_named } => self.nodes.add(address, is_named),
            CoordinatorEvent::Connected(link) => {
                let node = link.id;
                self.nodes.connected(*link);
                self.measure_paths(node);
                self.replanning.changed();
            }
            CoordinatorEvent::NotConnected { address, failure, why } => {
                self.nodes.not_connected(address, failure, &why);
            }
            CoordinatorEvent::Gone { node, why } => {
                let name = self.nodes.name(node);
                self.nodes.gone(node, &why);
                self.paths.forget(node);
                self.replanning.changed();
                if let Some(chain) = &mut self.chain {
                    chain.suspect(node);
                }
                self.lose(|chain| chain.has(node), &format!("{name}: {why}"));
            }
            CoordinatorEvent::Reply { node, reply: ControlReply::Fault { chain, fault } } => {
                let name = self.nodes.name(node);
                if let Some(current) = self.chain.as_mut().filter(|current| current.number == chain) {
                    current.suspect_fault(node, &fault);
                }
                let why = match fault {
                    WireFault::Stage { why } | WireFault::Lost { why } => format!("the stage on {name} failed: {why}"),
                    WireFault::Previous { why } => format!("{name} lost the stage before it: {why}"),
                    WireFault::Next { why } => format!("{name} lost the next stage: {why}"),
                };
                self.lose(|current| current.number == chain, &why);
            }
            CoordinatorEvent::Reply { node, reply: ControlReply::Facts { facts, .. } } => {
                if self.nodes.described(node, facts) {
                    self.replanning.changed();
                }
            }
            CoordinatorEvent::Reply { node, reply } => {
                let _ = self.path_reply(node, &reply) || self.fetch_reply(node, &reply);
            }
            CoordinatorEvent::Silent { chain, end } => {
                if let Some(current) = self.chain.as_mut().filter(|current| current.number == chain) {
                    current.suspect_end(end);
                }
            }
            CoordinatorEvent::Ended => {}
            CoordinatorEvent::Rebuild { why, stage } => {
                info!("a chain is to be formed: {why}");
                if let Some(chain) = self.chain.take() {
                    chain.culprits().for_each(|address| self.nodes.blame(address));
                }
                if self.chains > 0 {
                    self.report.lock().rebuilding.get_or_insert(why);
                }
                self.replanning.stop();
                self.stage = stage.or(self.stage.take());
                self.wanted = Some(Instant::now());
            }
        }
        self.report_nodes();
    }

    fn report_nodes(&self) {
        let (now, mut report) = (Instant::now(), self.report.lock());
        self.nodes.fill(&mut report);
        for node in &mut report.nodes {
            let unusable = node.facts.as_ref().and_then(|facts| self.unusable(facts));
            if let Some(why) = unusable.or_else(|| self.replanning.slowness.reason(node.address, now)) {
                node.not_used = Some(why);
            }
        }
    }

    /// Asks a node that has joined how far it is to the others.
    fn measure_paths(&mut self, node: NodeId) {
        let others: Vec<_> = self.nodes.links().map(|link| link.id).collect();
        others.into_iter().filter(|other| *other != node).for_each(|other| self.measure_path(node, other));
    }

    fn measure_path(&mut self, node: NodeId, other: NodeId) {
        let Some(address) = self.nodes.link(other).map(|link| link.address) else { return };
        if let Some(link) = self.nodes.link(node) {
            let request = link.request(|id| ControlRequest::Reach { id, address });
            self.paths.ask(node, request, other);
        }
    }

    /// Handles the reply of a node that was asked how far it is to another. Returns whether it is one.
    fn path_reply(&mut self, node: NodeId, reply: &ControlReply) -> bool {
        let is_answer = match *reply {
            ControlReply::RoundTrip { id, us } => self.paths.answer(node, id, Some(Duration::from_micros(us))),
            ControlReply::Failed { id, .. } => self.paths.answer(node, id, None),
            _ => false,
        };
        if is_answer {
            self.replanning.changed();
        }
        is_answer
    }

    /// Tells the executor that its chain is lost, if it is this one.
    fn lose(&mut self, is_lost: impl Fn(&CurrentChain) -> bool, why: &str) {
        if let Some(chain) = self.chain.take_if(|chain| is_lost(chain)) {
            self.report.lock().rebuilding = Some(why.to_owned());
            chain.culprits().for_each(|address| self.nodes.blame(address));
            if let Some(handle) = chain.handle {
                handle.lost(why);
            }
        }
    }
}
