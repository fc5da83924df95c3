//! `Browser`: finds nodes and follows them as they come and go.

use std::collections::{HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mdns_sd::{Receiver as MdnsReceiver, ResolvedService, ScopedIp, ServiceDaemon, ServiceEvent};

use super::announcement::Announcement;
use super::interfaces::Interfaces;
use super::node_table::{DiscoveredNode, NodeId, NodeTable};
use super::{DiscoveryError, SERVICE_TYPE};
use net::PeerAddress;

/// Events that wait for the receiver. Those that do not fit wait in the browser.
const EVENTS_MAX: usize = 64;
/// The time between two looks at whether the browser was dropped, or the receiver has room.
const TICK: Duration = Duration::from_millis(100);
/// How long a node that does not answer is asked for.
const VERIFY: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryEvent {
    /// A node is there, or what it announces has changed.
    Found(DiscoveredNode),
    Lost(NodeId),
}

impl DiscoveryEvent {
    fn id(&self) -> &NodeId {
        match self {
            Self::Found(node) => &node.id,
            Self::Lost(id) => id,
        }
    }
}

pub struct BrowserSettings {
    pub interfaces: Interfaces,
    pub mdns_port: u16,
    /// Addresses that a person gave. They are found at once and never lost.
    pub peers: Vec<PeerAddress>,
}

/// Looks for nodes until it is dropped.
pub struct Browser {
    daemon: ServiceDaemon,
    events: Receiver<DiscoveryEvent>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Browser {
    pub fn start(settings: BrowserSettings) -> Result<Self, DiscoveryError> {
        let daemon = settings.interfaces.daemon(settings.mdns_port)?;
        let services = daemon.browse(SERVICE_TYPE)?;
        let (sender, events) = sync_channel(EVENTS_MAX);
        let stop = Arc::new(AtomicBool::new(false));
        let mut loop_ = BrowseLoop {
            daemon: daemon.clone(),
            services,
            table: NodeTable::default(),
            loopback: settings.interfaces.uses_loopback(),
            pending: Pending { events: settings.peers.iter().map(given).collect(), told: HashSet::new() },
            sender,
            stop: stop.clone(),
        };
        let thread = thread::Builder::new().name("discovery".to_owned()).spawn(move || loop_.run());
        let thread = thread.map_err(|error| mdns_sd::Error::Msg(format!("start a thread: {error}")))?;
        Ok(Self { daemon, events, stop, thread: Some(thread) })
    }

    /// Where events arrive. After a `Lost`, or before the first `Found`, a node is not there.
    pub fn events(&self) -> &Receiver<DiscoveryEvent> {
        &self.events
    }

    /// Asks for a node that could not be connected. If it does not answer, it is lost.
    pub fn verify(&self, id: &NodeId) {
        // A full queue of the daemon is no reason to fail: the node is asked for when it is next found unreachable.
        let _ = self.daemon.verify(id.as_str().to_owned(), VERIFY);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = self.daemon.shutdown();
    }
}

fn given(address: &PeerAddress) -> DiscoveryEvent {
    let id = NodeId::of_peer(address);
    DiscoveryEvent::Found(DiscoveredNode { id, name: None, addresses: vec![address.clone()], unusable: None })
}

/// What the browser's thread has.
struct BrowseLoop {
    daemon: ServiceDaemon,
    services: MdnsReceiver<ServiceEvent>,
    table: NodeTable,
    loopback: bool,
    pending: Pending,
    sender: SyncSender<DiscoveryEvent>,
    stop: Arc<AtomicBool>,
}

impl BrowseLoop {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Relaxed) && self.pending.deliver(&self.sender) {
            match self.services.recv_timeout(TICK) {
                Ok(event) => self.handle(event),
                Err(_) if !self.services.is_disconnected() => {}
                // The daemon drops a subscription whose channel was full.
                Err(_) => match self.daemon.browse(SERVICE_TYPE) {
                    Ok(services) => self.services = services,
                    Err(_) => thread::sleep(TICK),
                },
            }
        }
    }

    fn handle(&mut self, event: ServiceEvent) {
        let mut events = Vec::new();
        match event {
            ServiceEvent::ServiceResolved(service) => self.resolved(&service, &mut events),
            ServiceEvent::ServiceRemoved(_, fullname) => {
                if let Some(id) = NodeId::of_service(&fullname) {
                    self.table.lost(&id, &mut events);
                }
            }
            _ => {}
        }
        events.into_iter().for_each(|event| self.pending.add(event));
    }

    /// A service that announces nothing readable is not a node.
    fn resolved(&mut self, service: &ResolvedService, events: &mut Vec<DiscoveryEvent>) {
        let Some(id) = NodeId::of_service(service.get_fullname()) else { return };
        let announcement = Announcement::from_txt(|key| service.get_property_val(key).flatten());
        let Ok(announcement) = announcement else { return self.table.lost(&id, events) };
        let addresses = service.get_addresses().iter().map(|address| socket_address(address, service.get_port()));
        let addresses: Vec<_> = addresses.filter(|address| self.loopback || !address.ip().is_loopback()).collect();
        self.table.found(id, &announcement, &addresses, events);
    }
}

/// Events that the receiver has no room for yet: at most one for each node. Nodes that come and go while the receiver is
/// slow leave nothing behind.
struct Pending {
    events: VecDeque<DiscoveryEvent>,
    /// Nodes that the receiver was told of, and not that they are lost.
    told: HashSet<NodeId>,
}

impl Pending {
    /// Replaces the pending event of the same node.
    fn add(&mut self, event: DiscoveryEvent) {
        self.events.retain(|other| other.id() != event.id());
        if matches!(event, DiscoveryEvent::Found(_)) || self.told.contains(event.id()) {
            self.events.push_back(event);
        }
    }

    /// Passes on what the receiver has room for. False if the receiver was dropped.
    fn deliver(&mut self, sender: &SyncSender<DiscoveryEvent>) -> bool {
        while let Some(event) = self.events.pop_front() {
            let (id, is_found) = (event.id().clone(), matches!(event, DiscoveryEvent::Found(_)));
            match sender.try_send(event) {
                Ok(()) if is_found => drop(self.told.insert(id)),
                Ok(()) => drop(self.told.remove(&id)),
                Err(TrySendError::Full(event)) => {
                    self.events.push_front(event);
                    return true;
                }
                Err(TrySendError::Disconnected(_)) => return false,
            }
        }
        true
    }
}

pub(super) fn socket_address(address: &ScopedIp, port: u16) -> SocketAddr {
    match (address, address.to_ip_addr()) {
        (ScopedIp::V6(scoped), IpAddr::V6(ip)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, scoped.scope_id().index).into()
        }
        (_, ip) => SocketAddr::new(ip, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_receiver_gets_the_last_state_of_each_node() {
        let (sender, receiver) = sync_channel(2);
        let mut pending = Pending { events: VecDeque::new(), told: HashSet::new() };
        let found = |port: u16| given(&PeerAddress::from(SocketAddr::from(([10, 0, 0, 1], port))));
        let lost = |port: u16| DiscoveryEvent::Lost(found(port).id().clone());
        for event in [found(1), found(2), found(3)] {
            pending.add(event);
        }
        assert!(pending.deliver(&sender));
        for event in [lost(1), lost(3), found(4), lost(4), found(1)] {
            pending.add(event);
        }
        let mut received = Vec::new();
        while pending.deliver(&sender) {
            match receiver.try_recv() {
                Ok(event) => received.push(event),
                Err(_) => break,
            }
        }
        assert_eq!(received, [found(1), found(2), found(1)]);
        drop(receiver);
        pending.add(lost(2));
        assert!(!pending.deliver(&sender));
    }
}
