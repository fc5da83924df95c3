//! `StepDeadline`: how long a step may take before a stage counts as hung, from the steps before it.

use std::time::Duration;

use super::times::StepTimes;

/// A step is hung when each of its rows has taken so many times as long as a row ever took in this chain,
const FACTOR: f64 = 20.0;
/// but not before this time.
const MIN: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub(super) struct StepDeadline {
    /// For the first step, and the limit for all others.
    max: Duration,
    /// The longest time of a row, in seconds; `None` before the first step.
    slowest_row_s: Option<f64>,
}

impl StepDeadline {
    pub fn new(max: Duration) -> Self {
        Self { max, slowest_row_s: None }
    }

    /// Another chain begins.
    pub fn restart(&mut self) {
        self.slowest_row_s = None;
    }

    pub fn record(&mut self, step: &StepTimes<'_>) {
        let row_s = step.whole.as_secs_f64() / step.rows.max(1) as f64;
        self.slowest_row_s = Some(self.slowest_row_s.map_or(row_s, |slowest| slowest.max(row_s)));
    }

    /// For a step of so many rows.
    pub fn of(&self, rows: usize) -> Duration {
        let Some(slowest) = self.slowest_row_s else { return self.max };
        let hung = Duration::try_from_secs_f64(FACTOR * slowest * rows as f64).unwrap_or(Duration::MAX);
        hung.max(MIN).min(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_follows_the_slowest_row_within_its_limits() {
        let mut deadline = StepDeadline::new(Duration::from_secs(120));
        let mut check = |seconds: f64, rows: usize, of: usize, expected: u64| {
            let whole = Duration::from_secs_f64(seconds);
            deadline.record(&StepTimes { compute_us: &[], whole, rows, state_rows: 1 });
            assert_eq!(deadline.of(of), Duration::from_secs(expected), "{seconds} s for {rows} rows");
        };
        check(0.05, 1, 1, 10);
        check(2.0, 1, 1, 40);
        check(1.0, 100, 2, 80);
        check(1.0, 1, 512, 120);
        check(1e15, 1, usize::MAX, 120);
        deadline.restart();
        assert_eq!(deadline.of(1), Duration::from_secs(120), "the first step loads what it needs");
    }
}
