//! `AvoidedPeers`: the peers that a session does not use for a while, because of what they did to it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use swarm::PeerId;

/// For so long.
const AVOIDED: Duration = Duration::from_secs(10);
/// After so many failures of peers to which a peer passed rows on, the client carries its rows.
pub(super) const FAILED_FEEDS_MAX: usize = 2;

#[derive(Default)]
pub(super) struct AvoidedPeers {
    /// Never used: those that a check is about.
    excluded: HashSet<PeerId>,
    failed: HashMap<PeerId, Instant>,
    /// They said that they are loading their weights, or have no room. They are used if there are no others.
    busy: HashMap<PeerId, Instant>,
    /// How often they passed rows on to a peer that then failed. What they return to the client may be something else.
    failed_feeds: HashMap<PeerId, usize>,
}

impl AvoidedPeers {
    pub fn new(excluded: HashSet<PeerId>) -> Self {
        Self { excluded, ..Self::default() }
    }

    pub fn add(&mut self, peer: PeerId) {
        self.failed.insert(peer, Instant::now());
    }

    pub fn add_busy(&mut self, peer: PeerId) {
        self.busy.insert(peer, Instant::now());
    }

    pub fn add_failed_feeds(&mut self, peer: PeerId, count: usize) {
        *self.failed_feeds.entry(peer).or_default() += count;
    }

    /// Whether a peer may pass rows on.
    pub fn may_feed(&self, peer: &PeerId) -> bool {
        self.failed_feeds.get(peer).is_none_or(|count| *count < FAILED_FEEDS_MAX)
    }

    /// The peers that are not to be used; and those of them that are not even if there are no others.
    pub fn now(&mut self) -> [HashSet<PeerId>; 2] {
        for peers in [&mut self.failed, &mut self.busy] {
            peers.retain(|_, since| since.elapsed() < AVOIDED);
        }
        let mut always = self.excluded.clone();
        always.extend(self.failed.keys());
        let mut all = always.clone();
        all.extend(self.busy.keys());
        [all, always]
    }
}
