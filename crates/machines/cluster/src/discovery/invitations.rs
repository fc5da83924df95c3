//! Invitations on the network: who has one open, and where. See `net::invitation` for what happens there.
//!
//! What is announced is not authenticated: a name and a port. Whoever answers there has to know the code.

use std::time::{Duration, Instant};

use mdns_sd::{ResolvedService, ServiceEvent};
use net::PeerAddress;

use super::DiscoveryError;
use super::announcement::{NodeName, txt_text};
use super::announcer::AnnouncedService;
use super::browser::socket_address;
use super::interfaces::Interfaces;
use super::node_table::{NodeId, ordered};

/// The DNS-SD type of an open invitation.
const SERVICE_TYPE: &str = "_consort-invite._tcp.local.";
const NAME: &str = "name";
/// The most invitations that are found.
const INVITATIONS_MAX: usize = 16;
/// The time between two looks at whether enough was found.
const TICK: Duration = Duration::from_millis(100);

/// Announces an open invitation until it is dropped.
pub struct InvitationAnnouncer(#[expect(dead_code, reason = "it works until it is dropped")] AnnouncedService);

impl InvitationAnnouncer {
    pub fn start(name: &NodeName, port: u16, interfaces: &Interfaces, mdns_port: u16) -> Result<Self, DiscoveryError> {
        let txt = [(NAME, name.as_str().to_owned())];
        AnnouncedService::start(SERVICE_TYPE, &txt, port, interfaces, mdns_port).map(Self)
    }
}

/// An invitation that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundInvitation {
    pub id: NodeId,
    /// What the machine calls itself: not unique.
    pub name: NodeName,
    /// Where it may be reached, best first. At least one.
    pub addresses: Vec<PeerAddress>,
}

/// Looks for invitations until `is_enough`, which is asked again and again with those that are there and for how long they were
/// looked for.
pub fn find_invitations(
    interfaces: &Interfaces,
    mdns_port: u16,
    mut is_enough: impl FnMut(&[FoundInvitation], Duration) -> bool,
) -> Result<Vec<FoundInvitation>, DiscoveryError> {
    let daemon = interfaces.daemon(mdns_port)?;
    let services = daemon.browse(SERVICE_TYPE)?;
    let (begun, mut found) = (Instant::now(), Vec::new());
    while !is_enough(&found, begun.elapsed()) {
        // A subscription that has ended finds nothing more, which time ends.
        match services.recv_timeout(TICK) {
            Ok(ServiceEvent::ServiceResolved(service)) => add(&mut found, &service, interfaces),
            Ok(ServiceEvent::ServiceRemoved(_, fullname)) => found.retain(|other| other.id.as_str() != fullname),
            Ok(_) => {}
            Err(_) if services.is_disconnected() => std::thread::sleep(TICK),
            Err(_) => {}
        }
    }
    // An error means that it has ended already.
    let _ = daemon.shutdown();
    Ok(found)
}

/// What announces nothing readable is no invitation.
fn add(found: &mut Vec<FoundInvitation>, service: &ResolvedService, interfaces: &Interfaces) {
    let Some(id) = NodeId::of_service(service.get_fullname()) else { return };
    let name = txt_text(|key| service.get_property_val(key).flatten(), NAME).and_then(str::parse);
    let addresses = service.get_addresses().iter().map(|address| socket_address(address, service.get_port()));
    let addresses: Vec<_> =
        addresses.filter(|address| interfaces.uses_loopback() || !address.ip().is_loopback()).collect();
    found.retain(|other| other.id != id);
    if let (Ok(name), addresses @ [_, ..]) = (name, &ordered(&addresses)[..])
        && found.len() < INVITATIONS_MAX
    {
        found.push(FoundInvitation { id, name, addresses: addresses.to_vec() });
    }
}
