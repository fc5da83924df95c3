//! How a running chain gives way to a better one: a faster one, when a machine has joined, or one has turned slow; or the one that
//! was asked for, when a machine that was lost is back. The machines of the better chain fetch their weights while the current one
//! runs; then the executor is told to have the chain formed again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plan::{COORDINATOR, Plan};
use tracing::{info, warn};
use types::LayerRange;

use super::Worker;
use super::forming::LOAD_SILENCE;
use super::node_link::NodeId;
use super::planning::{Candidates, Layout, PlannedStage};
use super::slowness::Slowness;
use crate::chain::StageTimes;
use crate::wire::control::{ControlReply, ControlRequest};

/// A chain is replaced only by one that is so many times as fast: the streams pause meanwhile.
const GAIN_MIN: f64 = 1.2;
/// How many steps are observed at least before machines are judged by them.
const OBSERVED_STEPS_MIN: u64 = 16;
/// How often the plan is looked at again while a machine is believed to be slow: it may have recovered.
const RECOVERY_INTERVAL: Duration = Duration::from_secs(10);
/// How long no faster chain is tried after one could not be prepared.
const RETRY: Duration = Duration::from_secs(30);

/// What is known of a running chain, and of the one that is to replace it.
pub(super) struct Replanning {
    pub slowness: Slowness,
    /// The sums of steps when the current observation began.
    seen: StageTimes,
    seen_at: Instant,
    /// When the plan is to be looked at again; `None`: when something changes.
    due: Option<Instant>,
    next: Option<NextChain>,
}

/// A faster chain in preparation.
struct NextChain {
    /// For people.
    why: String,
    /// Requests for machines to fetch their weights.
    pending: HashMap<(NodeId, u64), PlannedStage>,
    heard_at: Instant,
    /// Whether its weights are not to be sent any more.
    is_over: Arc<AtomicBool>,
    /// Whether the executor was told.
    is_announced: bool,
}

impl Drop for NextChain {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

impl Default for Replanning {
    fn default() -> Self {
        let slowness = Slowness::default();
        Self { slowness, seen: StageTimes::default(), seen_at: Instant::now(), due: None, next: None }
    }
}

impl Replanning {
    /// Machines have come or gone, or ways between them were measured.
    pub fn changed(&mut self) {
        self.due.get_or_insert(Instant::now());
    }

    /// The chain is lost, or formed again.
    pub fn stop(&mut self) {
        self.next = None;
        (self.seen, self.seen_at) = (StageTimes::default(), Instant::now());
    }
}

/// The layers of a plan and where they are, for people.
fn said(candidates: &Candidates, plan: &Plan) -> String {
    let stage = |&(node, planned): &(usize, LayerRange)| {
        let name = if node == COORDINATOR { "here" } else { &candidates.cluster.nodes()[node].name };
        format!("{} on {name}", candidates.numbered(planned))
    };
    plan.assignment.stages().iter().map(stage).collect::<Vec<_>>().join(", ")
}

impl Worker {
    /// Observes the current chain, and prepares a better one if there is one. A layout that was asked for gives way to no other.
    pub(super) fn replan(&mut self) {
        let Some(chain) = &self.chain else { return self.replanning.stop() };
        let is_held = chain.formed_at.elapsed() < self.options.replan.hold;
        let is_planned = matches!(self.options.layout, Layout::Planned);
        if is_planned {
            self.observe();
        }
        match &mut self.replanning.next {
            Some(next) if next.is_announced => return,
            Some(next) if next.pending.is_empty() => {
                next.is_announced = true;
                // An error means that the executor is gone.
                let _ = self.executor.replacements.send(next.why.clone());
                return;
            }
            Some(next) if next.heard_at.elapsed() > LOAD_SILENCE => return self.give_up("no weights arrive"),
            Some(_) => return,
            None => {}
        }
        if is_held || self.replanning.due.is_none_or(|due| due > Instant::now()) {
            return;
        }
        let recovery = || Instant::now() + RECOVERY_INTERVAL;
        self.replanning.due = (!self.replanning.slowness.is_empty()).then(recovery);
        let better = if is_planned { self.faster_chain() } else { self.asked_chain() };
        if let Some((stages, why)) = better {
            info!("{why}; its machines fetch their weights");
            self.prepare(&stages, why);
        }
    }

    /// Compares what steps took with what they were predicted to take.
    fn observe(&mut self) {
        let (times, Replanning { seen, seen_at, .. }) = (self.executor.times.get(), &mut self.replanning);
        let stages = times.compute.len();
        if times.steps < seen.steps || stages != seen.compute.len() {
            (*seen, *seen_at) = (times, Instant::now());
            return;
        }
        let steps = times.steps - seen.steps;
        if steps < OBSERVED_STEPS_MIN || seen_at.elapsed() < self.options.replan.observation {
            return;
        }
        let rows = ((times.rows - seen.rows) / steps).max(1) as usize;
        let sums = times.compute.iter().zip(&seen.compute);
        let means: Vec<_> = sums.map(|(sum, seen)| (sum.total_s - seen.total_s) / steps as f64).collect();
        (*seen, *seen_at) = (times, Instant::now());
        self.judge(rows, &means);
    }

    /// `means`: how long the coordinator and the stages computed for a step of so many rows.
    fn judge(&mut self, rows: usize, means: &[f64]) {
        let Some(chain) = self.chain.as_ref().filter(|chain| chain.stages.len() + 1 == means.len()) else { return };
        // As measured, not as slow as they are believed to be.
        let Ok(candidates) = self.candidates_as(self.exact(), &Slowness::default()) else { return };
        let Ok(planner) = self.planner(&candidates.cluster) else { return };
        let Some(assignment) = candidates.assignment(&chain.stages) else { return };
        let predicted = planner.step_seconds(&assignment, rows);
        let now = Instant::now();
        for (stage, mean) in chain.stages.iter().zip(&means[1..]) {
            let node = candidates.index(stage.node);
            let Some(&(_, predicted)) = predicted.iter().find(|(other, _)| Some(*other) == node) else { continue };
            if self.replanning.slowness.observe(stage.address, *mean, predicted, now) {
                let name = self.nodes.name(stage.node);
                warn!("{name} is slow: a step takes it {:.1} ms instead of {:.1}", mean * 1e3, predicted * 1e3);
                self.replanning.due = Some(now);
            }
        }
    }

    /// The stages of a chain that is so much faster that it is worth a pause, and what to say of it.
    fn faster_chain(&self) -> Option<(Vec<PlannedStage>, String)> {
        let chain = self.chain.as_ref()?;
        let candidates = self.candidates(self.exact()).ok()?;
        let planner = self.planner(&candidates.cluster).ok()?;
        let current = planner.evaluate(&candidates.assignment(&chain.stages)?).ok()?;
        let best = planner.plan().ok()?;
        let [current, fastest] = [&current, &best].map(|plan| plan.prediction.minimised_seconds());
        if fastest * GAIN_MIN > current {
            return None;
        }
        let why =
            format!("a chain that is {:.1} times as fast: layers {}", current / fastest, said(&candidates, &best));
        Some((candidates.stages(&best), why))
    }

    /// The stages of the chain that was asked for, if another one runs because machines were missing, and they are back.
    fn asked_chain(&self) -> Option<(Vec<PlannedStage>, String)> {
        let chain = self.chain.as_ref()?;
        let candidates = self.candidates(self.exact()).ok()?;
        let planner = self.planner(&candidates.cluster).ok()?;
        let asked = self.options.layout.as_asked(&planner, &candidates.cluster, &self.options.peers)?;
        let stages = candidates.stages(&asked);
        let why = || format!("the machines that were missing are back: layers {}", said(&candidates, &asked));
        (stages != chain.stages).then(|| (stages, why()))
    }

    /// Has machines fetch the weights of their stages.
    fn prepare(&mut self, stages: &[PlannedStage], why: String) {
        let exact = self.exact();
        let running: Vec<_> = self.chain.iter().flat_map(|chain| chain.stages.clone()).collect();
        let mut pending = HashMap::new();
        for &stage in stages.iter().filter(|stage| !running.contains(stage)) {
            let spec = Box::new(self.model.stage_spec(stage.layers, exact));
            if let Some(link) = self.nodes.link(stage.node) {
                pending.insert((stage.node, link.request(|id| ControlRequest::Fetch { id, stage: spec })), stage);
            }
        }
        let (heard_at, is_over) = (Instant::now(), Arc::default());
        self.replanning.next = Some(NextChain { why, pending, heard_at, is_over, is_announced: false });
    }

    /// Handles a reply of a machine that fetches weights. Returns whether it is one.
    pub(super) fn fetch_reply(&mut self, node: NodeId, reply: &ControlReply) -> bool {
        let (Some(id), Some(next)) = (reply.id(), &mut self.replanning.next) else { return false };
        let Some(&stage) = next.pending.get(&(node, id)) else { return false };
        next.heard_at = Instant::now();
        match reply {
            ControlReply::Missing { transfer, bytes, .. } => {
                info!(node = self.nodes.name(node), bytes, "weights are sent");
                let is_over = Arc::clone(&next.is_over);
                if let Err(error) = self.send_weights(&stage, *transfer, &is_over) {
                    self.give_up(&error.to_string());
                }
            }
            ControlReply::Progress { .. } => {}
            ControlReply::Fetched { .. } => drop(next.pending.remove(&(node, id))),
            ControlReply::Failed { why, .. } => self.give_up(why),
            _ => self.give_up("it answered something else"),
        }
        true
    }

    fn give_up(&mut self, why: &str) {
        warn!("a better chain could not be prepared: {why}");
        self.replanning.next = None;
        self.replanning.due = Some(Instant::now() + RETRY);
    }
}
