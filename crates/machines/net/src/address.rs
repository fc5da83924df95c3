//! `PeerAddress`: where a node listens, as a person writes it.

use std::fmt;
use std::str::FromStr;

/// The longest host: that of a DNS name.
const HOST_BYTES_MAX: usize = 253;

/// `HOST:PORT`: a name or an IP address, in brackets if it contains colons, and a port that is not zero.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddress(String);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address: write HOST:PORT, or [IPv6]:PORT")]
pub struct InvalidPeerAddress(String);

impl PeerAddress {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PeerAddress {
    type Err = InvalidPeerAddress;

    fn from_str(text: &str) -> Result<Self, InvalidPeerAddress> {
        let (host, port) = text.rsplit_once(':').unwrap_or((text, ""));
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        match digits && port.parse::<u16>().is_ok_and(|port| port > 0) && is_host(host) {
            true => Ok(Self(text.to_owned())),
            false => Err(InvalidPeerAddress(text.chars().take(HOST_BYTES_MAX).collect())),
        }
    }
}

impl From<std::net::SocketAddr> for PeerAddress {
    fn from(address: std::net::SocketAddr) -> Self {
        Self(address.to_string())
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_host(host: &str) -> bool {
    match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        // A zone, as in fe80::1%eth0, is a name of an interface.
        Some(inner) => {
            let (address, zone) = inner.split_once('%').unwrap_or((inner, "0"));
            address.parse::<std::net::Ipv6Addr>().is_ok() && is_name(zone)
        }
        None => is_name(host),
    }
}

fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    (1..=HOST_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_host_and_a_port() {
        for right in ["10.0.0.2:7000", "node-1.local:1", "[::1]:65535", "[fe80::1%eth0]:7000", "my_pi:80"] {
            assert_eq!(right.parse::<PeerAddress>().unwrap().to_string(), right);
        }
        let long = format!("{}:1", "a".repeat(254));
        for wrong in
            ["", "host", "host:", ":80", "host:0", "host:65536", "host:+1", "::1:80", "[::1]", "a b:1", "[x]:1", &long]
        {
            assert!(wrong.parse::<PeerAddress>().is_err(), "{wrong:?}");
        }
    }
}
