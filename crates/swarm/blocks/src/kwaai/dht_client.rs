//! `DhtClient`: announces our blocks in hivemind's DHT, and finds the servers that announced theirs.
//!
//! As KwaaiNet does, it asks each registry that it was given, and no other node. It is not a node itself, so it names no node id
//! and nobody asks it for records. Nothing that a registry says is verified: whoever reaches one can write any record.

use std::collections::HashSet;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use directory::PeerId;
use futures_util::future::join_all;
use kwaai::KwaaiWireError;
use kwaai::dht::{
    DHT_KEYS_MAX, DhtDictionary, DhtFindRequest, DhtFindResponse, DhtFound, DhtId, DhtRecord, DhtSender,
    DhtStoreRequest, DhtStoreResponse, DhtSubkey, FIND_PROTOCOL, KADEMLIA_PROTOCOL, KwaaiModelInfo, KwaaiServerInfo,
    KwaaiServerState, MODELS_KEY, NODES_KEY, RECORD_LIFETIME, ROUTING_ADDRESSES_MAX, ROUTING_BYTES_MAX,
    SERVER_VERSION_MIN, STORE_PROTOCOL, block_key, model_prefix, routing_addresses, routing_request,
};
use libp2p_core::Multiaddr;
use libp2p_identity::Keypair;
use tracing::debug;
use types::LayerRange;

use super::registry::{RegistryError, ask, call};

/// The most servers that are taken from registries.
const FOUND_SERVERS_MAX: usize = 4096;
/// What KwaaiNet's own servers announce, whatever they have.
const CACHE_TOKENS_LEFT: u64 = 100_000;

/// A server that was found: what it claims.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FoundServer {
    pub peer: PeerId,
    pub layers: LayerRange,
    /// Tokens per second.
    pub throughput: f64,
    pub using_relay: bool,
}

/// What is said of a server of ours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KwaaiAnnouncement<'a> {
    /// The model's name at Hugging Face.
    pub repository: &'a str,
    /// Of the whole model.
    pub model_layers: u32,
    pub layers: LayerRange,
    pub peer: PeerId,
    pub state: KwaaiServerState,
    /// Tokens per second.
    pub throughput: f64,
    pub public_name: Option<&'a str>,
    pub using_relay: bool,
}

/// What each registry answered.
pub type Answers<T> = Vec<(Multiaddr, Result<T, RegistryError>)>;

pub struct DhtClient {
    /// Of the connections. Records do not depend on it.
    key: Keypair,
    registries: Vec<Multiaddr>,
}

impl DhtClient {
    /// `registries`: addresses such as `/dns/NAME/tcp/8000/p2p/ID`.
    pub fn new(registries: Vec<Multiaddr>) -> Self {
        Self { key: Keypair::generate_ed25519(), registries }
    }

    /// Writes the records of a server to all registries: for each of its blocks, for its model, and for itself. They live for
    /// [`RECORD_LIFETIME`]; to withdraw them, announce [`KwaaiServerState::Offline`]. Returns how many records each registry
    /// took.
    pub async fn announce(&self, announcement: &KwaaiAnnouncement<'_>, now: SystemTime) -> Answers<usize> {
        let expires_at = seconds(now) + RECORD_LIFETIME.as_secs_f64();
        let version = SERVER_VERSION_MIN.map(|number| number.to_string()).join(".");
        let (version, peer) = (format!("kwaai-{version}"), base58(&announcement.peer));
        let server = KwaaiServerInfo {
            state: announcement.state,
            throughput: announcement.throughput,
            blocks: announcement.layers,
            public_name: announcement.public_name,
            version: Some(&version),
            dtype: Some("float16"),
            using_relay: announcement.using_relay,
            cache_tokens_left: Some(CACHE_TOKENS_LEFT),
            peer: Some(&peer),
            lease_v1: false,
        };
        let prefix = model_prefix(announcement.repository);
        let model = KwaaiModelInfo { repository: announcement.repository, blocks: announcement.model_layers };
        let (server, model) = (server.encode(), model.encode());
        let record = |key: &str, subkey, value| {
            let (key, subkey) = (DhtId::of_key(key), DhtSubkey::Entry(subkey));
            DhtRecord { key, subkey, value, expires_at, in_cache: false }
        };
        let layers = announcement.layers.start()..announcement.layers.end();
        let blocks = layers.map(|block| record(&block_key(&prefix, block as u32), &peer, &*server));
        let others = [record(MODELS_KEY, &prefix, &*model), record(NODES_KEY, &peer, &*server)];
        let records: Vec<_> = others.into_iter().chain(blocks).collect();
        let sender = DhtSender { time: Some(seconds(now)), node: None };
        let store = |records: &[DhtRecord<'_>]| DhtStoreRequest { sender, records: records.to_vec() }.encode();
        let requests: Vec<_> = records.chunks(DHT_KEYS_MAX).map(|part| (part.len(), store(part))).collect();
        let requests = &requests;
        self.each(|registry| async move {
            let mut taken = 0;
            for (expected, request) in requests {
                let response = call(&self.key, &registry, STORE_PROTOCOL, request).await?;
                let accepted = DhtStoreResponse::decode(&response)?.accepted;
                if accepted.len() != *expected {
                    let (what, found, expected) = ("flags", accepted.len(), *expected);
                    return Err(KwaaiWireError::Count { what, found, expected }.into());
                }
                taken += accepted.into_iter().filter(|&is_accepted| is_accepted).count();
            }
            Ok(taken)
        })
        .await
    }

    /// The servers of a model's blocks that are ready, and how many each registry named. Of a server that was announced
    /// differently the first record counts.
    pub async fn find(
        &self,
        repository: &str,
        model_layers: u32,
        now: SystemTime,
    ) -> (Vec<FoundServer>, Answers<usize>) {
        let prefix = model_prefix(repository);
        let keys: Vec<_> = (0..model_layers).map(|block| DhtId::of_key(&block_key(&prefix, block))).collect();
        let sender = DhtSender { time: Some(seconds(now)), node: None };
        let find = |keys: &[DhtId]| DhtFindRequest { sender, keys: keys.to_vec() }.encode();
        let requests: Vec<_> = keys.chunks(DHT_KEYS_MAX).map(find).collect();
        let requests = &requests;
        let answers = self.each(|registry| async move {
            let mut found = Vec::new();
            for request in requests {
                let response = call(&self.key, &registry, FIND_PROTOCOL, request).await?;
                read_servers(&response, model_layers, seconds(now), &mut found)?;
            }
            Ok(found)
        });
        let (mut servers, mut known, mut counts) = (Vec::new(), HashSet::new(), Vec::new());
        for (registry, found) in answers.await {
            counts.push((
                registry,
                found.map(|found| {
                    let count = found.len();
                    servers.extend(found.into_iter().filter(|server: &FoundServer| known.insert(server.peer)));
                    count
                }),
            ));
        }
        servers.truncate(FOUND_SERVERS_MAX);
        (servers, counts)
    }

    /// Where a peer can be reached, as far as the registries know.
    pub async fn addresses(&self, peer: &PeerId) -> Vec<Multiaddr> {
        let request = &routing_request(peer.as_bytes());
        let answers = self.each(|registry| async move {
            let response = ask(&self.key, &registry, KADEMLIA_PROTOCOL, request, ROUTING_BYTES_MAX).await?;
            let addresses = routing_addresses(&response, peer.as_bytes())?;
            Ok(addresses.into_iter().filter_map(|address| address.to_vec().try_into().ok()).collect::<Vec<Multiaddr>>())
        });
        let mut addresses = Vec::new();
        for (registry, found) in answers.await {
            match found {
                Ok(found) => addresses.extend(found),
                Err(error) => debug!(%registry, %peer, %error, "a registry does not say where a peer is"),
            }
        }
        addresses.sort_unstable();
        addresses.dedup();
        addresses.truncate(ROUTING_ADDRESSES_MAX);
        addresses
    }

    /// Asks all registries at once.
    async fn each<T, F: Future<Output = Result<T, RegistryError>>>(&self, ask: impl Fn(Multiaddr) -> F) -> Answers<T> {
        let answers = join_all(self.registries.iter().cloned().map(ask)).await;
        self.registries.iter().cloned().zip(answers).collect()
    }
}

/// Adds the servers in a response that are ready and that no earlier one is. Records that make no sense are left out: whoever
/// writes one must not hide the others.
fn read_servers(
    response: &[u8],
    model_layers: u32,
    now: f64,
    servers: &mut Vec<FoundServer>,
) -> Result<(), KwaaiWireError> {
    let mut known: HashSet<PeerId> = servers.iter().map(|server| server.peer).collect();
    for result in DhtFindResponse::decode(response)?.results {
        let DhtFound::Dictionary { value, .. } = result.found else { continue };
        let Ok(dictionary) = DhtDictionary::decode(value) else { continue };
        for entry in dictionary.entries {
            let Ok(info) = KwaaiServerInfo::decode(entry.value) else { continue };
            let is_current = entry.expires_at > now && info.is_usable();
            let fits = info.blocks.end() <= model_layers as usize;
            let Some(peer) = peer_of(entry.subkey).filter(|_| is_current && fits) else { continue };
            if servers.len() < FOUND_SERVERS_MAX && known.insert(peer) {
                let KwaaiServerInfo { blocks: layers, throughput, using_relay, .. } = info;
                servers.push(FoundServer { peer, layers, throughput, using_relay });
            }
        }
    }
    Ok(())
}

fn peer_of(base58: &str) -> Option<PeerId> {
    PeerId::new(&libp2p_identity::PeerId::from_str(base58).ok()?.to_bytes())
}

/// As KwaaiNet writes it.
fn base58(peer: &PeerId) -> String {
    match libp2p_identity::PeerId::from_bytes(peer.as_bytes()) {
        Ok(peer) => peer.to_base58(),
        Err(_) => peer.to_string(),
    }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}
