//! `NodeTable`: the nodes that are known, and which of them can be used.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use net::ClusterKey;
use plan::distinct_names;
use tracing::info;

use super::CoordinatorEvent;
use super::node_link::{NodeId, NodeLink};
use super::report::{ClusterReport, NodeReport, NodeState};

/// Nodes that are known at once.
const NODES_MAX: usize = 256;
/// The time after which a node that failed is tried again, at first and at most.
const RETRY_MIN: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// So many chains may be lost because of a node, each within this time of the one before,
const BLAMES_MAX: u32 = 2;
const BLAME_MEMORY: Duration = Duration::from_secs(120);
/// until it is left out for this time, and longer if it goes on.
const BLAME_PAUSE: Duration = Duration::from_secs(20);

pub(super) struct NodeTable {
    key: ClusterKey,
    silence: Duration,
    events: Sender<CoordinatorEvent>,
    entries: Vec<NodeEntry>,
    next_id: u64,
}

struct NodeEntry {
    address: SocketAddr,
    /// What it calls itself. Known once it has connected.
    own_name: Option<String>,
    /// The same, or more where others call themselves so too.
    name: Option<String>,
    state: EntryState,
    /// The last reason why it could not be connected, as the log has it.
    logged: Option<String>,
    /// How often it has failed since it last worked.
    failures: u32,
    /// Chains that were lost because of it, the last one at this time.
    blames: u32,
    blamed_at: Option<Instant>,
}

enum EntryState {
    Connecting,
    Connected(Box<NodeLink>),
    /// To be tried again at this time; `None`: never.
    Failed {
        why: String,
        retry_at: Option<Instant>,
    },
}

impl NodeTable {
    pub fn new(key: ClusterKey, silence: Duration, events: Sender<CoordinatorEvent>) -> Self {
        Self { key, silence, events, entries: Vec::new(), next_id: 0 }
    }

    /// For whoever reports what happens to nodes.
    pub fn events(&self) -> Sender<CoordinatorEvent> {
        self.events.clone()
    }

    /// Connects to a node that is not known yet. One that has failed before is tried again: it may have been restarted.
    pub fn add(&mut self, address: SocketAddr) {
        match self.entries.iter().position(|entry| entry.address == address) {
            Some(index) if matches!(self.entries[index].state, EntryState::Failed { .. }) => self.connect(index),
            Some(_) => {}
            None if self.entries.len() == NODES_MAX => {}
            None => {
                self.entries.push(NodeEntry {
                    address,
                    own_name: None,
                    name: None,
                    state: EntryState::Connecting,
                    logged: None,
                    failures: 0,
                    blames: 0,
                    blamed_at: None,
                });
                self.connect(self.entries.len() - 1);
            }
        }
    }

    /// Tries again those nodes whose time has come.
    pub fn retry(&mut self) {
        let now = Instant::now();
        for index in 0..self.entries.len() {
            let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            if matches!(self.entries[index].state, EntryState::Failed { retry_at, .. } if is_due(retry_at)) {
                self.connect(index);
            }
        }
    }

    pub fn connected(&mut self, link: NodeLink) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == link.address) else { return };
        info!(node = link.facts.name, address = %link.address, "a node has joined");
        entry.own_name = Some(link.facts.name.clone());
        entry.logged = None;
        entry.state = EntryState::Connected(Box::new(link));
        self.tell_apart();
    }

    /// Gives all nodes names that are different. Whatever names a node has its name from here.
    fn tell_apart(&mut self) {
        let named = |entry: &NodeEntry| Some((entry.own_name.clone()?, entry.address));
        let named: Vec<_> = self.entries.iter().filter_map(named).collect();
        let named: Vec<_> = named.iter().map(|(name, address)| (name.as_str(), *address)).collect();
        let entries = self.entries.iter_mut().filter(|entry| entry.own_name.is_some());
        for (entry, name) in entries.zip(distinct_names(&named)) {
            if let EntryState::Connected(link) = &mut entry.state {
                link.facts.name.clone_from(&name);
            }
            entry.name = Some(name);
        }
    }

    pub fn not_connected(&mut self, address: SocketAddr, why: &str, is_permanent: bool) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == address) else { return };
        if entry.logged.as_deref() != Some(why) {
            info!(node = entry.name, %address, "a node cannot be used: {why}");
            entry.logged = Some(why.to_owned());
        }
        entry.fail(why, is_permanent);
    }

    pub fn gone(&mut self, node: NodeId, why: &str) {
        if let Some(entry) = self.entry_mut(node) {
            info!(node = entry.name, address = %entry.address, "a node has left: {why}");
            entry.fail(why, false);
        }
    }

    /// A node could not do its part. Its connection is closed, which frees what it has loaded.
    pub fn fail(&mut self, node: NodeId, why: &str) {
        if let Some(entry) = self.entry_mut(node) {
            entry.fail(why, false);
        }
    }

    /// A chain was lost, probably because of the node at this address. One that costs several chains in short order is left out for a while.
    pub fn blame(&mut self, address: SocketAddr) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == address) else { return };
        let now = Instant::now();
        let is_recent = entry.blamed_at.is_some_and(|at| now.duration_since(at) < BLAME_MEMORY);
        entry.blames = if is_recent { entry.blames + 1 } else { 1 };
        entry.blamed_at = Some(now);
        let Some(repeated) = entry.blames.checked_sub(BLAMES_MAX) else { return };
        let pause = (BLAME_PAUSE * 2u32.pow(repeated.min(4))).min(BLAME_MEMORY);
        let why = format!("it cost {} chains in short order", entry.blames);
        info!(node = entry.name, address = %entry.address, "a node is not used for {} s: {why}", pause.as_secs());
        entry.state = EntryState::Failed { why, retry_at: Some(now + pause) };
    }

    /// Without the nodes that are left out, no plan fits: they are tried again.
    pub fn pardon(&mut self) {
        let now = Instant::now();
        for entry in self.entries.iter_mut().filter(|entry| entry.blames >= BLAMES_MAX) {
            if let EntryState::Failed { retry_at: Some(at), .. } = &mut entry.state {
                *at = now;
            }
        }
    }

    /// A chain with these nodes was formed.
    pub fn succeeded(&mut self, nodes: &[NodeId]) {
        for &node in nodes {
            if let Some(entry) = self.entry_mut(node) {
                entry.failures = 0;
            }
        }
    }

    /// Whether it is known if this node can be used.
    pub fn is_decided(&self, address: SocketAddr) -> bool {
        let entry = self.entries.iter().find(|entry| entry.address == address);
        entry.is_some_and(|entry| !matches!(entry.state, EntryState::Connecting))
    }

    /// The nodes that can be used, in the order in which they were found.
    pub fn links(&self) -> impl Iterator<Item = &NodeLink> {
        self.entries.iter().filter_map(|entry| match &entry.state {
            EntryState::Connected(link) => Some(&**link),
            _ => None,
        })
    }

    pub fn link(&mut self, node: NodeId) -> Option<&mut NodeLink> {
        match &mut self.entry_mut(node)?.state {
            EntryState::Connected(link) => Some(link),
            _ => None,
        }
    }

    /// For people.
    pub fn name(&self, node: NodeId) -> String {
        let entry = self.entries.iter().find(|entry| entry.is(node));
        entry.map_or_else(
            || "a node".to_owned(),
            |entry| entry.name.clone().unwrap_or_else(|| entry.address.to_string()),
        )
    }

    /// Writes the states of all nodes into a report.
    pub fn fill(&self, report: &mut ClusterReport) {
        report.nodes = self.entries.iter().map(NodeEntry::report).collect();
    }

    fn entry_mut(&mut self, node: NodeId) -> Option<&mut NodeEntry> {
        self.entries.iter_mut().find(|entry| entry.is(node))
    }

    fn connect(&mut self, index: usize) {
        let id = NodeId(self.next_id);
        self.next_id += 1;
        let entry = &mut self.entries[index];
        entry.state = EntryState::Connecting;
        let (address, key, silence, events) = (entry.address, self.key.clone(), self.silence, self.events.clone());
        let connect = move || {
            let event = match NodeLink::connect(id, address, &key, silence, events.clone()) {
                Ok(link) => CoordinatorEvent::Connected(Box::new(link)),
                Err(error) => CoordinatorEvent::NotConnected {
                    address,
                    is_permanent: error.is_permanent(),
                    why: error.with_causes(),
                },
            };
            // An error means that the coordinator has ended.
            let _ = events.send(event);
        };
        if let Err(error) = thread::Builder::new().name("consort-dial".to_owned()).spawn(connect) {
            entry.fail(&format!("start a thread: {error}"), false);
        }
    }
}

impl NodeEntry {
    fn is(&self, node: NodeId) -> bool {
        matches!(&self.state, EntryState::Connected(link) if link.id == node)
    }

    fn fail(&mut self, why: &str, is_permanent: bool) {
        let pause = RETRY_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        let retry_at = (!is_permanent).then(|| Instant::now() + pause);
        self.state = EntryState::Failed { why: why.to_owned(), retry_at };
    }

    fn report(&self) -> NodeReport {
        let (state, facts, link) = match &self.state {
            EntryState::Connecting => (NodeState::Connecting, None, None),
            EntryState::Connected(link) => (NodeState::Ready, Some(link.facts.clone()), Some(link.link)),
            EntryState::Failed { why, .. } => (NodeState::Failed { why: why.clone() }, None, None),
        };
        NodeReport { address: self.address, name: self.name.clone(), state, facts, not_used: None, link }
    }
}
