//! `BlockStats`: what a block does, for people, for its announcement and for metrics.

use std::time::Duration;

use chains::MeanTime;

/// The part of a new step in a running mean.
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
    pub step: MeanTime,
    /// How long rows wait for a step.
    pub queue: MeanTime,
    /// Running mean of the entries of a step.
    pub batch: f64,
}

impl BlockStats {
    pub(super) fn record(&mut self, step: Duration, queued: Duration, entries: usize, rows: usize) {
        let entries = entries as f64;
        self.batch = if self.steps == 0 { entries } else { self.batch + WEIGHT * (entries - self.batch) };
        self.step.add(step);
        self.queue.add(queued);
        self.steps += 1;
        self.rows += rows as u64;
    }
}
