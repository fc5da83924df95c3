//! Keys that this node provides, and look-ups of who provides one.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use libp2p_identity::PeerId;
use libp2p_kad::store::RecordStore;
use libp2p_kad::{GetProvidersOk, ProviderRecord, QueryId, RecordKey};
use libp2p_swarm::Swarm;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::behaviour::Behaviour;
use crate::error::FindError;
use crate::limits::{
    ADDRESSES_PER_PEER_MAX, FOREIGN_KEYS_MAX, KEY_BYTES_MAX, LOOKUPS_MAX, PROVIDED_KEYS_MAX, PROVIDER_TIME,
    PROVIDERS_MAX,
};
use crate::peer_id;

/// The least time between two announcements.
const ANNOUNCE_INTERVAL_MIN: Duration = Duration::from_secs(2);
/// A routing table of so many peers is large enough: one more is no reason to announce again.
const PEERS_ENOUGH: usize = 20;

type Found = Result<Vec<swarm::PeerId>, FindError>;

#[derive(Default)]
pub struct Providers {
    provided: HashSet<RecordKey>,
    /// Keys of others, until their newest provider is forgotten.
    foreign: HashMap<RecordKey, Instant>,
    lookups: HashMap<QueryId, LookUp>,
    /// Others can find this node better than at the last announcement.
    is_due: bool,
    last: Option<Instant>,
    known_peers: usize,
}

struct LookUp {
    found: HashSet<PeerId>,
    reply: oneshot::Sender<Found>,
}

impl Providers {
    pub fn provide(&mut self, swarm: &mut Swarm<Behaviour>, key: Vec<u8>) -> Result<(), FindError> {
        let key = RecordKey::new(&key);
        if self.provided.len() >= PROVIDED_KEYS_MAX && !self.provided.contains(&key) {
            return Err(FindError::Busy);
        }
        swarm.behaviour_mut().kademlia.start_providing(key.clone()).map_err(|_| FindError::Busy)?;
        self.provided.insert(key);
        Ok(())
    }

    pub fn stop(&mut self, swarm: &mut Swarm<Behaviour>, key: Vec<u8>) {
        let key = RecordKey::new(&key);
        self.provided.remove(&key);
        swarm.behaviour_mut().kademlia.stop_providing(&key);
    }

    pub fn find(&mut self, swarm: &mut Swarm<Behaviour>, key: Vec<u8>, reply: oneshot::Sender<Found>) {
        if self.lookups.len() >= LOOKUPS_MAX {
            let _ = reply.send(Err(FindError::Busy));
            return;
        }
        let query = swarm.behaviour_mut().kademlia.get_providers(RecordKey::new(&key));
        self.lookups.insert(query, LookUp { found: HashSet::new(), reply });
    }

    /// A step of a look-up; the last one answers it. `me` is no other provider.
    pub fn on_progress(&mut self, query: QueryId, step: Option<GetProvidersOk>, is_last: bool, me: &PeerId) {
        let Some(lookup) = self.lookups.get_mut(&query) else { return };
        if let Some(GetProvidersOk::FoundProviders { providers, .. }) = step {
            for provider in providers {
                if provider != *me && lookup.found.len() < PROVIDERS_MAX {
                    lookup.found.insert(provider);
                }
            }
        }
        if is_last && let Some(lookup) = self.lookups.remove(&query) {
            // Nobody may wait for it any more.
            let _ = lookup.reply.send(Ok(lookup.found.iter().map(peer_id::from_libp2p).collect()));
        }
    }

    /// Stores who provides what, within limits.
    pub fn store(&mut self, swarm: &mut Swarm<Behaviour>, mut record: ProviderRecord, now: Instant) {
        if record.key.as_ref().len() > KEY_BYTES_MAX {
            return;
        }
        if self.foreign.len() >= FOREIGN_KEYS_MAX && !self.foreign.contains_key(&record.key) {
            self.foreign.retain(|_, end| now < *end);
            if self.foreign.len() >= FOREIGN_KEYS_MAX {
                return tracing::debug!("a provider is not stored: there are too many keys");
            }
        }
        record.addresses.truncate(ADDRESSES_PER_PEER_MAX);
        self.foreign.insert(record.key.clone(), now + PROVIDER_TIME);
        if swarm.behaviour_mut().kademlia.store_mut().add_provider(record).is_err() {
            tracing::debug!("a provider is not stored: there are too many");
        }
    }

    /// This node has another address.
    pub fn on_address(&mut self) {
        self.is_due = true;
    }

    /// There is another peer that may answer look-ups.
    pub fn on_peer(&mut self) {
        self.known_peers += 1;
        self.is_due |= self.known_peers <= PEERS_ENOUGH;
    }

    /// Announces all keys again if that is due.
    pub fn announce(&mut self, swarm: &mut Swarm<Behaviour>, now: Instant) {
        if !self.is_due || self.last.is_some_and(|last| now < last + ANNOUNCE_INTERVAL_MIN) {
            return;
        }
        self.is_due = false;
        self.last = Some(now);
        for key in &self.provided {
            // It is stored already.
            let _ = swarm.behaviour_mut().kademlia.start_providing(key.clone());
        }
    }
}
