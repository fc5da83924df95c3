//! `ConnectionTable`: the open connections of a listener, and the order in which they are evicted. It has one entry for each
//! connection, and one for each of their addresses.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::Instant;

/// The part of a request that is counted.
#[derive(Clone, Copy)]
pub(super) enum RequestPart {
    Body,
    Answer,
}

/// What a connection does. Earlier phases are evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Idle,
    /// The bodies of all its requests are still being received.
    Receiving,
    Answering,
}

/// The owner of a share. One host commonly has a whole /64 network of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    V4(Ipv4Addr),
    V6([u16; 4]),
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Self::V6([a, b, c, d])
            }
        }
    }
}

/// Connections that may be evicted, in the order in which they are.
type Evictable = BTreeMap<(Phase, u64), u64>;

#[derive(Default)]
pub(super) struct ConnectionTable {
    open: HashMap<u64, Entry>,
    evictable: Evictable,
    peers: HashMap<Peer, PeerEntry>,
    /// Connections that were told to close and are still in `open`.
    evicted: usize,
    busy: usize,
    last_id: u64,
    /// Counts changes of phase: a lower number is an earlier change.
    clock: u64,
}

struct Entry {
    peer: Peer,
    requests: usize,
    /// Requests whose bodies are still being received.
    bodies: usize,
    /// The clock at the last change of phase, and its time.
    clock: u64,
    changed_at: Instant,
    evict: Arc<Notify>,
    is_evicted: bool,
}

#[derive(Default)]
struct PeerEntry {
    /// Connections that were not told to close.
    open: usize,
    evictable: Evictable,
}

impl Entry {
    fn phase(&self) -> Phase {
        match (self.requests, self.bodies) {
            (0, _) => Phase::Idle,
            (requests, bodies) if bodies >= requests => Phase::Receiving,
            _ => Phase::Answering,
        }
    }

    fn count(&mut self, part: RequestPart) -> &mut usize {
        match part {
            RequestPart::Body => &mut self.bodies,
            RequestPart::Answer => &mut self.requests,
        }
    }
}

impl ConnectionTable {
    /// Open connections, with those that were told to close.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Open connections that were not told to close.
    pub fn remaining(&self) -> usize {
        self.open.len() - self.evicted
    }

    /// Open connections of `peer` that were not told to close.
    pub fn remaining_of(&self, peer: Peer) -> usize {
        self.peers.get(&peer).map_or(0, |of_peer| of_peer.open)
    }

    /// Connections with a request.
    pub fn busy(&self) -> usize {
        self.busy
    }

    /// Since when this connection has been without a request.
    pub fn idle_since(&self, id: u64) -> Option<Instant> {
        self.open.get(&id).filter(|entry| entry.phase() == Phase::Idle).map(|entry| entry.changed_at)
    }

    pub fn insert(&mut self, peer: Peer, evict: Arc<Notify>) -> u64 {
        self.last_id += 1;
        self.clock += 1;
        let (id, clock) = (self.last_id, self.clock);
        let entry = Entry { peer, requests: 0, bodies: 0, clock, changed_at: Instant::now(), evict, is_evicted: false };
        self.open.insert(id, entry);
        self.evictable.insert((Phase::Idle, clock), id);
        let of_peer = self.peers.entry(peer).or_default();
        of_peer.open += 1;
        of_peer.evictable.insert((Phase::Idle, clock), id);
        id
    }

    pub fn remove(&mut self, id: u64) {
        let Some(entry) = self.open.remove(&id) else { return };
        let (phase, peer) = (entry.phase(), entry.peer);
        self.busy -= usize::from(phase != Phase::Idle);
        if entry.is_evicted {
            self.evicted -= 1;
        } else {
            self.forget((phase, entry.clock), peer);
            self.leave(peer);
        }
    }

    /// Tells the first connection of the order to close. False if there is none.
    pub fn evict(&mut self, peer: Option<Peer>) -> bool {
        let order = match &peer {
            Some(peer) => self.peers.get(peer).map(|of_peer| &of_peer.evictable),
            None => Some(&self.evictable),
        };
        let Some((&key, &id)) = order.and_then(BTreeMap::first_key_value) else { return false };
        let Some(entry) = self.open.get_mut(&id) else { return false };
        entry.is_evicted = true;
        entry.evict.notify_one();
        let peer = entry.peer;
        self.evicted += 1;
        self.forget(key, peer);
        self.leave(peer);
        true
    }

    /// A part of a request of this connection has begun.
    pub fn begin(&mut self, id: u64, part: RequestPart) {
        self.update(id, |entry| *entry.count(part) += 1);
    }

    /// A part that had begun has ended. Returns whether the connection has become idle.
    pub fn end(&mut self, id: u64, part: RequestPart) -> bool {
        self.update(id, |entry| *entry.count(part) -= 1)
    }

    /// Changes the counts of a connection, and its place in the order. Returns whether it has become idle.
    fn update(&mut self, id: u64, change: impl FnOnce(&mut Entry)) -> bool {
        // A request may end after its connection.
        let Some(entry) = self.open.get_mut(&id) else { return false };
        let before = (entry.phase(), entry.clock);
        change(entry);
        let phase = entry.phase();
        if phase == before.0 {
            return false;
        }
        self.clock += 1;
        (entry.clock, entry.changed_at) = (self.clock, Instant::now());
        let (peer, is_evicted, after) = (entry.peer, entry.is_evicted, (phase, entry.clock));
        self.busy = self.busy + usize::from(before.0 == Phase::Idle) - usize::from(phase == Phase::Idle);
        if !is_evicted {
            self.forget(before, peer);
            if phase != Phase::Answering {
                self.evictable.insert(after, id);
                self.peers.entry(peer).or_default().evictable.insert(after, id);
            }
        }
        phase == Phase::Idle
    }

    /// Whether nothing is left of any connection.
    #[cfg(test)]
    pub fn is_clear(&self) -> bool {
        let counts = (self.busy, self.evicted, self.open.len(), self.evictable.len(), self.peers.len());
        counts == (0, 0, 0, 0, 0)
    }

    fn forget(&mut self, key: (Phase, u64), peer: Peer) {
        self.evictable.remove(&key);
        if let Some(of_peer) = self.peers.get_mut(&peer) {
            of_peer.evictable.remove(&key);
        }
    }

    fn leave(&mut self, peer: Peer) {
        if let Some(of_peer) = self.peers.get_mut(&peer) {
            of_peer.open -= 1;
            if of_peer.open == 0 {
                self.peers.remove(&peer);
            }
        }
    }
}
