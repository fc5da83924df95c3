//! `StreamPlaces`: what each client and peer uses of this server, within limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use swarm::PeerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::WAITING_KIB_PER_PEER_MAX;
use super::push::LINKS_PER_CLIENT_MAX;

/// Streams of all clients and peers.
pub const STREAMS_MAX: usize = 1024;
/// Streams of one client or peer.
pub const STREAMS_PER_PEER_MAX: usize = 8;

/// Memory for something that waits: a part of what all have, and a part of what the one who sent it has.
pub(super) type WaitingPermits = [Option<OwnedSemaphorePermit>; 2];

#[derive(Default)]
pub(super) struct StreamPlaces(Arc<Mutex<HashMap<PeerId, Account>>>);

struct Account {
    streams: usize,
    /// What waits, in KiB.
    waiting: Arc<Semaphore>,
    /// Connections to next peers.
    links: Arc<Semaphore>,
}

/// A stream that counts against the limits.
pub(super) struct StreamPlace {
    pub peer: PeerId,
    /// What waits of the peer's, in KiB.
    pub waiting: Arc<Semaphore>,
    /// Connections to next peers that the peer may still cause.
    pub links: Arc<Semaphore>,
    accounts: Arc<Mutex<HashMap<PeerId, Account>>>,
}

impl StreamPlaces {
    /// `None` if the peer has too many streams, or all together have.
    pub fn take(&self, peer: PeerId) -> Option<StreamPlace> {
        let mut accounts = lock(&self.0);
        accounts.retain(|_, account| account.is_used());
        if accounts.values().map(|account| account.streams).sum::<usize>() >= STREAMS_MAX {
            return None;
        }
        let account = accounts.entry(peer).or_default();
        if account.streams >= STREAMS_PER_PEER_MAX {
            return None;
        }
        account.streams += 1;
        let (waiting, links) = (Arc::clone(&account.waiting), Arc::clone(&account.links));
        Some(StreamPlace { peer, waiting, links, accounts: Arc::clone(&self.0) })
    }

    pub fn streams(&self) -> usize {
        lock(&self.0).values().map(|account| account.streams).sum()
    }
}

impl Account {
    /// Also when its peer has left: what it caused is still there.
    fn is_used(&self) -> bool {
        self.streams > 0
            || self.waiting.available_permits() < WAITING_KIB_PER_PEER_MAX
            || self.links.available_permits() < LINKS_PER_CLIENT_MAX
    }
}

impl Default for Account {
    fn default() -> Self {
        let [waiting, links] =
            [WAITING_KIB_PER_PEER_MAX, LINKS_PER_CLIENT_MAX].map(|max| Arc::new(Semaphore::new(max)));
        Self { streams: 0, waiting, links }
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        if let Some(account) = lock(&self.accounts).get_mut(&self.peer) {
            account.streams -= 1;
        }
    }
}

/// Memory for something that waits; `None` if there is not enough.
pub(super) fn reserve(budgets: [&Arc<Semaphore>; 2], bytes: usize) -> Option<WaitingPermits> {
    let kib = u32::try_from(bytes.div_ceil(1024)).ok()?;
    let take = |budget: &Arc<Semaphore>| Arc::clone(budget).try_acquire_many_owned(kib).ok();
    let [all, own] = budgets;
    Some([Some(take(all)?), Some(take(own)?)])
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: usize) -> PeerId {
        PeerId::new(&number.to_le_bytes()).unwrap()
    }

    #[test]
    fn a_peer_that_comes_again_has_what_is_left_of_its_limits() {
        let places = StreamPlaces::default();
        let place = places.take(peer(1)).unwrap();
        let all = Arc::new(Semaphore::new(1 << 20));
        let held = reserve([&all, &place.waiting], 100 << 10).unwrap();
        drop(place);
        assert_eq!(places.streams(), 0);
        let again = places.take(peer(1)).unwrap();
        assert_eq!(again.waiting.available_permits(), WAITING_KIB_PER_PEER_MAX - 100);
        drop(held);
        assert_eq!(again.waiting.available_permits(), WAITING_KIB_PER_PEER_MAX);
        drop(again);
        drop(places.take(peer(2)));
        assert!(!lock(&places.0).contains_key(&peer(1)), "nothing is kept of a peer that has nothing");
    }

    #[test]
    fn streams_are_limited_per_peer_and_in_all() {
        let places = StreamPlaces::default();
        let mut held = Vec::new();
        for number in 0..STREAMS_MAX / STREAMS_PER_PEER_MAX {
            held.extend((0..STREAMS_PER_PEER_MAX).map(|_| places.take(peer(number)).unwrap()));
            assert!(places.take(peer(number)).is_none());
        }
        assert!(places.take(peer(STREAMS_MAX)).is_none());
        held.pop();
        assert!(places.take(peer(STREAMS_MAX)).is_some());
    }

    #[test]
    fn one_peer_cannot_reserve_what_others_need() {
        let all = Arc::new(Semaphore::new(super::super::WAITING_KIB_MAX));
        let places = StreamPlaces::default();
        let place = places.take(peer(1)).unwrap();
        let held: Vec<_> = std::iter::from_fn(|| reserve([&all, &place.waiting], 16 << 20)).collect();
        assert_eq!(held.len(), WAITING_KIB_PER_PEER_MAX >> 14);
        let other = places.take(peer(2)).unwrap();
        assert!(reserve([&all, &other.waiting], 16 << 20).is_some());
    }
}
