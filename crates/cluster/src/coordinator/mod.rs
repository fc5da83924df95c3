//! `Coordinator`: finds nodes, plans, has them load their layers, and forms chains, in a thread of its own.
//!
//! It is the [`ChainBuilder`] of a [`Chain`](crate::chain::Chain). A chain that is lost is formed again from the nodes that are
//! there. A node that fails is left out for a while, and for longer with each failure.

mod arithmetic;
mod forming;
mod model;
mod node_link;
mod node_table;
mod plan_report;
mod planning;
mod report;
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

use crate::chain::{ChainBuilder, FormedChain, LinkHandle};
use crate::wire::control::{ControlReply, WireFault};
pub use arithmetic::Arithmetic;
use forming::FormError;
pub use model::{ClusterModel, ClusterModelConfig, ClusterModelError};
use node_link::{NodeId, NodeLink};
use node_table::NodeTable;
use plan::Optimise;
pub use plan_report::{PlanReport, PlannedHop, PlannedStageReport};
pub use planning::{Layout, LayoutError};
pub use report::{ClusterReport, ClusterWatch, NodeReport, NodeState};
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
}

enum CoordinatorEvent {
    /// A node was found, or named.
    Found {
        address: SocketAddr,
    },
    Connected(Box<NodeLink>),
    NotConnected {
        address: SocketAddr,
        why: String,
        is_permanent: bool,
    },
    Reply {
        node: NodeId,
        reply: ControlReply,
    },
    Gone {
        node: NodeId,
        why: String,
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
    report: ClusterWatch,
}

impl Coordinator {
    /// Starts to look for nodes, and to form a chain for the model.
    pub fn start(options: CoordinatorOptions, model: ClusterModel) -> std::io::Result<Self> {
        let (events, received) = channel();
        let (sender, formed) = channel();
        let report = ClusterWatch::default();
        let _ = events.send(CoordinatorEvent::Rebuild { why: "it starts".to_owned(), stage: None });
        let worker = Worker::new(options, model, &events, received, sender, report.clone());
        thread::Builder::new().name("consort-cluster".to_owned()).spawn(move || worker.run())?;
        Ok(Self { events, formed, report })
    }

    /// For whoever discovers nodes.
    pub fn finder(&self) -> NodeFinder {
        NodeFinder(self.events.clone())
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
    /// A node was discovered. Returns whether the coordinator is still there.
    pub fn found(&self, address: SocketAddr) -> bool {
        self.0.send(CoordinatorEvent::Found { address }).is_ok()
    }
}

impl ChainBuilder<CpuBackend> for Coordinator {
    fn rebuild(&mut self, why: &str, stage: Option<Box<CoordinatorStage<CpuBackend>>>) {
        let _ = self.events.send(CoordinatorEvent::Rebuild { why: why.to_owned(), stage });
    }

    fn poll(&mut self, wait: Duration) -> Option<FormedChain<CpuBackend>> {
        self.formed.recv_timeout(wait).ok()
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.events.send(CoordinatorEvent::Ended);
    }
}

/// A chain that was handed over.
struct CurrentChain {
    number: u64,
    nodes: Vec<NodeId>,
    handle: Option<LinkHandle>,
}

struct Worker {
    options: CoordinatorOptions,
    model: Arc<ClusterModel>,
    received: Receiver<CoordinatorEvent>,
    formed: Sender<FormedChain<CpuBackend>>,
    report: ClusterWatch,
    nodes: NodeTable,
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
        formed: Sender<FormedChain<CpuBackend>>,
        report: ClusterWatch,
    ) -> Self {
        for &address in &options.peers {
            // The receiver is here.
            let _ = events.send(CoordinatorEvent::Found { address });
        }
        Self {
            nodes: NodeTable::new(options.key.clone(), options.silence, events.clone()),
            options,
            model: Arc::new(model),
            received,
            formed,
            report,
            chain: None,
            chains: 0,
            wanted: None,
            stage: None,
        }
    }

    fn run(mut self) {
        loop {
            if self.may_form() && self.form_next().is_err() {
                return;
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
        !is_first || since.elapsed() >= self.options.settle || !self.options.peers.is_empty() && named
    }

    fn form_next(&mut self) -> Result<(), Ended> {
        match self.form() {
            Ok((formed, chain)) => {
                info!(chain = chain.number, stages = chain.nodes.len(), "the chain is formed");
                self.chain = Some(chain);
                self.wanted = None;
                self.formed.send(formed).map_err(|_| Ended)
            }
            Err(FormError::Ended) => Err(Ended),
            Err(FormError::Plan(error)) => {
                self.set_waiting(error.to_string());
                self.wait(TICK * 5)
            }
            Err(FormError::Node { node, why }) => {
                warn!("the chain could not be formed: {}: {why}", self.nodes.name(node));
                self.nodes.fail(node, &why);
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
        Ok(())
    }

    /// Handles an event that concerns no request that is being waited for.
    fn handle(&mut self, event: CoordinatorEvent) {
        match event {
            CoordinatorEvent::Found { address } => self.nodes.add(address),
            CoordinatorEvent::Connected(link) => self.nodes.connected(*link),
            CoordinatorEvent::NotConnected { address, why, is_permanent } => {
                self.nodes.not_connected(address, &why, is_permanent);
            }
            CoordinatorEvent::Gone { node, why } => {
                let name = self.nodes.name(node);
                self.nodes.gone(node, &why);
                self.lose(|chain| chain.nodes.contains(&node), &format!("{name}: {why}"));
            }
            CoordinatorEvent::Reply { node, reply: ControlReply::Fault { chain, fault } } => {
                let name = self.nodes.name(node);
                let why = match fault {
                    WireFault::Stage { why } | WireFault::Lost { why } => format!("the stage on {name} failed: {why}"),
                    WireFault::Previous { why } => format!("{name} lost the stage before it: {why}"),
                    WireFault::Next { why } => format!("{name} lost the next stage: {why}"),
                };
                self.lose(|current| current.number == chain, &why);
            }
            CoordinatorEvent::Reply { .. } | CoordinatorEvent::Ended => {}
            CoordinatorEvent::Rebuild { why, stage } => {
                info!("a chain is to be formed: {why}");
                self.chain = None;
                self.stage = stage.or(self.stage.take());
                self.wanted = Some(Instant::now());
            }
        }
        self.report_nodes();
    }

    fn report_nodes(&self) {
        let mut report = self.report.lock();
        self.nodes.fill(&mut report);
        for node in &mut report.nodes {
            if let Some(why) = node.facts.as_ref().and_then(|facts| self.unusable(facts)) {
                node.not_used = Some(why);
            }
        }
    }

    /// Tells the executor that its chain is lost, if it is this one.
    fn lose(&mut self, is_lost: impl Fn(&CurrentChain) -> bool, why: &str) {
        if let Some(chain) = self.chain.take_if(|chain| is_lost(chain))
            && let Some(handle) = chain.handle
        {
            handle.lost(why);
        }
    }
}
