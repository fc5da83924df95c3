//! `Pace`: how often a request ends, as a plain mean over the time that the loop has been busy of late.

use std::time::{Duration, Instant};

/// Ends that are remembered; beyond them the older half is forgotten.
const ENDS_MAX: u32 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    since: Instant,
    ended: u32,
}

impl Pace {
    pub fn new(now: Instant) -> Self {
        Self { since: now, ended: 0 }
    }

    pub fn count(&mut self, now: Instant) {
        self.ended += 1;
        if self.ended == ENDS_MAX {
            self.ended /= 2;
            self.since += now.saturating_duration_since(self.since) / 2;
        }
    }

    /// The time between two ends. Before the first it is at least as long as what has passed.
    pub fn interval(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since) / self.ended.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_a_change_of_pace() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(pace.interval(at(700)), Duration::from_millis(700));
        for end in 1..=1000 {
            pace.count(at(10 * end));
        }
        let interval = pace.interval(at(10_000)).as_millis();
        assert!((9..=11).contains(&interval), "{interval}");
        for end in 1..=1000 {
            pace.count(at(10_000 + 100 * end));
        }
        let interval = pace.interval(at(110_000)).as_millis();
        assert!((99..=101).contains(&interval), "{interval}");
    }
}
