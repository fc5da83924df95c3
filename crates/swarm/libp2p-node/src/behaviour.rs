//! `Behaviour`: the protocols of a node, and their settings.

use std::num::NonZeroU32;
use std::time::Duration;

use libp2p_autonat::v2 as autonat;
use libp2p_core::Multiaddr;
use libp2p_dcutr as dcutr;
use libp2p_identify as identify;
use libp2p_identity::PeerId;
use libp2p_kad::store::{MemoryStore, MemoryStoreConfig};
use libp2p_kad::{self as kad, Mode, StoreInserts};
use libp2p_mdns as mdns;
use libp2p_ping as ping;
use libp2p_relay as relay;
use libp2p_swarm::behaviour::toggle::Toggle;
use libp2p_swarm::{NetworkBehaviour, StreamProtocol};

use crate::candidates::Candidates;
use crate::connection_limits::ConnectionLimits;
use crate::error::NodeError;
use crate::handshakes::Handshakes;
use crate::limits;
use crate::options::NodeOptions;
use crate::streams;
use crate::view::without_peer;

/// Our own Kademlia: peers that follow other rules are not in it.
pub const KADEMLIA: StreamProtocol = StreamProtocol::new("/consort/kad/1");
/// libp2p's default, in which KwaaiNet's coordinators look addresses up.
pub const IPFS_KADEMLIA: StreamProtocol = StreamProtocol::new("/ipfs/kad/1.0.0");
const PROTOCOL_VERSION: &str = "consort/1";
/// Own addresses are tested this often until all are.
const ADDRESS_TEST_INTERVAL: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[derive(NetworkBehaviour)]
#[behaviour(prelude = "libp2p_swarm::derive_prelude")]
pub struct Behaviour {
    // First: what it refuses, the others do not hear of.
    limits: ConnectionLimits,
    pub streams: streams::Behaviour,
    identify: Candidates,
    ping: ping::Behaviour,
    pub kademlia: kad::Behaviour<MemoryStore>,
    pub ipfs_kademlia: Toggle<kad::Behaviour<MemoryStore>>,
    mdns: Toggle<mdns::tokio::Behaviour>,
    autonat_client: autonat::client::Behaviour,
    autonat_server: autonat::server::Behaviour,
    relay_client: relay::client::Behaviour,
    relay_server: Toggle<relay::Behaviour>,
    dcutr: dcutr::Behaviour,
}

impl Behaviour {
    pub fn new(
        options: &NodeOptions,
        streams: streams::Behaviour,
        relay_client: relay::client::Behaviour,
        handshakes: Handshakes,
    ) -> Result<Self, NodeError> {
        let keypair = options.identity.keypair();
        let me = keypair.public().to_peer_id();
        let identify = identify::Config::new(PROTOCOL_VERSION.to_owned(), keypair.public())
            .with_agent_version(concat!("consort/", env!("CARGO_PKG_VERSION")).to_owned())
            .with_push_listen_addr_updates(true)
            .with_cache_size(limits::KNOWN_PEERS_MAX);
        let ping = ping::Config::new().with_interval(limits::PING_INTERVAL).with_timeout(limits::PING_TIME_MAX);
        let mdns = match options.mdns {
            true => Some(mdns::tokio::Behaviour::new(mdns::Config::default(), me).map_err(NodeError::Lan)?),
            false => None,
        };
        let autonat = autonat::client::Config::default()
            .with_max_candidates(limits::ADDRESSES_PER_PEER_MAX)
            .with_probe_interval(ADDRESS_TEST_INTERVAL);
        let relay_server = options.relay_server.then(|| relay::Behaviour::new(me, relay_limits()));
        Ok(Self {
            limits: ConnectionLimits::new(handshakes),
            streams,
            identify: Candidates::new(identify::Behaviour::new(identify)),
            ping: ping::Behaviour::new(ping),
            kademlia: kademlia(me, options),
            ipfs_kademlia: options.ipfs_kademlia.as_ref().map(|_| ipfs_kademlia(me)).into(),
            mdns: mdns.into(),
            autonat_client: autonat::client::Behaviour::new(rand::make_rng(), autonat),
            autonat_server: autonat::server::Behaviour::default(),
            relay_client,
            relay_server: relay_server.into(),
            dcutr: dcutr::Behaviour::new(me),
        })
    }
}

fn kademlia(me: PeerId, options: &NodeOptions) -> kad::Behaviour<MemoryStore> {
    let mut config = kad::Config::new(KADEMLIA);
    config
        .set_query_timeout(limits::LOOKUP_TIME_MAX)
        // Values are not stored; providers are, after a look at them.
        .set_record_filtering(StoreInserts::FilterBoth)
        .set_provider_record_ttl(Some(limits::PROVIDER_TIME))
        .set_provider_publication_interval(Some(limits::PROVIDER_ANNOUNCE_INTERVAL));
    let store = MemoryStoreConfig {
        max_records: 0,
        max_value_bytes: 0,
        max_provided_keys: limits::PROVIDED_KEYS_MAX + limits::FOREIGN_KEYS_MAX,
        max_providers_per_key: limits::PROVIDERS_PER_KEY_MAX,
    };
    let mut kademlia = kad::Behaviour::with_config(me, MemoryStore::with_config(me, store), config);
    // A node that others begin with answers look-ups before anybody has tested its addresses.
    if options.bootstrap.is_empty() || options.relay_server {
        kademlia.set_mode(Some(Mode::Server));
    }
    kademlia
}

/// One in which peers alone are looked up: neither values nor providers are stored.
fn ipfs_kademlia(me: PeerId) -> kad::Behaviour<MemoryStore> {
    let mut config = kad::Config::new(IPFS_KADEMLIA);
    config.set_query_timeout(limits::LOOKUP_TIME_MAX).set_record_filtering(StoreInserts::FilterBoth);
    let store =
        MemoryStoreConfig { max_records: 0, max_value_bytes: 0, max_provided_keys: 0, max_providers_per_key: 0 };
    let mut kademlia = kad::Behaviour::with_config(me, MemoryStore::with_config(me, store), config);
    // As KwaaiNet's own nodes. A peer that only asks would not get into the tables of others.
    kademlia.set_mode(Some(Mode::Server));
    kademlia
}

/// Has Kademlia know a peer at these addresses and no others. Each list that comes from the peer replaces the one before.
pub fn set_addresses(kademlia: &mut kad::Behaviour<MemoryStore>, peer: &PeerId, addresses: &[Multiaddr]) {
    for address in addresses.iter().take(limits::ADDRESSES_PER_PEER_MAX) {
        kademlia.add_address(peer, address.clone());
    }
    let stale: Vec<Multiaddr> =
        known_addresses(kademlia, peer).into_iter().filter(|known| !addresses.contains(known)).collect();
    for address in stale {
        kademlia.remove_address(peer, &address);
    }
}

/// Without the peer's id.
fn known_addresses(kademlia: &mut kad::Behaviour<MemoryStore>, peer: &PeerId) -> Vec<Multiaddr> {
    let Some(bucket) = kademlia.kbucket(*peer) else { return Vec::new() };
    let entry = bucket.iter().find(|entry| entry.node.key.preimage() == peer);
    entry.map_or(Vec::new(), |entry| entry.node.value.iter().cloned().map(without_peer).collect())
}

fn relay_limits() -> relay::Config {
    let rate = NonZeroU32::new(limits::RELAY_REQUESTS_PER_MINUTE_MAX).expect("not zero");
    relay::Config {
        max_reservations: limits::RELAY_RESERVATIONS_MAX,
        max_reservations_per_peer: limits::RELAY_RESERVATIONS_PER_PEER_MAX,
        reservation_duration: limits::RELAY_RESERVATION_TIME,
        reservation_rate_limiters: Vec::new(),
        max_circuits: limits::RELAY_CIRCUITS_MAX,
        max_circuits_per_peer: limits::RELAY_CIRCUITS_PER_PEER_MAX,
        max_circuit_duration: limits::RELAY_CIRCUIT_TIME_MAX,
        max_circuit_bytes: limits::RELAY_CIRCUIT_BYTES_MAX,
        circuit_src_rate_limiters: Vec::new(),
    }
    .reservation_rate_per_peer(rate, MINUTE)
    .reservation_rate_per_ip(rate, MINUTE)
    .circuit_src_per_peer(rate, MINUTE)
    .circuit_src_per_ip(rate, MINUTE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_always_tells_other_addresses_has_few_in_the_table() {
        let (me, peer) = (PeerId::random(), PeerId::random());
        let mut kademlia = ipfs_kademlia(me);
        for round in 0..100 {
            let address = |number: usize| format!("/ip4/203.0.113.1/tcp/{}", 20 * round + number + 1).parse().unwrap();
            let addresses: Vec<Multiaddr> = (0..20).map(address).collect();
            set_addresses(&mut kademlia, &peer, &addresses);
            assert_eq!(known_addresses(&mut kademlia, &peer), addresses[..limits::ADDRESSES_PER_PEER_MAX]);
        }
        set_addresses(&mut kademlia, &peer, &[]);
        assert_eq!(kademlia.kbuckets().count(), 0);
    }
}
