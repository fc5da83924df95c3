//! `NodeDiscovery`: finds the nodes of this network by mDNS, tells a coordinator of them, and remembers those that it cannot use.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use cluster::coordinator::NodeFinder;
use cluster::discovery::{Browser, BrowserSettings, DiscoveredNode, DiscoveryEvent, Interfaces, MDNS_PORT, NodeId};
use net::KeyFingerprint;
use plan::UnusableNode;
use tracing::info;
use types::LogLimit;

/// Announcements of nodes that cannot be used that the log has in full. Anybody on the network can send them.
const ANNOUNCEMENTS_LOGGED_MAX: usize = 32;

/// Until the coordinator ends. Clones share what is known.
#[derive(Clone, Default)]
pub struct NodeDiscovery(Arc<Mutex<Vec<DiscoveredNode>>>);

impl NodeDiscovery {
    /// Looks for nodes with this key in the background.
    pub fn start(
        &self,
        fingerprint: KeyFingerprint,
        finder: NodeFinder,
        resolve: impl Fn(&DiscoveredNode) -> Option<SocketAddr> + Send + 'static,
    ) -> Result<()> {
        let settings =
            BrowserSettings { fingerprint, interfaces: Interfaces::default(), mdns_port: MDNS_PORT, peers: Vec::new() };
        let browser = Browser::start(settings).context("look for machines on this network")?;
        let unusable = self.clone();
        let watch = move || {
            let mut log = UnusableLog::default();
            for event in browser.events() {
                let node = match event {
                    DiscoveryEvent::Lost(id) => {
                        unusable.forget(&id);
                        continue;
                    }
                    DiscoveryEvent::Found(node) => node,
                };
                unusable.forget(&node.id);
                if node.unusable.is_some() {
                    log.add(&node);
                    unusable.lock().push(node);
                } else if let Some(address) = resolve(&node)
                    && !finder.found(address)
                {
                    return;
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
