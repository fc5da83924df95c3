//! `LogLimit`: keeps events that strangers can cause at will from filling the log.

use std::time::{Duration, Instant};

/// The time between two lines.
const INTERVAL: Duration = Duration::from_secs(60);

/// Counts events of one kind, and says which of them to log.
#[derive(Debug, Default)]
pub struct LogLimit {
    logged_at: Option<Instant>,
    count: u64,
}

impl LogLimit {
    /// Counts an event at `now`. Returns the number of events since the last line if this one is to be logged.
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
    fn the_first_event_is_logged_and_then_their_number() {
        let (mut limit, begun) = (LogLimit::default(), Instant::now());
        assert_eq!(limit.count(begun), Some(1));
        assert_eq!((limit.count(begun), limit.count(begun + INTERVAL / 2)), (None, None));
        assert_eq!(limit.count(begun + INTERVAL), Some(3));
        assert_eq!(limit.count(begun + INTERVAL), None);
    }
}
