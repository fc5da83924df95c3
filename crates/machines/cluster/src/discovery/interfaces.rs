//! Which network interfaces discovery uses.

use mdns_sd::{IfKind, ServiceDaemon};

use super::DiscoveryError;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Interfaces {
    /// All but the loopback interface.
    #[default]
    All,
    /// This machine alone.
    Loopback,
    /// By name, such as `eth0`.
    Named(Vec<String>),
}

impl Interfaces {
    /// Starts mDNS on these interfaces. It answers and asks nothing yet.
    pub(super) fn daemon(&self, port: u16) -> Result<ServiceDaemon, DiscoveryError> {
        let daemon = ServiceDaemon::new_with_port(port)?;
        match self {
            Self::All => daemon.disable_interface(vec![IfKind::LoopbackV4, IfKind::LoopbackV6])?,
            Self::Loopback => {
                daemon.disable_interface(IfKind::All)?;
                daemon.enable_interface(vec![IfKind::LoopbackV4, IfKind::LoopbackV6])?;
            }
            Self::Named(names) => {
                daemon.disable_interface(IfKind::All)?;
                daemon.enable_interface(names.iter().map(IfKind::from).collect::<Vec<_>>())?;
            }
        }
        Ok(daemon)
    }

    /// Whether nodes on this machine are announced with an address that only this machine can reach.
    pub(super) fn uses_loopback(&self) -> bool {
        match self {
            Self::All => false,
            Self::Loopback => true,
            Self::Named(names) => names.iter().any(|name| name == "lo" || name == "lo0"),
        }
    }
}
