//! `DialRules`: at which addresses this node dials others, and `RuledTransport`, which applies them to every dial, whoever the
//! address comes from: identify, Kademlia, a relay, DCUtR, AutoNAT, a record, or a client that names the next peer.
//!
//! Peers can claim any address. A node that dialled all of them would knock at machines that only it can reach. So:
//! - public addresses are dialled;
//! - private ones if this node's swarm is in a private network (a bootstrap peer is at such an address, or without bootstrap peers
//!   the node listens at such addresses alone), if mDNS found them, and where a connected peer is connected from;
//! - addresses of this machine if its swarm is on this machine, by the same signs;
//! - link-local addresses if mDNS found them;
//! - and all that the user named, which are the only names that are looked up.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use libp2p_core::multiaddr::Protocol;
use libp2p_core::transport::{Boxed, DialOpts, ListenerId, Transport, TransportError, TransportEvent};
use libp2p_core::{Multiaddr, muxing::StreamMuxerBox};
use libp2p_identity::PeerId;

use crate::limits::LAN_ADDRESSES_MAX;
use crate::options::NodeOptions;
use crate::view::{Scope, ip, is_link_local, is_relayed, scope};

/// The rules of one node, shared by its task and its transport.
pub type SharedRules = Arc<Mutex<DialRules>>;

#[derive(Debug)]
pub struct DialRules {
    /// The least scope of addresses that anybody may claim.
    least: Scope,
    named_ips: HashSet<IpAddr>,
    named_hosts: HashSet<String>,
    /// Found by mDNS, the latest last.
    lan: VecDeque<IpAddr>,
    /// Where peers are connected from, and how many connections that are.
    origins: HashMap<IpAddr, usize>,
}

impl DialRules {
    pub fn new(options: &NodeOptions) -> Self {
        let registries = options.ipfs_kademlia.iter().flatten();
        let named: Vec<&Multiaddr> = options.bootstrap.iter().chain(&options.named).chain(registries).collect();
        let named_ips = named.iter().filter_map(|address| ip(address)).map(|ip| ip.to_canonical()).collect();
        let named_hosts = named.iter().filter_map(|address| host(address)).collect();
        let least = options.least_scope.unwrap_or_else(|| {
            // An address of the link alone says nothing of the rest.
            let is_telling = |ip: &IpAddr| !(ip.is_unspecified() || is_link_local(*ip));
            let named = named.iter().filter(|address| ip(address).is_some_and(|ip| is_telling(&ip.to_canonical())));
            let named = named.filter_map(|address| scope(address)).min();
            // A node with other addresses than those is reached from elsewhere.
            let listens =
                options.listen.iter().filter(|_| options.external.is_empty()).map(|address| match ip(address) {
                    Some(ip) if !ip.is_unspecified() => scope(address).unwrap_or(Scope::Internet),
                    _ => Scope::Internet,
                });
            named.or_else(|| listens.max()).unwrap_or(Scope::Internet)
        });
        Self { least, named_ips, named_hosts, lan: VecDeque::new(), origins: HashMap::new() }
    }

    /// Whether this node dials there. One at a relay is dialled as the relay's own address is.
    pub fn allows(&self, address: &Multiaddr) -> bool {
        if is_relayed(address) {
            return true;
        }
        match ip(address) {
            Some(ip) => self.allows_ip(ip.to_canonical()),
            None => host(address).is_some_and(|host| self.named_hosts.contains(&host)),
        }
    }

    fn allows_ip(&self, ip: IpAddr) -> bool {
        if self.named_ips.contains(&ip) {
            return true;
        }
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast() || ip.octets()[0] == 0);
        if ip.is_unspecified() || ip.is_multicast() || is_broadcast {
            return false;
        }
        if is_link_local(ip) {
            return self.lan.contains(&ip);
        }
        let address = Multiaddr::from(ip);
        match scope(&address) {
            Some(scope) if scope >= self.least => true,
            Some(Scope::Network) => self.lan.contains(&ip) || self.origins.contains_key(&ip),
            _ => false,
        }
    }

    /// mDNS found a peer there. Whoever says so is on the same link, and could connect there too.
    pub fn found_in_lan(&mut self, address: &Multiaddr) {
        let Some(ip) = ip(address).map(|ip| ip.to_canonical()) else { return };
        if ip.is_loopback() || ip.is_unspecified() || self.lan.contains(&ip) {
            return;
        }
        if self.lan.len() >= LAN_ADDRESSES_MAX {
            self.lan.pop_front();
        }
        self.lan.push_back(ip);
    }

    pub fn connected(&mut self, address: &Multiaddr) {
        if let Some(ip) = ip(address).filter(|_| !is_relayed(address)) {
            *self.origins.entry(ip.to_canonical()).or_default() += 1;
        }
    }

    pub fn disconnected(&mut self, address: &Multiaddr) {
        let Some(ip) = ip(address).filter(|_| !is_relayed(address)).map(|ip| ip.to_canonical()) else { return };
        if let Some(connections) = self.origins.get_mut(&ip) {
            *connections -= 1;
            if *connections == 0 {
                self.origins.remove(&ip);
            }
        }
    }
}

/// The name that an address begins with.
fn host(address: &Multiaddr) -> Option<String> {
    match address.iter().next()? {
        Protocol::Dns(name) | Protocol::Dns4(name) | Protocol::Dns6(name) | Protocol::Dnsaddr(name) => {
            Some(name.to_ascii_lowercase())
        }
        _ => None,
    }
}

#[derive(Debug, thiserror::Error)]
#[error("it is an address of a private network, of this machine, or a name, and not one that the user named")]
struct NotDialled;

type Connections = Boxed<(PeerId, StreamMuxerBox)>;

/// All of a node's dials go through it.
pub struct RuledTransport {
    pub inner: Connections,
    pub rules: SharedRules,
}

impl Transport for RuledTransport {
    type Output = <Connections as Transport>::Output;
    type Error = io::Error;
    type ListenerUpgrade = <Connections as Transport>::ListenerUpgrade;
    type Dial = <Connections as Transport>::Dial;

    fn listen_on(&mut self, id: ListenerId, address: Multiaddr) -> Result<(), TransportError<Self::Error>> {
        self.inner.listen_on(id, address)
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        self.inner.remove_listener(id)
    }

    fn dial(&mut self, address: Multiaddr, options: DialOpts) -> Result<Self::Dial, TransportError<Self::Error>> {
        let allows = self.rules.lock().unwrap_or_else(PoisonError::into_inner).allows(&address);
        match allows {
            true => self.inner.dial(address, options),
            false => Err(TransportError::Other(io::Error::new(io::ErrorKind::PermissionDenied, NotDialled))),
        }
    }

    fn poll(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<TransportEvent<Self::ListenerUpgrade, Self::Error>> {
        Pin::new(&mut self.inner).poll(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

    fn addresses(texts: &[&str]) -> Vec<Multiaddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    const ID: &str = "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5";

    fn rules(bootstrap: &[&str], listen: &[&str], external: &[&str]) -> DialRules {
        DialRules::new(&NodeOptions {
            bootstrap: addresses(bootstrap),
            listen: addresses(listen),
            external: addresses(external),
            ..NodeOptions::new(Identity::ephemeral())
        })
    }

    const PUBLIC: &str = "/ip4/203.0.113.1/tcp/4101";
    const PRIVATE: [&str; 4] =
        ["/ip4/10.1.2.3/tcp/22", "/ip4/192.168.1.1/tcp/80", "/ip4/100.64.0.1/tcp/1", "/ip6/fd00::1/tcp/1"];
    const HOST: [&str; 3] = ["/ip4/127.0.0.1/tcp/22", "/ip6/::1/tcp/22", "/ip6/::ffff:127.0.0.1/tcp/22"];
    const NEVER: [&str; 7] = [
        "/ip4/169.254.169.254/tcp/80",
        "/ip6/fe80::1/tcp/80",
        "/ip4/0.0.0.0/tcp/22",
        "/ip6/::/tcp/22",
        "/ip4/255.255.255.255/tcp/22",
        "/dns4/localhost/tcp/22",
        "/unix/run%2Fsocket",
    ];

    fn check(rules: &DialRules, allowed: &[&[&str]], refused: &[&[&str]]) {
        assert!(rules.allows(&PUBLIC.parse().unwrap()));
        assert!(rules.allows(&"/ip6/2001:db8::1/udp/1/quic-v1".parse().unwrap()));
        for (groups, is_allowed) in [(allowed, true), (refused, false)] {
            for text in groups.iter().copied().flatten() {
                let Ok(address) = text.parse() else { continue };
                assert_eq!(rules.allows(&address), is_allowed, "{text}");
            }
        }
    }

    #[test]
    fn a_node_in_the_internet_dials_public_addresses() {
        let bootstrap = format!("{PUBLIC}/p2p/{ID}");
        for rules in [
            rules(&[], &["/ip4/0.0.0.0/tcp/4101", "/ip6/::/tcp/4101"], &[]),
            rules(&[&bootstrap], &[], &[]),
            rules(&[&bootstrap], &["/ip4/0.0.0.0/tcp/1", "/ip4/127.0.0.1/tcp/1"], &[]),
            rules(&[], &["/ip4/10.0.0.5/tcp/1"], &[PUBLIC]),
        ] {
            check(&rules, &[], &[&PRIVATE, &HOST, &NEVER]);
        }
    }

    #[test]
    fn a_swarm_in_a_private_network_or_on_one_machine_is_dialled_there() {
        let bootstrap = |address: &str| format!("{address}/p2p/{ID}");
        for rules in [
            rules(&[&bootstrap("/ip4/10.9.9.9/tcp/1")], &["/ip4/0.0.0.0/tcp/4101"], &[]),
            rules(&[], &["/ip4/10.9.9.9/tcp/1"], &[]),
        ] {
            check(&rules, &[&PRIVATE], &[&HOST, &NEVER]);
        }
        for rules in [
            rules(&[&bootstrap("/ip4/127.0.0.1/tcp/1")], &["/ip4/0.0.0.0/tcp/4101"], &[]),
            rules(&[], &["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"], &[]),
        ] {
            check(&rules, &[&PRIVATE, &HOST], &[&NEVER]);
        }
    }

    #[test]
    fn what_the_user_named_is_dialled_and_no_more() {
        let rules = rules(
            &[&format!("/dns4/Bootstrap.example/tcp/1/p2p/{ID}"), &format!("/ip4/169.254.1.1/tcp/1/p2p/{ID}")],
            &[],
            &[],
        );
        check(&rules, &[&["/ip4/169.254.1.1/tcp/9", "/dns/bootstrap.example/tcp/1"]], &[&PRIVATE, &HOST, &NEVER]);
    }

    #[test]
    fn peers_of_the_lan_are_dialled_as_far_as_mdns_or_a_connection_shows_them() {
        let mut rules = rules(&[], &["/ip4/0.0.0.0/tcp/4101"], &[]);
        let [first, second, link]: [Multiaddr; 3] =
            ["/ip4/192.168.1.7/tcp/4101", "/ip4/192.168.1.8/tcp/9", "/ip6/fe80::7/tcp/1"]
                .map(|text| text.parse().unwrap());
        rules.found_in_lan(&first);
        rules.found_in_lan(&link);
        rules.found_in_lan(&"/ip4/127.0.0.1/tcp/22".parse().unwrap());
        rules.connected(&second);
        rules.connected(&second);
        rules.connected(&"/ip4/127.0.0.1/tcp/5".parse().unwrap());
        rules.disconnected(&second);
        for address in [&first, &second, &link] {
            assert!(rules.allows(address), "{address}");
        }
        check(&rules, &[], &[&PRIVATE, &HOST, &NEVER]);
        rules.disconnected(&second);
        assert!(!rules.allows(&second));
        // The latest are kept.
        for number in 0..LAN_ADDRESSES_MAX {
            rules.found_in_lan(&Multiaddr::from(IpAddr::from([10, 0, (number >> 8) as u8, number as u8])));
        }
        assert!(!rules.allows(&first) && rules.lan.len() == LAN_ADDRESSES_MAX);
    }
}
