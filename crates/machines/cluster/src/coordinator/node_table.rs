//! `NodeTable`: the nodes that are known, and which of them can be used.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use net::ClusterKey;
use plan::distinct_names;
use tracing::{debug, info};

use super::CoordinatorEvent;
use super::node_link::{NodeId, NodeLink};
use super::planning::PlannedStage;
use super::report::{ClusterReport, NodeReport, NodeState};
use super::standing::{Failure, Standing};
use crate::wire::control::WireFacts;

/// Nodes that are known at once: those that were named, and those that have had this cluster's key.
const NODES_MAX: usize = 256;
/// Others, which anybody can announce. When another is found, the one that was tried longest ago gives way.
const STRANGERS_MAX: usize = 64;

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
    /// A person gave its address.
    is_named: bool,
    /// It has had this cluster's key.
    is_ours: bool,
    tried_at: Instant,
    standing: Standing,
}

enum EntryState {
    Connecting,
    Connected(Box<NodeLink>),
    /// To be tried again at this time.
    Failed {
        failure: Failure,
        why: String,
        retry_at: Instant,
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

    /// Connects to a node that is not known yet. One that has failed before is tried again soon: it may have been restarted.
    pub fn add(&mut self, address: SocketAddr, is_named: bool) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == address) {
            entry.is_named |= is_named;
            if let EntryState::Failed { retry_at, .. } = &mut entry.state {
                *retry_at = entry.standing.found_again(*retry_at);
            }
            return;
        }
        if !self.make_room(is_named) {
            return;
        }
        self.entries.push(NodeEntry {
            address,
            own_name: None,
            name: None,
            state: EntryState::Connecting,
            logged: None,
            is_named,
            is_ours: false,
            tried_at: Instant::now(),
            standing: Standing::default(),
        });
        self.connect(self.entries.len() - 1);
    }

    /// Room for one more node. Another one of its kind gives way if it must: the one that was tried longest ago, those that have
    /// failed first. A node that is connected stays.
    fn make_room(&mut self, is_kept: bool) -> bool {
        let same = |entry: &NodeEntry| (entry.is_named || entry.is_ours) == is_kept;
        let max = if is_kept { NODES_MAX } else { STRANGERS_MAX };
        let candidates = self.entries.iter().enumerate().filter(|(_, entry)| same(entry));
        if candidates.clone().count() < max {
            return true;
        }
        let is_failed = |entry: &NodeEntry| matches!(entry.state, EntryState::Failed { .. });
        let free = candidates.filter(|(_, entry)| !matches!(entry.state, EntryState::Connected(_)));
        let oldest = free.min_by_key(|(_, entry)| (!is_failed(entry), entry.tried_at)).map(|(index, _)| index);
        oldest.inspect(|&index| drop(self.entries.remove(index))).is_some()
    }

    /// Tries again those nodes whose time has come.
    pub fn retry(&mut self) {
        let now = Instant::now();
        for index in 0..self.entries.len() {
            if matches!(self.entries[index].state, EntryState::Failed { retry_at, .. } if retry_at <= now) {
                self.connect(index);
            }
        }
    }

    pub fn connected(&mut self, link: NodeLink) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == link.address) else { return };
        info!(node = link.facts.name, address = %link.address, "a node has joined");
        entry.own_name = Some(link.facts.name.clone());
        entry.logged = None;
        entry.is_ours = true;
        entry.state = EntryState::Connected(Box::new(link));
        self.tell_apart();
    }

    /// A node has described itself again. Returns whether it is known.
    pub fn described(&mut self, node: NodeId, facts: WireFacts) -> bool {
        let Some(link) = self.link(node) else { return false };
        // Its name is the one that tells it apart.
        let name = std::mem::take(&mut link.facts.name);
        link.facts = WireFacts { name, ..facts };
        true
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

    pub fn not_connected(&mut self, address: SocketAddr, failure: Failure, why: &str) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == address) else { return };
        if entry.is_of_another_cluster(failure) {
            debug!(%address, "a machine of another cluster is on this network");
        } else if entry.logged.as_deref() != Some(why) {
            info!(node = entry.name, %address, "a node cannot be used: {why}");
            entry.logged = Some(why.to_owned());
        }
        entry.fail(failure, why);
    }

    pub fn gone(&mut self, node: NodeId, why: &str) {
        if let Some(entry) = self.entry_mut(node) {
            info!(node = entry.name, address = %entry.address, "a node has left: {why}");
            entry.fail(Failure::Away, why);
        }
    }

    /// A node could not do its part. Its connection is closed, which frees what it has loaded.
    pub fn fail(&mut self, node: NodeId, why: &str) {
        if let Some(entry) = self.entry_mut(node) {
            entry.fail(Failure::Away, why);
        }
    }

    /// A chain was lost, probably because of the node at this address. One that costs several chains is left out for a while.
    pub fn blame(&mut self, address: SocketAddr) {
        let Some(entry) = self.entries.iter_mut().find(|entry| entry.address == address) else { return };
        let now = Instant::now();
        let Some(pause) = entry.standing.blamed(now) else { return };
        let why = "it has cost several chains".to_owned();
        info!(node = entry.name, address = %entry.address, "a node is not used for {} s: {why}", pause.as_secs());
        entry.state = EntryState::Failed { failure: Failure::Away, why, retry_at: now + pause };
    }

    /// Without the nodes that are left out, no plan fits: they are tried again.
    pub fn pardon(&mut self) {
        let now = Instant::now();
        for entry in self.entries.iter_mut().filter(|entry| entry.standing.is_left_out(now)) {
            entry.standing.pardon();
            if let EntryState::Failed { retry_at, .. } = &mut entry.state {
                *retry_at = now;
            }
        }
    }

    /// A chain with these stages was formed.
    pub fn succeeded(&mut self, stages: &[PlannedStage]) {
        for stage in stages {
            if let Some(entry) = self.entry_mut(stage.node) {
                entry.standing.succeeded();
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
        let is_other = |entry: &&NodeEntry| match entry.state {
            EntryState::Failed { failure, .. } => entry.is_of_another_cluster(failure),
            _ => false,
        };
        report.nodes = self.entries.iter().filter(|entry| !is_other(entry)).map(NodeEntry::report).collect();
        report.other_clusters = self.entries.iter().filter(is_other).count();
    }

    fn entry_mut(&mut self, node: NodeId) -> Option<&mut NodeEntry> {
        self.entries.iter_mut().find(|entry| entry.is(node))
    }

    fn connect(&mut self, index: usize) {
        let id = NodeId(self.next_id);
        self.next_id += 1;
        let entry = &mut self.entries[index];
        (entry.state, entry.tried_at) = (EntryState::Connecting, Instant::now());
        let (address, key, silence, events) = (entry.address, self.key.clone(), self.silence, self.events.clone());
        let connect = move || {
            let event = match NodeLink::connect(id, address, &key, silence, events.clone()) {
                Ok(link) => CoordinatorEvent::Connected(Box::new(link)),
                Err(error) => {
                    CoordinatorEvent::NotConnected { address, failure: error.failure(), why: error.with_causes() }
                }
            };
            // An error means that the coordinator has ended.
            let _ = events.send(event);
        };
        if let Err(error) = thread::Builder::new().name("consort-dial".to_owned()).spawn(connect) {
            entry.fail(Failure::Away, &format!("start a thread: {error}"));
        }
    }
}

impl NodeEntry {
    fn is(&self, node: NodeId) -> bool {
        matches!(&self.state, EntryState::Connected(link) if link.id == node)
    }

    fn fail(&mut self, failure: Failure, why: &str) {
        let retry_at = self.standing.failed(failure, Instant::now());
        self.state = EntryState::Failed { failure, why: why.to_owned(), retry_at };
    }

    /// Nobody expects it to be of this one: it was only found.
    fn is_of_another_cluster(&self, failure: Failure) -> bool {
        failure == Failure::OtherKey && !self.is_named && !self.is_ours
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn at(host: u16) -> SocketAddr {
        let [high, low] = host.to_be_bytes();
        // Nothing listens there: no test waits for an answer.
        SocketAddr::from(([127, 1, high, low], 9))
    }

    #[test]
    fn strangers_give_way_to_one_another_and_never_displace_our_nodes() {
        let (events, _received) = channel();
        let mut table = NodeTable::new(ClusterKey::from_bytes([7; 32]), Duration::from_secs(1), events);
        table.add(at(1), true);
        table.add(at(2), false);
        table.entries[1].is_ours = true;
        for host in 3..3 + 2 * STRANGERS_MAX as u16 {
            table.add(at(host), false);
            table.not_connected(at(host), Failure::OtherKey, "another key");
        }
        let known: Vec<_> = table.entries.iter().map(|entry| entry.address).collect();
        let last = 3 + STRANGERS_MAX as u16..3 + 2 * STRANGERS_MAX as u16;
        assert_eq!(known, [1, 2].into_iter().chain(last).map(at).collect::<Vec<_>>());
        // Nobody is troubled with machines of other clusters, unless one was named.
        table.not_connected(at(1), Failure::OtherKey, "another key");
        let mut report = ClusterReport::default();
        table.fill(&mut report);
        assert_eq!((report.nodes.len(), report.other_clusters), (2, STRANGERS_MAX));
        // One that is announced again and again is not tried each time.
        let retry_at = |table: &NodeTable| match table.entries[2].state {
            EntryState::Failed { retry_at, .. } => Some(retry_at),
            _ => None,
        };
        let first = table.entries[2].address;
        (0..100).for_each(|_| table.add(first, false));
        assert!(retry_at(&table).is_some_and(|at| at > Instant::now()));
    }
}
