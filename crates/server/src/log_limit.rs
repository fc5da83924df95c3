//! `LogLimit`: keeps events that strangers can cause at will from filling the log.

use std::time::Duration;

use tokio::time::Instant;

/// The time between two lines.
const INTERVAL: Duration = Duration::from_secs(60);

/// Counts events of one kind, and says which of them to log.
#[derive(Debug, Default)]
pub struct LogLimit {
    logged_at: Option<Instant>,
    count: u64,
}

impl LogLimit {
    /// Counts an event. Returns the number of events since the last line if this one is to be logged.
    pub fn count(&mut self) -> Option<u64> {
        self.count += 1;
        if self.logged_at.is_some_and(|logged_at| logged_at.elapsed() < INTERVAL) {
            return None;
        }
        self.logged_at = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_event_is_logged_and_then_their_number() {
        let mut limit = LogLimit::default();
        assert_eq!(limit.count(), Some(1));
        assert_eq!((limit.count(), limit.count()), (None, None));
        tokio::time::advance(INTERVAL).await;
        assert_eq!(limit.count(), Some(3));
        assert_eq!(limit.count(), None);
    }
}
