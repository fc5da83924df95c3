//! `RefusalLog`: which refused callers are logged, so that strangers cannot fill the log.

use std::time::{Duration, Instant};

/// The time between two lines.
const INTERVAL: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct RefusalLog {
    logged_at: Option<Instant>,
    count: u64,
}

impl RefusalLog {
    /// Counts a refusal at `now`. Returns the number of refusals since the last line if this one is to be logged.
    pub fn count(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        if self.logged_at.is_some_and(|logged_at| now.saturating_duration_since(logged_at) < INTERVAL) {
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_caller_is_logged_and_then_their_number() {
        let (mut log, begun) = (RefusalLog::default(), Instant::now());
        assert_eq!(log.count(begun), Some(1));
        assert_eq!((log.count(begun), log.count(begun + INTERVAL / 2)), (None, None));
        assert_eq!(log.count(begun + INTERVAL), Some(3));
        assert_eq!(log.count(begun + INTERVAL), None);
    }
}
