//! `Standing`: what a coordinator holds against a node, or against the way between two: when it is tried again, and when it is
//! left out for a while. Time is passed in, nothing else is looked at.
//!
//! Everything is forgotten, by halves: what happens rarely has no consequence, what happens again and again adds up. Chains that
//! a node has cost count also if others were formed in between. No verdict is final: whatever is wrong may be mended.

use std::time::{Duration, Instant};

use chains::{Blame, BlamePolicy};

/// A node that is announced again may have been restarted: it is tried after this time, if its time has not come before.
const FOUND_AGAIN: Duration = Duration::from_secs(2);
/// A pause doubles so often at most.
const DOUBLINGS_MAX: f64 = 16.0;
/// So many chains may be lost because of a node before it is left out, if half of that is not forgotten by then.
const BLAMES_MAX: f64 = 1.5;
const BLAMES: BlamePolicy = counting(Duration::from_secs(300));
const BLAME_PAUSE: Duration = Duration::from_secs(20);
const BLAME_PAUSE_MAX: Duration = Duration::from_secs(300);

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It cannot be reached, has left, or could not do its part.
    Away,
    /// It is of another cluster: it has another key.
    OtherKey,
    /// It does not understand this machine: another version, or another program.
    OtherProtocol,
    /// One node cannot connect to another.
    NoPath,
}

impl Failure {
    /// The first pause and the longest.
    fn pauses(self) -> [Duration; 2] {
        match self {
            Self::Away => [Duration::from_millis(500), Duration::from_secs(30)],
            Self::OtherKey | Self::OtherProtocol => [Duration::from_secs(15), Duration::from_secs(600)],
            Self::NoPath => [Duration::from_secs(15), Duration::from_secs(600)],
        }
    }

    fn policy(self) -> BlamePolicy {
        counting(10 * self.pauses()[1])
    }
}

/// Counts, for pauses that grow with the count.
const fn counting(half_life: Duration) -> BlamePolicy {
    let half_life_ms = half_life.as_millis() as u64;
    BlamePolicy { half_life_ms, last_choice_at: BLAMES_MAX, avoided_at: BLAMES_MAX, points_max: f64::MAX }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    failures: Blame,
    failed_at: Option<Instant>,
    blames: Blame,
    /// When the first of all was counted: times are counted from there.
    began_at: Option<Instant>,
    /// When it may be used again.
    left_out_until: Option<Instant>,
}

impl Standing {
    /// It has failed. Returns when it is to be tried again.
    pub fn failed(&mut self, failure: Failure, now: Instant) -> Instant {
        let [first, longest] = failure.pauses();
        let (policy, now_ms) = (failure.policy(), self.ms(now));
        self.failures = policy.add(self.failures, 1.0, now_ms);
        let count = policy.points(self.failures, now_ms);
        self.failed_at = Some(now);
        let pause = first.mul_f64((count - 1.0).clamp(0.0, DOUBLINGS_MAX).exp2()).min(longest);
        self.not_before(now + pause)
    }

    /// It has done its part in forming a chain. What the chains cost that were lost because of it stays.
    pub fn succeeded(&mut self) {
        self.failures = Blame::default();
    }

    /// It was found again while it waited to be tried at `retry_at`. Returns when it is to be tried now.
    pub fn found_again(&self, retry_at: Instant) -> Instant {
        let soon = self.failed_at.map_or(retry_at, |at| at + FOUND_AGAIN);
        self.not_before(retry_at.min(soon))
    }

    /// A chain was lost, probably because of it. Returns for how long it is left out, if it is.
    pub fn blamed(&mut self, now: Instant) -> Option<Duration> {
        let now_ms = self.ms(now);
        self.blames = BLAMES.add(self.blames, 1.0, now_ms);
        let excess = BLAMES.points(self.blames, now_ms) - BLAMES_MAX;
        let pause =
            (excess > 0.0).then(|| BLAME_PAUSE.mul_f64(excess.min(DOUBLINGS_MAX).exp2()).min(BLAME_PAUSE_MAX))?;
        self.left_out_until = Some(now + pause);
        Some(pause)
    }

    /// Whether it is left out because of chains that it has cost.
    pub fn is_left_out(&self, now: Instant) -> bool {
        self.left_out_until.is_some_and(|until| until > now)
    }

    /// It is needed: nothing else is there. What it has done is not forgotten.
    pub fn pardon(&mut self) {
        self.left_out_until = None;
    }

    fn ms(&mut self, now: Instant) -> u64 {
        now.saturating_duration_since(*self.began_at.get_or_insert(now)).as_millis() as u64
    }

    fn not_before(&self, time: Instant) -> Instant {
        self.left_out_until.map_or(time, |until| until.max(time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pauses_grow_with_failures_and_shrink_with_time() {
        for failure in [Failure::Away, Failure::OtherKey, Failure::OtherProtocol, Failure::NoPath] {
            let [first, longest] = failure.pauses();
            let (start, mut standing, mut now) = (Instant::now(), Standing::default(), Instant::now());
            let mut before = Duration::ZERO;
            for _ in 0..40 {
                let pause = standing.failed(failure, now) - now;
                assert!(pause >= first && pause <= longest && pause >= before.mul_f64(0.99), "{failure:?}: {pause:?}");
                (now, before) = (now + pause, pause);
            }
            assert!(before >= longest.mul_f64(0.9), "{failure:?}: {before:?}");
            // No verdict lasts for ever.
            assert!(now < start + 40 * longest);
            let later = now + Duration::from_millis(20 * failure.policy().half_life_ms);
            assert!(standing.failed(failure, later) - later <= first.mul_f64(1.1), "{failure:?}");
        }
    }

    #[test]
    fn who_is_found_again_is_tried_soon_but_not_at_every_announcement() {
        let (now, mut standing) = (Instant::now(), Standing::default());
        let mut retry_at = now;
        for _ in 0..10 {
            retry_at = standing.failed(Failure::OtherKey, now);
        }
        assert!(retry_at > now + 100 * SECOND);
        assert_eq!(standing.found_again(retry_at), now + FOUND_AGAIN);
        assert_eq!(standing.found_again(now), now);
        // One that has cost chains is not let in earlier by announcing itself.
        while !standing.is_left_out(now) {
            let _ = standing.blamed(now);
        }
        assert!(standing.found_again(retry_at) >= now + BLAME_PAUSE);
    }

    #[test]
    fn what_a_node_costs_adds_up_over_chains_and_is_forgiven() {
        let after = |start: Instant, seconds: u32| start + seconds * SECOND;
        let (start, mut standing) = (Instant::now(), Standing::default());
        assert_eq!(standing.blamed(start), None, "once may be chance");
        // A chain every four minutes, each of which ran well for as long.
        let pause = standing.blamed(after(start, 240)).expect("it is left out");
        assert!(standing.is_left_out(after(start, 240)) && !standing.is_left_out(after(start, 240) + pause));
        let longer = standing.blamed(after(start, 300)).expect("it is left out again");
        assert!(longer > pause);
        // That it took part in another chain changes nothing, that it is needed does.
        standing.succeeded();
        assert!(standing.is_left_out(after(start, 300)));
        standing.pardon();
        assert!(!standing.is_left_out(after(start, 300)));
        // An hour later it is as if nothing had been.
        assert_eq!(standing.blamed(after(start, 3900)), None);
        // One in twenty minutes is nobody's fault.
        let mut rare = Standing::default();
        assert!((0..50).all(|time| rare.blamed(after(start, 1200 * time)).is_none()));
    }
}
