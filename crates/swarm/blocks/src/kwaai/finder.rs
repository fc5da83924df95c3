//! `KwaaiFinder`: finds the block servers of a model in KwaaiNet's registries, again and again, and has a client use them.
//!
//! What a registry says is a claim: a server is used if it answers, its results are checked as those of any peer, and at most
//! [`SERVERS_MAX`] are used. Servers that the user named, and peers that speak our own protocol, are left to those.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use directory::{
    BlockRecord, BlockUse, ModelDigest, PeerId, Reach, RecordError, ServiceState, Speed, UnixTime, VerifiedRecord,
};
use libp2p_core::Multiaddr;
use tokio::time::sleep;
use tracing::{debug, info, warn};
use types::{DType, LayerRange};

use super::dht_client::{DhtClient, FoundServer};
use super::foreign::{KwaaiPeer, with_cause};
use super::span::KwaaiRoute;
use crate::client::ForeignPeers;
use crate::dial::Dial;
use crate::view::{SwarmView, now};

/// How often the registries are asked.
const LOOK_UP: Duration = Duration::from_secs(60);
/// The same while it knows of none.
const LOOK_UP_AGAIN: Duration = Duration::from_secs(10);
/// How often the finder looks for servers that turn out to speak our own protocol.
const CHECK: Duration = Duration::from_secs(5);
/// How long a server is used that only registries named that do not answer any more.
const KEPT: Duration = Duration::from_secs(180);
/// How long records of servers last: longer than any server is used without being named again.
const RECORD_LIFETIME: Duration = Duration::from_secs(600);
/// The most servers that are used.
const SERVERS_MAX: usize = 64;
/// How fast a server is assumed to be: what it claims is not measured for its block.
const SPEED_GUESS: Speed =
    Speed { layer_seconds: 0.02, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e7 };

/// What a client knows of the model.
#[derive(Clone, Copy, Debug)]
pub struct KwaaiModel {
    pub digest: ModelDigest,
    pub layers: usize,
    pub hidden: usize,
    pub vocab: usize,
}

/// Makes a server of KwaaiNet known as a peer that serves all of its block or nothing, for ten minutes.
pub fn insert_record(
    view: &SwarmView,
    model: ModelDigest,
    peer: PeerId,
    layers: LayerRange,
    reach: Reach,
) -> Result<(), RecordError> {
    let issued = now();
    let record = BlockRecord {
        peer,
        sequence: issued.0,
        issued,
        lifetime_ms: RECORD_LIFETIME.as_millis() as u32,
        model,
        layers,
        block_use: BlockUse::Whole,
        dtype: DType::F16,
        state: ServiceState::Serving,
        reach,
        speed: SPEED_GUESS,
        kv_tokens_free: 1 << 20,
        coordinate: None,
        neighbours: Vec::new(),
    };
    if let Err(error) = view.insert(VerifiedRecord::configured(record)?) {
        debug!(%peer, %error, "the record of a server is not taken");
    }
    Ok(())
}

pub struct KwaaiFinder {
    registries: DhtClient,
    repository: String,
    model: KwaaiModel,
    dial: Arc<dyn Dial>,
    view: Arc<SwarmView>,
    foreign: ForeignPeers,
    used: HashMap<PeerId, UsedServer>,
    found: Arc<FinderReport>,
}

/// What the registries said last, for people.
#[derive(Debug, Default)]
pub struct FinderReport(Mutex<Option<String>>);

impl FinderReport {
    /// A sentence, once they were asked.
    pub fn text(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }
}

struct UsedServer {
    layers: LayerRange,
    /// When a registry named it last.
    named: Instant,
}

impl KwaaiFinder {
    /// `repository`: the model's name at Hugging Face, from which KwaaiNet derives the keys of its records. Servers that are found
    /// become peers in `foreign`, with records in `view`.
    pub fn new(
        registries: Vec<Multiaddr>,
        repository: String,
        model: KwaaiModel,
        dial: Arc<dyn Dial>,
        view: Arc<SwarmView>,
        foreign: ForeignPeers,
    ) -> Self {
        let registries = DhtClient::new(registries);
        let (used, found) = (HashMap::new(), Arc::default());
        Self { registries, repository, model, dial, view, foreign, used, found }
    }

    /// What the registries said, also later.
    pub fn report(&self) -> Arc<FinderReport> {
        Arc::clone(&self.found)
    }

    /// Looks servers up until it is dropped.
    pub async fn run(mut self) {
        loop {
            self.look_up().await;
            let since = Instant::now();
            let wait = if self.used.is_empty() { LOOK_UP_AGAIN } else { LOOK_UP };
            while since.elapsed() < wait {
                sleep(CHECK).await;
                self.leave_own();
            }
        }
    }

    /// Asks the registries once. Servers that none names any more are not used any more. Returns how many are used now.
    pub async fn look_up(&mut self) -> usize {
        let layers = u32::try_from(self.model.layers).unwrap_or(u32::MAX);
        let (servers, answers) = self.registries.find(&self.repository, layers, SystemTime::now()).await;
        let mut said = Vec::new();
        for (registry, answer) in &answers {
            match answer {
                Ok(found) => {
                    debug!(%registry, found, "servers of KwaaiNet");
                    said.push(format!("the registry {registry} names {found} servers of {}", self.repository));
                }
                Err(error) => {
                    let why = with_cause(error);
                    warn!(%registry, "a registry of KwaaiNet gave no answer: {why}");
                    said.push(format!("the registry {registry} gave no answer: {why}"));
                }
            }
        }
        self.found.set(said.join("; "));
        // Before the others are left: their records are their own.
        self.leave_own();
        let own = self.own_peers();
        let mut named = HashSet::new();
        for server in servers {
            if named.len() < SERVERS_MAX && !own.contains(&server.peer) && self.add(&server).await {
                named.insert(server.peer);
            }
        }
        // A registry that gave no answer may know those that are missing.
        let is_complete = answers.iter().all(|(_, answer)| answer.is_ok());
        let is_left =
            |peer: &PeerId, used: &UsedServer| !named.contains(peer) && (is_complete || used.named.elapsed() > KEPT);
        let left: Vec<_> = self.used.iter().filter(|(peer, used)| is_left(peer, used)).map(|(peer, _)| *peer).collect();
        for peer in left {
            info!(%peer, "a server of KwaaiNet is used no more: no registry names it");
            self.leave(&peer);
            self.view.remove(&self.model.digest, &peer);
        }
        self.used.len()
    }

    /// Uses a server, from now on or still. False if it cannot be used.
    async fn add(&mut self, server: &FoundServer) -> bool {
        let FoundServer { peer, layers, using_relay, .. } = *server;
        let digest = self.model.digest;
        let is_known = self.used.get(&peer).is_some_and(|used| used.layers == layers);
        if !is_known && self.foreign.contains(&peer) && !self.used.contains_key(&peer) {
            return false; // the user named it
        }
        // One that cannot be reached may have moved.
        if !is_known || self.view.score(&peer) > 0.0 {
            let addresses: Vec<_> = self.registries.addresses(&peer).await.iter().map(Multiaddr::to_string).collect();
            let route = KwaaiRoute::Peer { peer, addresses, dial: Arc::clone(&self.dial) };
            let Some(kwaai) = KwaaiPeer::new(route, layers, &self.model) else {
                debug!(%peer, %layers, "a server of KwaaiNet has layers that the model has not");
                return false;
            };
            self.foreign.insert(peer, Arc::new(kwaai));
        }
        if !is_known {
            info!(%peer, %layers, "a server of KwaaiNet was found");
        }
        self.used.insert(peer, UsedServer { layers, named: Instant::now() });
        let reach = if using_relay { Reach::Relayed } else { Reach::Direct };
        if let Err(error) = insert_record(&self.view, digest, peer, layers, reach) {
            debug!(%peer, %error, "a server of KwaaiNet cannot be used");
            self.leave(&peer);
            return false;
        }
        true
    }

    fn leave(&mut self, peer: &PeerId) {
        self.used.remove(peer);
        self.foreign.remove(peer);
    }

    /// Peers that have announced the model themselves, in our own protocol.
    fn own_peers(&self) -> HashSet<PeerId> {
        let records = self.view.signed_records(Some(&self.model.digest), UnixTime(0));
        records.iter().map(|record| record.record().peer).collect()
    }

    fn leave_own(&mut self) {
        if self.used.is_empty() {
            return;
        }
        for peer in self.own_peers() {
            if self.used.contains_key(&peer) {
                self.leave(&peer);
            }
        }
    }
}
