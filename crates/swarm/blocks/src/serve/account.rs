//! `StreamPlaces`: what each client and peer uses of this server, within limits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use directory::PeerId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::push::LINKS_PER_CLIENT_MAX;
use super::{READING_KIB_PER_PEER_MAX, WAITING_KIB_PER_PEER_MAX};

/// Streams of all clients and peers.
pub const STREAMS_MAX: usize = 1024;
/// Streams of one client or peer.
pub const STREAMS_PER_PEER_MAX: usize = 8;

/// Frames of this size are read at once, and their memory is kept for the next ones.
pub(super) const SMALL_FRAME_BYTES: usize = 64 << 10;

/// Memory for something that waits: a part of what all have, and a part of what the one who sent it has.
pub(super) type WaitingPermits = [Option<OwnedSemaphorePermit>; 2];

#[derive(Default)]
pub(super) struct StreamPlaces(Arc<Mutex<HashMap<PeerId, Account>>>);

struct Account {
    streams: usize,
    /// What waits, in KiB.
    waiting: Arc<Semaphore>,
    /// What is being read, in KiB.
    reading: Arc<Semaphore>,
    /// Connections to next peers.
    links: Arc<Semaphore>,
}

/// A stream that counts against the limits.
pub(super) struct StreamPlace {
    pub peer: PeerId,
    /// What waits of the peer's, in KiB.
    pub waiting: Arc<Semaphore>,
    /// What is being read of the peer's, in KiB.
    reading: Arc<Semaphore>,
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
        let [waiting, reading, links] = [&account.waiting, &account.reading, &account.links].map(Arc::clone);
        Some(StreamPlace { peer, waiting, reading, links, accounts: Arc::clone(&self.0) })
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
        let [waiting, reading, links] = [WAITING_KIB_PER_PEER_MAX, READING_KIB_PER_PEER_MAX, LINKS_PER_CLIENT_MAX]
            .map(|max| Arc::new(Semaphore::new(max)));
        Self { streams: 0, waiting, reading, links }
    }
}

impl StreamPlace {
    /// Waits until a frame with so many bytes may be read; what is small needs no permission. `all`: what all read, in KiB. The
    /// caller limits the wait, and keeps the permits while it has the frame.
    pub async fn read(&self, all: &Arc<Semaphore>, bytes: usize) -> WaitingPermits {
        if bytes <= SMALL_FRAME_BYTES {
            return [None, None];
        }
        // A frame that is longer than all of the peer's memory is read alone.
        let kib = bytes.div_ceil(1024).min(READING_KIB_PER_PEER_MAX) as u32;
        // The peer's own first: while it waits for these, others are not kept waiting.
        let own = Arc::clone(&self.reading).acquire_many_owned(kib).await.ok();
        [Arc::clone(all).acquire_many_owned(kib).await.ok(), own]
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

    #[tokio::test]
    async fn a_peer_reads_large_frames_within_its_part() {
        let all = Arc::new(Semaphore::new(super::super::READING_KIB_MAX));
        let places = StreamPlaces::default();
        let [place, same] = [(); 2].map(|()| places.take(peer(1)).unwrap());
        let other = places.take(peer(2)).unwrap();
        let large = place.read(&all, READING_KIB_PER_PEER_MAX << 11).await;
        let mut next = std::pin::pin!(same.read(&all, SMALL_FRAME_BYTES + 1));
        let is_waiting = tokio::select! { biased; _ = &mut next => false, () = std::future::ready(()) => true };
        assert!(is_waiting, "the peer's other streams wait for its part");
        assert!(same.read(&all, SMALL_FRAME_BYTES).await.iter().all(Option::is_none), "small frames do not");
        assert!(other.read(&all, SMALL_FRAME_BYTES + 1).await.iter().all(Option::is_some));
        drop(large);
        assert!(next.await.iter().all(Option::is_some));
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
