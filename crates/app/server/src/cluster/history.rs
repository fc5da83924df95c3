//! `WatchedCluster`: a cluster's monitor that remembers. It looks at the machines several times a second, so that one that had
//! layers and is gone is shown as lost until it is back, whatever the coordinator tries meanwhile; and it keeps what happened
//! for the timeline of the page.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use types::LayerRange;

use super::snapshot::{ChainSnapshot, NodeUse};
use super::{ClusterMonitor, SharedMonitor};
use crate::ids::unix_now;

/// How often it looks.
const LOOK: Duration = Duration::from_millis(250);
/// Events that are kept.
const EVENTS_MAX: usize = 64;
/// Machines that are remembered.
const MACHINES_MAX: usize = 512;

/// Something that happened in a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterEvent {
    /// Seconds since 1970.
    pub at: u64,
    pub kind: ClusterEventKind,
}

#[derive(Clone, Debug, PartialEq)]
pub enum ClusterEventKind {
    /// A machine is there for the first time, or again.
    Joined { machine: EventMachine, again: bool },
    /// A machine without layers is gone.
    Left { machine: EventMachine, why: Option<String> },
    /// A machine with layers is gone.
    Lost { machine: EventMachine, layers: LayerRange, why: Option<String> },
    /// Another chain has the layers of a machine that was lost.
    Moved { machine: EventMachine, layers: LayerRange, to: Vec<String>, seconds: f64 },
    /// The first chain runs on these machines.
    Formed { to: Vec<String> },
    /// The chain was formed again, though no machine was lost.
    Reformed { why: Option<String>, seconds: Option<f64>, to: Vec<String> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventMachine {
    pub name: String,
    pub address: String,
}

pub struct WatchedCluster {
    inner: SharedMonitor,
    history: Mutex<History>,
}

impl WatchedCluster {
    /// Looks on a thread, which ends with the last user. A swarm is not watched.
    pub fn start(inner: SharedMonitor) -> Arc<Self> {
        let watched = Arc::new(Self { inner, history: Mutex::default() });
        let weak = Arc::downgrade(&watched);
        let look = move || {
            while let Some(watched) = weak.upgrade() {
                if watched.snapshot().swarm.is_some() {
                    return;
                }
                drop(watched);
                thread::sleep(LOOK);
            }
        };
        if let Err(error) = thread::Builder::new().name("consort-watch".to_owned()).spawn(look) {
            tracing::warn!(%error, "the cluster is watched only while somebody asks for it");
        }
        watched
    }
}

impl ClusterMonitor for WatchedCluster {
    fn snapshot(&self) -> ChainSnapshot {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        let mut snapshot = self.inner.snapshot();
        // Peers of a swarm come and go.
        if snapshot.swarm.is_none() {
            history.observe(Instant::now(), unix_now(), &mut snapshot);
        }
        snapshot
    }

    fn events(&self) -> Vec<ClusterEvent> {
        let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.events.iter().cloned().collect()
    }
}

#[derive(Debug, Default)]
struct History {
    /// By address.
    machines: HashMap<String, Machine>,
    chains: u64,
    /// Since when the chain is being formed again, and why.
    rebuilding: Option<(Instant, String)>,
    /// The machines that were lost since the last chain was formed.
    losses: Vec<(EventMachine, LayerRange, Instant)>,
    events: VecDeque<ClusterEvent>,
}

#[derive(Debug, Default)]
struct Machine {
    is_up: bool,
    /// Its part of the last chain.
    layers: Option<LayerRange>,
    is_lost: bool,
}

impl History {
    /// Compares a snapshot with the one before, and marks the machines in it that are lost.
    fn observe(&mut self, now: Instant, at: u64, snapshot: &mut ChainSnapshot) {
        self.observe_machines(now, at, snapshot);
        match (&snapshot.rebuilding, &self.rebuilding) {
            (Some(why), None) => self.rebuilding = Some((now, why.clone())),
            (None, Some(_)) if snapshot.chains == self.chains => self.rebuilding = None,
            _ => {}
        }
        if snapshot.chains != self.chains {
            self.observe_chain(now, at, snapshot);
        }
    }

    fn observe_machines(&mut self, now: Instant, at: u64, snapshot: &mut ChainSnapshot) {
        for node in &mut snapshot.nodes {
            let Some(address) = &node.address else { continue };
            if self.machines.len() >= MACHINES_MAX && !self.machines.contains_key(address) {
                continue;
            }
            let is_up = matches!(node.usage, NodeUse::Used | NodeUse::Spare { .. });
            let why = match &node.usage {
                NodeUse::Failed { why } => Some(why.clone()),
                _ => None,
            };
            let name = node.name.clone().unwrap_or_else(|| address.clone());
            let is_known = self.machines.contains_key(address);
            let machine = self.machines.entry(address.clone()).or_default();
            let told = EventMachine { name, address: address.clone() };
            let kind = match (machine.is_up, is_up) {
                (false, true) => {
                    let again = std::mem::take(&mut machine.is_lost) || is_known && machine.layers.is_some();
                    Some(ClusterEventKind::Joined { machine: told, again })
                }
                (true, false) => Some(match machine.layers {
                    Some(layers) => {
                        machine.is_lost = true;
                        self.losses.push((told.clone(), layers, now));
                        ClusterEventKind::Lost { machine: told, layers, why: why.clone() }
                    }
                    None => ClusterEventKind::Left { machine: told, why: why.clone() },
                }),
                _ => None,
            };
            machine.is_up = is_up;
            if machine.is_lost {
                node.usage = NodeUse::Lost { why: why.unwrap_or_else(|| "it does not answer".to_owned()) };
            }
            if let Some(kind) = kind {
                self.tell(at, kind);
            }
        }
    }

    fn observe_chain(&mut self, now: Instant, at: u64, snapshot: &ChainSnapshot) {
        let is_first = self.chains == 0;
        self.chains = snapshot.chains;
        let holders = |layers: Option<LayerRange>| -> Vec<String> {
            let overlaps = |own: LayerRange| layers.is_none_or(|of| own.start() < of.end() && of.start() < own.end());
            let stages = snapshot.stages.iter().filter(|stage| stage.layers.is_some_and(overlaps));
            stages.map(|stage| stage.name.clone()).collect()
        };
        let losses = std::mem::take(&mut self.losses);
        let rebuilding = self.rebuilding.take();
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        if is_first {
            self.tell(at, ClusterEventKind::Formed { to: holders(None) });
        } else if losses.is_empty() {
            let (since, why) = rebuilding.unzip();
            let kind = ClusterEventKind::Reformed { why, seconds: since.map(seconds), to: holders(None) };
            self.tell(at, kind);
        }
        for (machine, layers, since) in losses {
            let to = holders(Some(layers));
            self.tell(at, ClusterEventKind::Moved { machine, layers, to, seconds: seconds(since) });
        }
        for (address, machine) in &mut self.machines {
            let stage = snapshot.stages.iter().find(|stage| stage.address.as_deref() == Some(address));
            machine.layers = stage.and_then(|stage| stage.layers);
        }
    }

    fn tell(&mut self, at: u64, kind: ClusterEventKind) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(ClusterEvent { at, kind });
    }
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::{NodeSnapshot, StageSnapshot};
    use super::*;

    const KITCHEN: &str = "10.0.0.2:1";
    const ATTIC: &str = "10.0.0.3:1";

    fn node(address: &str, usage: NodeUse) -> NodeSnapshot {
        let name = if address == KITCHEN { "kitchen" } else { "attic" };
        NodeSnapshot {
            name: Some(name.to_owned()),
            address: Some(address.to_owned()),
            usage,
            level: None,
            threads: None,
            memory_bytes: None,
            round_trip_s: None,
            peer: None,
        }
    }

    fn snapshot(chains: u64, layers: &[(Option<&str>, u32, u32)], nodes: Vec<NodeSnapshot>) -> ChainSnapshot {
        let stage = |&(address, start, end): &(Option<&str>, u32, u32)| StageSnapshot {
            name: match address {
                None => "this machine".to_owned(),
                Some(KITCHEN) => "kitchen".to_owned(),
                Some(_) => "attic".to_owned(),
            },
            is_coordinator: address.is_none(),
            address: address.map(str::to_owned),
            layers: LayerRange::new(start, end),
            ..StageSnapshot::default()
        };
        ChainSnapshot { stages: layers.iter().map(stage).collect(), nodes, chains, ..ChainSnapshot::default() }
    }

    fn failed(why: &str) -> NodeUse {
        NodeUse::Failed { why: why.to_owned() }
    }

    fn kinds(history: &History) -> Vec<String> {
        let name = |event: &ClusterEvent| match &event.kind {
            ClusterEventKind::Joined { machine, again } => format!("{} joined {again}", machine.name),
            ClusterEventKind::Left { machine, .. } => format!("{} left", machine.name),
            ClusterEventKind::Lost { machine, layers, .. } => format!("{} lost {layers}", machine.name),
            ClusterEventKind::Moved { machine, to, seconds, .. } => {
                format!("{} moved to {to:?} in {seconds}", machine.name)
            }
            ClusterEventKind::Formed { to } => format!("formed {to:?}"),
            ClusterEventKind::Reformed { why, .. } => format!("reformed {why:?}"),
        };
        history.events.iter().map(name).collect()
    }

    #[test]
    fn a_lost_machine_is_lost_until_it_is_back_and_its_layers_move() {
        let (mut history, begun) = (History::default(), Instant::now());
        let mut look = |seconds: u64, mut snapshot: ChainSnapshot| {
            history.observe(begun + Duration::from_secs(seconds), seconds, &mut snapshot);
            (snapshot.nodes.iter().map(|node| node.usage.clone()).collect::<Vec<_>>(), kinds(&history))
        };
        let chain = [(None, 0, 2), (Some(KITCHEN), 2, 5)];
        let spare = || NodeUse::Spare { why: "slower".to_owned() };
        let both = |kitchen| vec![node(KITCHEN, kitchen), node(ATTIC, spare())];
        look(0, snapshot(1, &chain, both(NodeUse::Used)));
        let mut lost = snapshot(1, &chain, both(failed("it left")));
        lost.rebuilding = Some("kitchen: it left".to_owned());
        let lost_because = |why: &str| NodeUse::Lost { why: why.to_owned() };
        assert_eq!(look(1, lost).0, [lost_because("it left"), spare()]);
        // While the coordinator tries again it stays lost.
        let (uses, _) = look(2, snapshot(1, &chain, both(NodeUse::Connecting)));
        assert_eq!(uses[0], lost_because("it does not answer"));
        let moved = [(None, 0, 2), (Some(ATTIC), 2, 5)];
        let nodes = vec![node(KITCHEN, failed("refused")), node(ATTIC, NodeUse::Used)];
        let (uses, _) = look(3, snapshot(2, &moved, nodes));
        assert_eq!(uses, [lost_because("refused"), NodeUse::Used]);
        let (uses, events) = look(9, snapshot(2, &moved, vec![node(KITCHEN, spare()), node(ATTIC, NodeUse::Used)]));
        assert_eq!(uses[0], spare(), "it is back");
        let range = LayerRange::new(2, 5).unwrap();
        assert_eq!(
            events,
            [
                "kitchen joined false".to_owned(),
                "attic joined false".to_owned(),
                "formed [\"this machine\", \"kitchen\"]".to_owned(),
                format!("kitchen lost {range}"),
                "kitchen moved to [\"attic\"] in 2".to_owned(),
                "kitchen joined true".to_owned(),
            ]
        );
    }

    #[test]
    fn a_machine_without_layers_leaves_and_a_better_chain_is_told() {
        let mut history = History::default();
        let mut look = |mut snapshot: ChainSnapshot| {
            history.observe(Instant::now(), 0, &mut snapshot);
            (snapshot.nodes[0].usage.clone(), kinds(&history).pop())
        };
        let own = [(None, 0, 5)];
        let spare = NodeUse::Spare { why: "slower".to_owned() };
        look(snapshot(1, &own, vec![node(KITCHEN, spare)]));
        let (usage, last) = look(snapshot(1, &own, vec![node(KITCHEN, failed("it left"))]));
        assert_eq!((usage, last.as_deref()), (failed("it left"), Some("kitchen left")));
        let (_, last) = look(snapshot(2, &own, vec![node(KITCHEN, failed("it left"))]));
        assert_eq!(last.as_deref(), Some("reformed None"));
    }

    #[test]
    fn events_are_bounded() {
        let mut history = History::default();
        for round in 0..500 {
            let usage = if round % 2 == 0 { NodeUse::Used } else { failed("it left") };
            history.observe(Instant::now(), round, &mut snapshot(0, &[], vec![node(KITCHEN, usage)]));
        }
        assert_eq!(history.events.len(), EVENTS_MAX);
    }
}
