//! `Behaviour`: the protocols of a node, and their settings.

use std::num::NonZeroU32;
use std::time::Duration;

use libp2p_autonat::v2 as autonat;
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

use crate::connection_limits::ConnectionLimits;
use crate::error::NodeError;
use crate::guard::{CandidateLimit, DialBacks, Guarded};
use crate::handshakes::Handshakes;
use crate::limits;
use crate::options::NodeOptions;
use crate::streams;

/// Our own Kademlia: peers that follow other rules are not in it.
pub const KADEMLIA: StreamProtocol = StreamProtocol::new("/consort/kad/1");
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
    identify: Guarded<identify::Behaviour, CandidateLimit>,
    ping: ping::Behaviour,
    pub kademlia: kad::Behaviour<MemoryStore>,
    mdns: Toggle<mdns::tokio::Behaviour>,
    autonat_client: autonat::client::Behaviour,
    autonat_server: Guarded<autonat::server::Behaviour, DialBacks>,
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
            identify: Guarded::new(identify::Behaviour::new(identify), CandidateLimit::default()),
            ping: ping::Behaviour::new(ping),
            kademlia: kademlia(me, options),
            mdns: mdns.into(),
            autonat_client: autonat::client::Behaviour::new(rand::make_rng(), autonat),
            autonat_server: Guarded::new(autonat::server::Behaviour::default(), DialBacks::default()),
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
