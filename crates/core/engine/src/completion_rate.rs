//! `CompletionRate`: how often requests end, as a mean over the recent time in which the engine was busy.

use std::time::{Duration, Instant};

/// Requests that are counted at most; then the older half is dropped.
const COUNT_MAX: u32 = 64;

#[derive(Clone, Copy, Debug)]
pub(crate) struct CompletionRate {
    since: Instant,
    completed: u32,
}

impl CompletionRate {
    pub fn new(now: Instant) -> Self {
        Self { since: now, completed: 0 }
    }

    /// A request has ended.
    pub fn count(&mut self, now: Instant) {
        self.completed += 1;
        if self.completed == COUNT_MAX {
            self.completed /= 2;
            self.since += now.saturating_duration_since(self.since) / 2;
        }
    }

    /// The mean time between the ends of two requests. Before the first end it is the time that has passed.
    pub fn interval(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since) / self.completed.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_a_change_of_rate() {
        let start = Instant::now();
        let mut rate = CompletionRate::new(start);
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(rate.interval(at(700)), Duration::from_millis(700));
        for end in 1..=1000 {
            rate.count(at(10 * end));
        }
        let interval = rate.interval(at(10_000)).as_millis();
        assert!((9..=11).contains(&interval), "{interval}");
        for end in 1..=1000 {
            rate.count(at(10_000 + 100 * end));
        }
        let interval = rate.interval(at(110_000)).as_millis();
        assert!((99..=101).contains(&interval), "{interval}");
    }
}
