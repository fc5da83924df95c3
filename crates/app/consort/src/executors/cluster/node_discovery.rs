//! `NodeDiscovery`: finds the nodes of this network by mDNS, tells a coordinator of them, and remembers those that it cannot use.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cluster::coordinator::NodeFinder;
use cluster::discovery::{Browser, BrowserSettings, DiscoveredNode, DiscoveryEvent, Interfaces, MDNS_PORT, NodeId};
use net::PeerAddress;
use plan::UnusableNode;
use tracing::info;
use types::LogLimit;

/// Announcements of nodes that cannot be used that the log has in full. Anybody on the network can send them.
const ANNOUNCEMENTS_LOGGED_MAX: usize = 32;
/// How long a node that has only announced addresses of one link may announce others.
const BETTER_ADDRESS_WAIT: Duration = Duration::from_secs(1);
/// The time between two looks at nodes that may announce other addresses.
const TICK: Duration = Duration::from_millis(100);

/// Until the coordinator ends. Clones share what is known.
#[derive(Clone, Default)]
pub struct NodeDiscovery(Arc<Mutex<Vec<DiscoveredNode>>>);

impl NodeDiscovery {
    /// Looks for nodes in the background, of whatever cluster.
    pub fn start(
        &self,
        finder: NodeFinder,
        resolve: impl Fn(&PeerAddress) -> Option<SocketAddr> + Send + 'static,
    ) -> Result<()> {
        let settings = BrowserSettings { interfaces: Interfaces::default(), mdns_port: MDNS_PORT, peers: Vec::new() };
        let browser = Browser::start(settings).context("look for machines on this network")?;
        let unusable = self.clone();
        let watch = move || {
            let (mut log, mut addresses) = (UnusableLog::default(), NodeAddresses::default());
            loop {
                match browser.events().recv_timeout(TICK) {
                    Ok(DiscoveryEvent::Lost(id)) => {
                        unusable.forget(&id);
                        addresses.forget(&id);
                    }
                    Ok(DiscoveryEvent::Found(node)) => {
                        unusable.forget(&node.id);
                        match node.unusable {
                            None => addresses.found(node, Instant::now()),
                            Some(_) => {
                                addresses.forget(&node.id);
                                log.add(&node);
                                unusable.lock().push(node);
                            }
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                for address in addresses.next(Instant::now()).iter().filter_map(&resolve) {
                    if !finder.found(address) {
                        return;
                    }
                }
            }
        };
        thread::Builder::new().name("discovery".to_owned()).spawn(watch).context("look for machines")?;
        Ok(())
    }

    /// The nodes that are there and cannot be used. The browser limits their number.
    pub fn unusable(&self) -> Vec<UnusableNode> {
        let unusable = |node: &DiscoveredNode| {
            let why = node.unusable?.to_string();
            Some(UnusableNode {
                name: node.name.as_ref().map(ToString::to_string),
                address: node.addresses.first().cloned(),
                why,
            })
        };
        self.lock().iter().filter_map(unusable).collect()
    }

    fn forget(&self, id: &NodeId) {
        self.lock().retain(|node| node.id != *id);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DiscoveredNode>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name(node: &DiscoveredNode) -> &str {
    node.name.as_ref().map_or("a machine", |name| name.as_str())
}

/// Chooses the address of each node. A node has one, so that no coordinator takes it for two machines.
#[derive(Default)]
struct NodeAddresses {
    chosen: HashMap<NodeId, PeerAddress>,
    /// Nodes that were found, and since when.
    waiting: Vec<(Instant, DiscoveredNode)>,
}

impl NodeAddresses {
    fn found(&mut self, node: DiscoveredNode, now: Instant) {
        let earlier = self.waiting.iter().position(|(_, other)| other.id == node.id);
        let since = earlier.map_or(now, |index| self.waiting.swap_remove(index).0);
        self.waiting.push((since, node));
    }

    fn forget(&mut self, id: &NodeId) {
        self.chosen.remove(id);
        self.waiting.retain(|(_, node)| node.id != *id);
    }

    /// The addresses of nodes that were found, and have no better ones to wait for.
    fn next(&mut self, now: Instant) -> Vec<PeerAddress> {
        let is_due = |(since, node): &mut (Instant, DiscoveredNode)| {
            node.addresses.iter().any(|address| !is_link_local(address)) || now - *since >= BETTER_ADDRESS_WAIT
        };
        let due: Vec<_> = self.waiting.extract_if(.., is_due).collect();
        due.into_iter().filter_map(|(_, node)| self.choose(node)).collect()
    }

    fn choose(&mut self, node: DiscoveredNode) -> Option<PeerAddress> {
        if let Some(chosen) = self.chosen.get(&node.id).filter(|chosen| node.addresses.contains(chosen)) {
            return Some(chosen.clone());
        }
        let best = node.addresses.into_iter().next()?;
        self.chosen.insert(node.id, best.clone());
        Some(best)
    }
}

/// Whether it is an IPv6 address of one link. It may not be ready when others are announced already.
fn is_link_local(address: &PeerAddress) -> bool {
    matches!(address.as_str().parse::<SocketAddr>(), Ok(SocketAddr::V6(v6)) if v6.ip().is_unicast_link_local())
}

/// Logs why nodes are not used.
#[derive(Default)]
struct UnusableLog {
    logged: usize,
    limit: LogLimit,
}

impl UnusableLog {
    fn add(&mut self, node: &DiscoveredNode) {
        let (Some(why), Some(address)) = (&node.unusable, node.addresses.first()) else { return };
        if self.logged < ANNOUNCEMENTS_LOGGED_MAX {
            self.logged += 1;
            info!(node = name(node), %address, "a node cannot be used: {why}");
        } else if let Some(count) = self.limit.count(Instant::now()) {
            info!(node = name(node), %address, count, "more nodes cannot be used, the last one because: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_with_several_addresses_is_found_once() {
        let (mut nodes, begun) = (NodeAddresses::default(), Instant::now());
        let [near, far, link]: [PeerAddress; 3] =
            ["10.0.0.2:7420", "10.0.0.3:7420", "[fe80::1%2]:7420"].map(|text| text.parse().unwrap());
        let node = |addresses: &[&PeerAddress]| DiscoveredNode {
            id: NodeId::of_service("kitchen").unwrap(),
            name: None,
            addresses: addresses.iter().map(|&address| address.clone()).collect(),
            unusable: None,
        };
        nodes.found(node(&[&link]), begun);
        assert_eq!(nodes.next(begun), []);
        nodes.found(node(&[&far, &link]), begun);
        assert_eq!(nodes.next(begun).first(), Some(&far));
        assert_eq!(nodes.next(begun), []);
        // A better one later is the same node, which may have failed before.
        nodes.found(node(&[&near, &far]), begun);
        assert_eq!(nodes.next(begun), [far]);
        nodes.found(node(&[&near]), begun);
        assert_eq!(nodes.next(begun), [near]);
        nodes.forget(&node(&[]).id);
        nodes.found(node(&[&link]), begun);
        nodes.found(node(&[&link]), begun + BETTER_ADDRESS_WAIT / 2);
        assert_eq!(nodes.next(begun + BETTER_ADDRESS_WAIT), [link]);
    }
}
