//! `AvoidedPeers`: the peers that a session does not use for a while, because of what they did to it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use chains::{Blame, BlamePolicy, Verdict};
use directory::PeerId;

/// How long peers are avoided that said that they are busy.
const BUSY: Duration = Duration::from_secs(10);
/// A peer that failed once is not used for 0.8 seconds, and only if there is no other for ten; with every further failure longer.
const FAILURES: BlamePolicy =
    BlamePolicy { half_life_ms: 5000, last_choice_at: 0.25, avoided_at: 0.9, points_max: 4.0 };
/// After so many failures of peers to which a peer passed rows on, the client carries its rows.
pub(super) const FAILED_FEEDS_MAX: usize = 2;
/// It may pass rows on again after half a minute to a minute and a half.
const FEEDS: BlamePolicy = BlamePolicy { half_life_ms: 60_000, last_choice_at: 1.5, avoided_at: 1.5, points_max: 4.0 };

pub(super) struct AvoidedPeers {
    begun: Instant,
    /// Never used: those that a check is about.
    excluded: HashSet<PeerId>,
    failed: HashMap<PeerId, Blame>,
    /// They said that they are loading their weights, or have no room. They are used if there are no others.
    busy: HashMap<PeerId, Instant>,
    /// How often they passed rows on to a peer that then failed. What they return to the client may be something else.
    failed_feeds: HashMap<PeerId, Blame>,
}

impl AvoidedPeers {
    pub fn new(excluded: HashSet<PeerId>) -> Self {
        let (failed, failed_feeds) = (HashMap::new(), HashMap::new());
        Self { begun: Instant::now(), excluded, failed, busy: HashMap::new(), failed_feeds }
    }

    pub fn add(&mut self, peer: PeerId, now: Instant) {
        let now = self.ms(now);
        let blame = self.failed.entry(peer).or_default();
        *blame = FAILURES.add(*blame, 1.0, now);
    }

    pub fn add_busy(&mut self, peer: PeerId, now: Instant) {
        self.busy.insert(peer, now);
    }

    pub fn add_failed_feeds(&mut self, peer: PeerId, count: usize, now: Instant) {
        let now = self.ms(now);
        let blame = self.failed_feeds.entry(peer).or_default();
        *blame = FEEDS.add(*blame, count as f64, now);
    }

    /// Whether a peer may pass rows on.
    pub fn may_feed(&self, peer: &PeerId, now: Instant) -> bool {
        self.failed_feeds.get(peer).is_none_or(|blame| FEEDS.verdict(*blame, self.ms(now)) != Verdict::Avoid)
    }

    /// The peers that are not to be used; and those of them that are not even if there are no others.
    pub fn at(&mut self, now: Instant) -> [HashSet<PeerId>; 2] {
        let ms = self.ms(now);
        self.failed.retain(|_, blame| FAILURES.verdict(*blame, ms) != Verdict::Use);
        self.busy.retain(|_, since| now.saturating_duration_since(*since) < BUSY);
        let mut always = self.excluded.clone();
        let avoided = self.failed.iter().filter(|(_, blame)| FAILURES.verdict(**blame, ms) == Verdict::Avoid);
        always.extend(avoided.map(|(peer, _)| *peer));
        let mut all = always.clone();
        all.extend(self.failed.keys().chain(self.busy.keys()));
        [all, always]
    }

    fn ms(&self, now: Instant) -> u64 {
        u64::try_from(now.saturating_duration_since(self.begun).as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn peer(number: u8) -> PeerId {
        PeerId::new(&[number]).unwrap()
    }

    #[test]
    fn a_peer_that_failed_is_tried_again_soon_if_it_is_the_only_one() {
        let mut avoided = AvoidedPeers::new(HashSet::from([peer(9)]));
        let start = avoided.begun;
        avoided.add(peer(1), start);
        avoided.add_busy(peer(2), start);
        let sets = |avoided: &mut AvoidedPeers, after: u32| avoided.at(start + after * SECOND).map(|peers| peers.len());
        assert_eq!(sets(&mut avoided, 0), [3, 2]);
        assert_eq!(sets(&mut avoided, 1), [3, 1], "only those that were excluded are never used");
        assert_eq!(sets(&mut avoided, 11), [1, 1], "everything is forgiven");
        (0..100).for_each(|_| avoided.add(peer(1), start + 11 * SECOND));
        assert_eq!(sets(&mut avoided, 16), [2, 2]);
        assert_eq!(sets(&mut avoided, 22), [2, 1]);
        assert_eq!(sets(&mut avoided, 40), [1, 1]);
    }

    /// The verdict on a pair of peers does not last for as long as a session does.
    #[test]
    fn a_peer_may_pass_rows_on_again_after_a_while() {
        let mut avoided = AvoidedPeers::new(HashSet::new());
        let start = avoided.begun;
        avoided.add_failed_feeds(peer(1), 1, start);
        assert!(avoided.may_feed(&peer(1), start));
        avoided.add_failed_feeds(peer(1), 1, start + SECOND);
        assert!(!avoided.may_feed(&peer(1), start + SECOND));
        assert!(avoided.may_feed(&peer(1), start + 60 * SECOND));
        avoided.add_failed_feeds(peer(2), FAILED_FEEDS_MAX, start);
        assert!(!avoided.may_feed(&peer(2), start));
    }
}
