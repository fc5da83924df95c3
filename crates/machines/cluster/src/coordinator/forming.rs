//! How a chain is formed: plan, load all stages at once, link them from the last to the first, and connect to both ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use engine::CoordinatorStage;
use kernels::cpu::{CpuBackend, Level};
use model::ModelPart;
use net::{MessageStream, WaitLimit};
use tracing::info;
use types::LayerRange;

use super::node_link::NodeId;
use super::planning::{LayoutError, PlannedStage};
use super::{Arithmetic, CoordinatorEvent, CurrentChain, MissingWeights, PlanReport, Worker};
use crate::chain::{ChainLink, FormedChain};
use crate::purpose::{CHAIN, ConnectionId, RESULTS};
use crate::wire::chain::ChainKind;
use crate::wire::control::{ControlReply, ControlRequest};
use plan::COORDINATOR;

/// How long nodes may load without progress.
pub(super) const LOAD_SILENCE: Duration = Duration::from_secs(60);
/// How long a node may take to answer what needs no work, and to connect to another.
const ANSWER_DEADLINE: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub(super) enum FormError {
    /// No plan fits the nodes that are there.
    #[error(transparent)]
    Plan(LayoutError),
    /// A node could not do its part.
    #[error("{why}")]
    Node { node: NodeId, why: String },
    /// A node could not connect to the next one.
    #[error("{why}")]
    Path { node: NodeId, next: NodeId, why: String },
    /// The coordinator could not do its own.
    #[error("{0}")]
    Own(String),
    /// The executor is gone.
    #[error("the executor is gone")]
    Ended,
}

impl Worker {
    /// Forms a chain from the nodes that are connected.
    pub(super) fn form(&mut self) -> Result<(FormedChain<CpuBackend>, CurrentChain), FormError> {
        let exact = self.exact();
        let candidates = self.candidates(exact).map_err(|error| FormError::Plan(error.into()))?;
        let plan = self.plan(&candidates).map_err(FormError::Plan)?;
        let (stages, report) = (candidates.stages(&plan), candidates.report(&plan));
        let on_node = |&(node, planned): &(usize, LayerRange)| {
            format!("{} on {}", candidates.numbered(planned), candidates.cluster.nodes()[node].name)
        };
        let layers: Vec<_> = plan.assignment.stages().iter().map(on_node).collect();
        info!(tokens_per_s = plan.prediction.tokens_per_s(), bits = %plan.bits, "planned: layers {}", layers.join(", "));
        self.load_stages(&stages, exact)?;
        let own = self.model.own_part(plan.assignment.layers_of(COORDINATOR).map_or(0, LayerRange::count));
        let stage = self.own_stage(own, exact)?;
        self.chains += 1;
        // Another coordinator may use the same nodes.
        let number = engine::fresh_seed();
        self.link_stages(number, &stages)?;
        let link = self.connect(number, &stages).inspect_err(|_| self.stage = None)?;
        self.nodes.succeeded(&stages);
        if let Some(level) = exact {
            self.options.arithmetic = Arithmetic::Exact(level);
        }
        let handle = link.as_ref().map(ChainLink::handle);
        self.report_chain(own, &stages, report, exact);
        Ok((FormedChain { stage, link }, CurrentChain::new(number, stages, handle)))
    }

    /// Has all nodes load their layers, and sends them the weights that they lack.
    fn load_stages(&mut self, stages: &[PlannedStage], exact: Option<Level>) -> Result<(), FormError> {
        let is_over = Arc::<AtomicBool>::default();
        let loaded = self.wait_for_stages(stages, exact, &is_over);
        is_over.store(true, Ordering::Relaxed);
        loaded
    }

    fn wait_for_stages(
        &mut self,
        stages: &[PlannedStage],
        exact: Option<Level>,
        is_over: &Arc<AtomicBool>,
    ) -> Result<(), FormError> {
        self.report.lock().weights.clear();
        let mut pending = HashMap::new();
        for stage in stages {
            let spec = Box::new(self.model.stage_spec(stage.layers, exact));
            let id = self.request(stage.node, |id| ControlRequest::Load { id, stage: spec })?;
            pending.insert((stage.node, id), *stage);
        }
        let mut deadline = Instant::now() + LOAD_SILENCE;
        while !pending.is_empty() {
            let (node, reply) = self.next_reply(deadline, &pending)?;
            deadline = Instant::now() + LOAD_SILENCE;
            let Some(&stage) = reply.id().and_then(|id| pending.get(&(node, id))) else { continue };
            match reply {
                ControlReply::Missing { transfer, bytes, .. } => {
                    info!(node = self.nodes.name(node), bytes, "weights are sent");
                    self.report.lock().weights.push(MissingWeights { address: stage.address, bytes, received: 0 });
                    self.send_weights(&stage, transfer, is_over)?;
                }
                ControlReply::Progress { bytes, .. } => self.report.lock().received(stage.address, bytes),
                ControlReply::Loaded { id, weight_bytes, .. } => {
                    info!(node = self.nodes.name(node), layers = %stage.layers, weight_bytes, "loaded");
                    self.report.lock().received(stage.address, u64::MAX);
                    pending.remove(&(node, id));
                }
                ControlReply::Failed { why, .. } => return Err(FormError::Node { node, why }),
                _ => return Err(FormError::Node { node, why: "it answered something else".to_owned() }),
            }
        }
        Ok(())
    }

    /// Sends the weights that a node asks for, in the background, until `is_over`.
    pub(super) fn send_weights(
        &self,
        stage: &PlannedStage,
        transfer: u64,
        is_over: &Arc<AtomicBool>,
    ) -> Result<(), FormError> {
        let (model, key, silence) = (Arc::clone(&self.model), self.options.key.clone(), self.options.silence);
        let (address, is_over) = (stage.address, Arc::clone(is_over));
        let send = move || {
            let sent = model.send_weights(address, &key, silence, transfer, &|| is_over.load(Ordering::Relaxed));
            if let Err(error) = sent {
                // The node reports what it means for the stage.
                info!(%address, "the weights were not sent: {error}");
            }
        };
        let started = thread::Builder::new().name("consort-upload".to_owned()).spawn(send);
        started.map(drop).map_err(|error| FormError::Own(format!("start a thread: {error}")))
    }

    /// The coordinator's part: that of the chain before if it has these layers, else a new one.
    fn own_stage(
        &mut self,
        part: ModelPart,
        exact: Option<Level>,
    ) -> Result<Box<CoordinatorStage<CpuBackend>>, FormError> {
        let level = exact.unwrap_or(self.model.level());
        let fits = |stage: &CoordinatorStage<CpuBackend>| {
            let stage = stage.stage();
            stage.layers() == part.layers && stage.backend().level() == level
        };
        match self.stage.take().filter(|stage| fits(stage)) {
            Some(stage) => Ok(stage),
            None => self.model.load_own(part, level).map(Box::new).map_err(FormError::Own),
        }
    }

    /// Links the stages from the last to the first: each connects to one that expects it.
    fn link_stages(&mut self, chain: u64, stages: &[PlannedStage]) -> Result<(), FormError> {
        let mut next: Option<PlannedStage> = None;
        for (index, stage) in stages.iter().enumerate().rev() {
            let index = u16::try_from(index).map_err(|_| FormError::Own("too many stages".to_owned()))?;
            let id = self.request(stage.node, |id| ControlRequest::Link {
                id,
                chain,
                index,
                next: next.map(|next| next.address),
            })?;
            let waiting = HashMap::from([((stage.node, id), *stage)]);
            let deadline = Instant::now() + ANSWER_DEADLINE;
            loop {
                match self.next_reply(deadline, &waiting)? {
                    (node, ControlReply::Linked { id: found }) if (node, found) == (stage.node, id) => break,
                    (node, ControlReply::Failed { id: found, why }) if (node, found) == (stage.node, id) => {
                        return Err(match next {
                            Some(next) => FormError::Path { node, next: next.node, why },
                            None => FormError::Node { node, why },
                        });
                    }
                    _ => {}
                }
            }
            next = Some(*stage);
        }
        Ok(())
    }

    /// Connects to the first and the last stage.
    fn connect(&self, chain: u64, stages: &[PlannedStage]) -> Result<Option<ChainLink>, FormError> {
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return Ok(None) };
        let index = (stages.len() - 1) as u16;
        let dial = |stage: &PlannedStage, id: ConnectionId| {
            let limit = WaitLimit::until(Instant::now() + ANSWER_DEADLINE);
            let connected =
                MessageStream::connect(stage.address, &self.options.key, &id.hello(self.options.silence), &limit);
            connected.map_err(|error| FormError::Node { node: stage.node, why: error.to_string() })
        };
        let to_first = dial(first, ConnectionId { purpose: CHAIN, number: chain, index: 0 })?;
        let from_last = dial(last, ConnectionId { purpose: RESULTS, number: chain, index })?;
        let (rows, hidden) = (self.model.rows_max(), self.model.facts().hidden);
        let bytes_max = ChainKind::States.bytes_max(rows, hidden);
        let events = self.nodes.events();
        // An error means that the coordinator has ended.
        let on_silence = move |end| drop(events.send(CoordinatorEvent::Silent { chain, end }));
        let link = ChainLink::new(stages.len(), to_first, from_last, bytes_max, Arc::new(on_silence));
        link.map(Some).map_err(|error| FormError::Own(format!("start a thread: {error}")))
    }

    fn request(&mut self, node: NodeId, request: impl FnOnce(u64) -> ControlRequest) -> Result<u64, FormError> {
        let gone = FormError::Node { node, why: "it is gone".to_owned() };
        Ok(self.nodes.link(node).ok_or(gone)?.request(request))
    }

    /// The next reply of a node that is waited for. Other events are handled. Fails if such a node is lost.
    fn next_reply(
        &mut self,
        deadline: Instant,
        waiting: &HashMap<(NodeId, u64), PlannedStage>,
    ) -> Result<(NodeId, ControlReply), FormError> {
        let is_waited_for = |node: NodeId| waiting.keys().any(|(waiting, _)| *waiting == node);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.received.recv_timeout(left) {
                Ok(event @ CoordinatorEvent::Reply { reply: ControlReply::Facts { .. }, .. }) => self.handle(event),
                Ok(CoordinatorEvent::Reply { node, reply }) if reply.id().is_some() && is_waited_for(node) => {
                    if !self.path_reply(node, &reply) {
                        return Ok((node, reply));
                    }
                }
                Ok(CoordinatorEvent::Gone { node, why }) if is_waited_for(node) => {
                    return Err(FormError::Node { node, why });
                }
                Ok(CoordinatorEvent::Ended) | Err(RecvTimeoutError::Disconnected) => return Err(FormError::Ended),
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {
                    let &(node, _) = waiting.keys().next().expect("a reply is waited for");
                    return Err(FormError::Node { node, why: "it did not answer in time".to_owned() });
                }
            }
        }
    }

    fn report_chain(&self, own: ModelPart, stages: &[PlannedStage], plan: PlanReport, exact: Option<Level>) {
        let mut report = self.report.lock();
        report.plan = Some(plan);
        report.waiting = None;
        report.rebuilding = None;
        report.chains = self.chains;
        report.exact = exact;
        report.stages = own.layers.map(|layers| (None, layers)).into_iter().collect();
        report.stages.extend(stages.iter().map(|stage| (Some(stage.address), stage.layers)));
    }
}
