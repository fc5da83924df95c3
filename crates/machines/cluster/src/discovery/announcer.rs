//! `Announcer`: tells the network that a node is there.

use std::time::Duration;

use mdns_sd::{ServiceDaemon, ServiceInfo};
use rustix::rand::{GetRandomFlags, getrandom};

use super::announcement::Announcement;
use super::interfaces::Interfaces;
use super::{DiscoveryError, SERVICE_TYPE};

/// How long the last announcement, that the service goes, may take.
const GOODBYE: Duration = Duration::from_millis(500);

/// Announces a node until it is dropped.
pub struct Announcer(#[expect(dead_code, reason = "it works until it is dropped")] AnnouncedService);

impl Announcer {
    /// Announces that a node accepts connections on a port, under all addresses of the interfaces.
    pub fn start(
        announcement: &Announcement,
        port: u16,
        interfaces: &Interfaces,
        mdns_port: u16,
    ) -> Result<Self, DiscoveryError> {
        AnnouncedService::start(SERVICE_TYPE, &announcement.txt(), port, interfaces, mdns_port).map(Self)
    }
}

/// A service of this machine that is announced until the value is dropped.
pub(super) struct AnnouncedService {
    daemon: ServiceDaemon,
    fullname: String,
}

impl AnnouncedService {
    pub fn start(
        service_type: &str,
        txt: &[(&'static str, String)],
        port: u16,
        interfaces: &Interfaces,
        mdns_port: u16,
    ) -> Result<Self, DiscoveryError> {
        // Names in DNS are random: what people call a machine need not be unique.
        let instance = format!("consort-{}", random_hex()?);
        let host = format!("{instance}.local.");
        let mut service = ServiceInfo::new(service_type, &instance, &host, "", port, txt)?;
        service = service.enable_addr_auto();
        service.set_requires_probe(false);
        let fullname = service.get_fullname().to_owned();
        let daemon = interfaces.daemon(mdns_port)?;
        daemon.register(service)?;
        Ok(Self { daemon, fullname })
    }
}

impl Drop for AnnouncedService {
    fn drop(&mut self) {
        // If the goodbye is not sent, others notice that nobody answers.
        if let Ok(done) = self.daemon.unregister(&self.fullname) {
            let _ = done.recv_timeout(GOODBYE);
        }
        let _ = self.daemon.shutdown();
    }
}

fn random_hex() -> Result<String, DiscoveryError> {
    let mut bytes = [0; 8];
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        // So few bytes are never returned in part.
        Ok(_) => Ok(format!("{:016x}", u64::from_ne_bytes(bytes))),
        Err(error) => Err(mdns_sd::Error::Msg(format!("no random numbers: {error}")).into()),
    }
}
