//! `PrefillCost`: how long prefill rows take, as measured in the last steps that had some.
//!
//! The whole time of a step counts as the time of its prefill rows, so their number settles where the step takes the time
//! that it may take, whatever else it runs. A row takes longer the further behind it is in its sequence, because attention
//! reads all tokens before it. Costs are averaged over few steps, which follows a prompt through its positions.

use std::time::Duration;

/// The rows of a step before anything is known.
const ROWS_FIRST: usize = 64;

/// The fewest rows of a step, however long they take: fewer would hardly shorten a step, because it reads all weights.
const ROWS_MIN: usize = 16;

/// Up to this position attention takes less time than the rest of a row, in any model of the usual proportions.
const ATTENTION_POSITIONS: f64 = 1024.0;

/// A step that took more than this many times the expected time counts as no more: the machine was busy with something else.
const OUTLIER: f64 = 4.0;

/// The prefill rows of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PrefillRows {
    pub rows: usize,
    /// The sum of their positions.
    pub positions: usize,
}

impl PrefillRows {
    /// Adds `rows` rows of one sequence, from `position` on.
    pub fn add(&mut self, position: usize, rows: usize) {
        self.rows += rows;
        self.positions += rows * position + rows * rows.saturating_sub(1) / 2;
    }
}

/// Sums over the steps so far. Each step halves the weight of those before it.
#[derive(Default)]
pub(crate) struct PrefillCost {
    seconds: f64,
    rows: f64,
    positions: f64,
}

impl PrefillCost {
    /// A step with these prefill rows took `elapsed`.
    pub fn record(&mut self, step: PrefillRows, elapsed: Duration) {
        if step.rows == 0 {
            return;
        }
        let (rows, positions) = (step.rows as f64, step.positions as f64);
        let mut seconds = elapsed.as_secs_f64();
        // Steps of no time say nothing about how long one may take.
        if let Some(row_seconds) = self.row_seconds(positions / rows).filter(|&row_seconds| row_seconds > 0.0) {
            seconds = seconds.min(OUTLIER * row_seconds * rows);
        }
        self.seconds = self.seconds / 2.0 + seconds;
        self.rows = self.rows / 2.0 + rows;
        self.positions = self.positions / 2.0 + positions;
    }

    /// How many rows, from `position` on, a step can run within `limit`.
    pub fn rows_within(&self, limit: Duration, position: usize) -> usize {
        match self.row_seconds(position as f64) {
            None => ROWS_FIRST,
            // A conversion from float saturates.
            Some(row_seconds) => ((limit.as_secs_f64() / row_seconds) as usize).max(ROWS_MIN),
        }
    }

    /// The time of a row at `position`. Beyond the positions that were measured it grows in proportion to the tokens that
    /// attention reads; before them it is taken to be the same, which it is at most.
    fn row_seconds(&self, position: f64) -> Option<f64> {
        let measured = (self.rows > 0.0).then(|| self.positions / self.rows)?;
        let growth = (position + ATTENTION_POSITIONS) / (measured + ATTENTION_POSITIONS);
        Some(self.seconds / self.rows * growth.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);

    fn rows(position: usize, rows: usize) -> PrefillRows {
        let mut step = PrefillRows::default();
        step.add(position, rows);
        step
    }

    #[test]
    fn positions_are_those_of_each_row() {
        let mut step = rows(10, 3);
        step.add(100, 2);
        assert_eq!(step, PrefillRows { rows: 5, positions: 10 + 11 + 12 + 100 + 101 });
    }

    #[test]
    fn nothing_is_known_before_the_first_step_with_prefill() {
        let mut cost = PrefillCost::default();
        cost.record(PrefillRows::default(), Duration::from_secs(1));
        assert_eq!(cost.rows_within(LIMIT, 0), ROWS_FIRST);
        cost.record(rows(0, 100), Duration::from_millis(100));
        assert_eq!(cost.rows_within(LIMIT, 0), 200);
    }

    #[test]
    fn a_busy_moment_of_the_machine_is_soon_forgotten() {
        let mut cost = PrefillCost::default();
        let mut run = |extra: Duration| {
            let count = cost.rows_within(LIMIT, 0);
            cost.record(rows(0, count), Duration::from_millis(count as u64) + extra);
            count
        };
        for _ in 0..8 {
            run(Duration::ZERO);
        }
        assert_eq!(run(Duration::from_secs(5)), 200);
        assert!(run(Duration::ZERO) > 50);
        for _ in 0..8 {
            run(Duration::ZERO);
        }
        assert!(run(Duration::ZERO) > 190);
    }

    #[test]
    fn a_step_of_no_time_allows_any_number_of_rows_until_one_takes_time() {
        let mut cost = PrefillCost::default();
        cost.record(rows(0, 64), Duration::ZERO);
        assert_eq!(cost.rows_within(LIMIT, 0), usize::MAX);
        cost.record(rows(0, 64), Duration::from_millis(64));
        assert!((299..=300).contains(&cost.rows_within(LIMIT, 0)));
    }
}
