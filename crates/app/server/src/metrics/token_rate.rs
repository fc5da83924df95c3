//! `TokenRate`: how many tokens per second are generated now, and how many one answer gets.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The time over which tokens are counted, as slots.
const SLOTS: usize = 12;
const SLOT: Duration = Duration::from_millis(250);
/// A rate is taken over at least this time, so that the first tokens of an answer do not look like thousands per second.
const SPAN_MIN: Duration = Duration::from_secs(1);
/// The part of a new time between tokens in its running mean.
const WEIGHT: f64 = 0.05;

/// Tokens per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenRates {
    /// Of all requests together, over the last seconds.
    pub all: f64,
    /// Of one answer, as a running mean over the latest tokens.
    pub answer: Option<f64>,
}

/// Clones share their values.
#[derive(Clone)]
pub struct TokenRate {
    started: Instant,
    window: Arc<Mutex<Window>>,
}

/// Times are since the start.
#[derive(Default)]
struct Window {
    /// Tokens in each slot of time; slot `n` is at `n % SLOTS`.
    counts: [u64; SLOTS],
    /// The latest slot that was counted.
    latest: u64,
    between_s: Option<f64>,
}

impl TokenRate {
    pub fn new() -> Self {
        Self { started: Instant::now(), window: Arc::default() }
    }

    /// A token was generated, `between` after the one before it of the same answer.
    pub fn record(&self, between: Option<Duration>) {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        window.count(self.started.elapsed());
        if let Some(between) = between {
            window.add_between(between);
        }
    }

    pub fn get(&self) -> TokenRates {
        let mut window = self.window.lock().unwrap_or_else(PoisonError::into_inner);
        TokenRates {
            all: window.rate(self.started.elapsed()),
            answer: window.between_s.filter(|&mean| mean > 0.0).map(|mean| 1.0 / mean),
        }
    }
}

impl Window {
    fn count(&mut self, now: Duration) {
        let slot = self.advance(now);
        self.counts[slot] += 1;
    }

    fn add_between(&mut self, between: Duration) {
        let value = between.as_secs_f64();
        self.between_s = Some(self.between_s.map_or(value, |mean| mean + WEIGHT * (value - mean)));
    }

    /// Tokens per second since the first slot with a token.
    fn rate(&mut self, now: Duration) -> f64 {
        self.advance(now);
        let first = self.latest.saturating_sub(SLOTS as u64 - 1);
        let Some(first) = (first..=self.latest).find(|slot| self.counts[index(*slot)] > 0) else { return 0.0 };
        let begun = SLOT * u32::try_from(first).unwrap_or(u32::MAX);
        let tokens: u64 = self.counts.iter().sum();
        tokens as f64 / now.saturating_sub(begun).max(SPAN_MIN).as_secs_f64()
    }

    /// Empties the slots since the latest one. Returns the index of the current one.
    fn advance(&mut self, now: Duration) -> usize {
        let current = (now.as_millis() / SLOT.as_millis()) as u64;
        let passed = current.saturating_sub(self.latest).min(SLOTS as u64);
        (0..passed).for_each(|back| self.counts[index(current - back)] = 0);
        self.latest = self.latest.max(current);
        index(self.latest)
    }
}

fn index(slot: u64) -> usize {
    (slot % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let mut window = Window::default();
        assert_eq!(window.rate(ms(700)), 0.0);
        // A token every 100 ms for ten seconds.
        (0..100).for_each(|token| window.count(ms(20_000 + token * 100)));
        let rate = window.rate(ms(29_990));
        assert!((rate - 10.0).abs() < 0.5, "{rate}");
        let fading = window.rate(ms(31_500));
        assert!(fading > 0.0 && fading < rate, "{fading}");
        assert_eq!(window.rate(ms(33_100)), 0.0, "nothing was generated for a while");
        window.count(ms(50_000));
        assert_eq!(window.rate(ms(50_001)), 1.0, "one token is no thousand per second");
    }

    #[test]
    fn time_that_seems_to_go_back_counts_as_now() {
        let mut window = Window::default();
        window.count(ms(10_000));
        window.count(ms(2_000));
        assert_eq!(window.rate(ms(10_100)), 2.0);
    }

    #[test]
    fn an_answer_has_the_rate_of_its_tokens() {
        let mut window = Window::default();
        (0..200).for_each(|_| window.add_between(ms(20)));
        assert!((window.between_s.unwrap() - 0.02).abs() < 1e-9);
        (0..200).for_each(|_| window.add_between(ms(40)));
        assert!((window.between_s.unwrap() - 0.04).abs() < 1e-3, "it follows");
    }
}
