//! Where `swarm serve` listens, and as whom, if the user does not say it: several may run on one machine.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::path::Path;

use anyhow::{Context, Result, bail};
use libp2p_node::{Identity, Multiaddr};
use tracing::info;

const PORT: u16 = 4101;
/// Ports, and identities, that are tried.
const TRIES: u16 = 64;

/// The default addresses, at the first port from 4101 on that no program has.
pub fn default_addresses() -> Result<Vec<Multiaddr>> {
    let Some(port) = free_port(PORT) else {
        bail!("ports {PORT} to {} are taken: choose another with --listen", PORT + TRIES - 1);
    };
    if port != PORT {
        info!("port {PORT} is taken, so this machine listens on port {port}");
    }
    let addresses = [format!("/ip4/0.0.0.0/tcp/{port}"), format!("/ip4/0.0.0.0/udp/{port}/quic-v1")];
    addresses.into_iter().map(|address| address.parse().context("an address with a port")).collect()
}

fn free_port(first: u16) -> Option<u16> {
    let is_free = |port: &u16| {
        let at = (Ipv4Addr::UNSPECIFIED, *port);
        TcpListener::bind(at).is_ok() && UdpSocket::bind(at).is_ok()
    };
    (first..first.saturating_add(TRIES)).find(is_free)
}

/// The first default identity that no other process uses, and the file whose lock says so: two peers with one identity would be taken
/// for one.
pub fn default_identity(folder: &Path) -> Result<(Identity, File)> {
    for number in 1..=TRIES {
        let name = if number == 1 { "swarm.key".to_owned() } else { format!("swarm-{number}.key") };
        let path = folder.join(name);
        let identity = Identity::load_or_create(&path)?;
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => {
                if number > 1 {
                    info!("another process has this machine's identity, so this one uses {}", path.display());
                }
                return Ok((identity, file));
            }
            Err(std::fs::TryLockError::WouldBlock) => {}
            // A file system without locks: as before, whoever runs two says --identity.
            Err(std::fs::TryLockError::Error(_)) => return Ok((identity, file)),
        }
    }
    bail!("{TRIES} processes serve from {}: give this one a file of its own with --identity", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_free_port_is_taken() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let next = free_port(port);
        assert!(next.is_none_or(|next| next > port), "{next:?} after {port}");
        let taken = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert_ne!(free_port(port), Some(port), "QUIC needs the port too");
    }

    #[test]
    fn a_second_process_has_another_identity() {
        let folder = tempfile::tempdir().unwrap();
        let (first, lock) = default_identity(folder.path()).unwrap();
        // Locks are of open files, so this one is refused as another process would be.
        let (second, _second_lock) = default_identity(folder.path()).unwrap();
        assert_ne!(first.peer(), second.peer());
        drop(lock);
        let (again, _lock) = default_identity(folder.path()).unwrap();
        assert_eq!(again.peer(), first.peer());
    }
}
