//! `BlockStats`: what a block does, for people, for its announcement and for metrics.

use std::time::Duration;

/// The part of a new measurement in a running mean.
const WEIGHT: f64 = 0.1;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockStats {
    /// The block lost a process or a machine, and opens no session until it is rebuilt.
    pub is_rebuilding: bool,
    /// How often it was rebuilt.
    pub rebuilds: u64,
    pub sessions: usize,
    pub clients: usize,
    /// Tokens that can still be reserved.
    pub tokens_free: usize,
    pub steps: u64,
    pub rows: u64,
    /// Runs that were answered with an error.
    pub failures: u64,
    /// Running means of steps, in seconds: of a step, and of the time that rows wait for one.
    pub step_s: f64,
    pub queue_s: f64,
    /// Sums of the same.
    pub step_total_s: f64,
    pub queue_total_s: f64,
    /// Entries of a step.
    pub batch: f64,
}

impl BlockStats {
    pub(super) fn record(&mut self, step: Duration, queued: Duration, entries: usize, rows: usize) {
        let is_first = self.steps == 0;
        for (mean, value) in [
            (&mut self.step_s, step.as_secs_f64()),
            (&mut self.queue_s, queued.as_secs_f64()),
            (&mut self.batch, entries as f64),
        ] {
            *mean = if is_first { value } else { *mean + WEIGHT * (value - *mean) };
        }
        self.step_total_s += step.as_secs_f64();
        self.queue_total_s += queued.as_secs_f64();
        self.steps += 1;
        self.rows += rows as u64;
    }
}
