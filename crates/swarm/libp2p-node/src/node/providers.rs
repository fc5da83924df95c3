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

type Found = Result<Vec<directory::PeerId>, FindError>;

#[derive(Default)]
pub struct Providers {
    provided: HashSet<RecordKey>,
    foreign: HashMap<RecordKey, ForeignKey>,
    lookups: HashMap<QueryId, LookUp>,
    /// Others can find this node better than at the last announcement.
    is_due: bool,
    last: Option<Instant>,
    known_peers: usize,
}

/// A key of others, until its newest provider is forgotten.
struct ForeignKey {
    /// Who provided it first, to whose share it counts.
    first: PeerId,
    end: Instant,
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
        let first = self.foreign.get(&record.key).map_or(record.provider, |known| known.first);
        if self.foreign.len() >= FOREIGN_KEYS_MAX && !self.foreign.contains_key(&record.key) {
            self.foreign.retain(|_, known| now < known.end);
            if self.foreign.len() >= FOREIGN_KEYS_MAX {
                let Some(key) = displaced(&self.foreign, &record.provider) else {
                    return tracing::debug!("a provider is not stored: there are too many keys");
                };
                self.foreign.remove(&key);
                let me = *swarm.local_peer_id();
                let store = swarm.behaviour_mut().kademlia.store_mut();
                for provider in store.providers(&key).into_iter().filter(|known| known.provider != me) {
                    store.remove_provider(&key, &provider.provider);
                }
            }
        }
        record.addresses.truncate(ADDRESSES_PER_PEER_MAX);
        self.foreign.insert(record.key.clone(), ForeignKey { first, end: now + PROVIDER_TIME });
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

/// The key that makes room for one of this provider: the oldest one of the provider that has the most keys, if it has more.
fn displaced(foreign: &HashMap<RecordKey, ForeignKey>, provider: &PeerId) -> Option<RecordKey> {
    let mut counts: HashMap<PeerId, usize> = HashMap::new();
    foreign.values().for_each(|known| *counts.entry(known.first).or_default() += 1);
    let (largest, count) = counts.iter().max_by_key(|(peer, count)| (**count, **peer))?;
    if *count <= counts.get(provider).copied().unwrap_or_default() + 1 {
        return None;
    }
    let keys = foreign.iter().filter(|(_, known)| known.first == *largest);
    keys.min_by_key(|(_, known)| known.end).map(|(key, _)| key.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_the_most_keys_makes_room_for_others() {
        let [flooder, honest, other] = [(); 3].map(|()| PeerId::random());
        let start = Instant::now();
        let key = |number: usize| RecordKey::new(&number.to_le_bytes());
        let mut foreign: HashMap<_, _> = (0..FOREIGN_KEYS_MAX - 2)
            .map(|number| (key(number), ForeignKey { first: flooder, end: start + Duration::from_secs(number as u64) }))
            .collect();
        for number in [10_000, 10_001] {
            foreign.insert(key(number), ForeignKey { first: honest, end: start });
        }
        assert_eq!(displaced(&foreign, &other), Some(key(0)));
        assert_eq!(displaced(&foreign, &flooder), None);
        // Each of them has one key.
        let even = (0..9).map(|number| (key(number), ForeignKey { first: PeerId::random(), end: start })).collect();
        assert_eq!(displaced(&even, &other), None);
    }
}
