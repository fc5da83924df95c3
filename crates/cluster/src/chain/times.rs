//! `ChainTimes`: how long steps take, in all and in each stage, for people and for the planner.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The part of a new measurement in a running mean.
const WEIGHT: f64 = 0.1;

/// Shared by the executor, which records, and whoever shows it.
#[derive(Debug, Default)]
pub struct ChainTimes(Mutex<StageTimes>);

/// The steps of one chain: running means over the latest ones, and sums over all of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTimes {
    pub steps: u64,
    pub rows: u64,
    /// Rows whose states the last stage returned.
    pub state_rows: u64,
    /// From the submission of a step to its states, in seconds.
    pub step_s: f64,
    /// Computation in each stage, the coordinator's first, in seconds.
    pub compute_s: Vec<f64>,
    /// What is left of a step: the hops and the queues before stages.
    pub between_s: f64,
    /// The sums of these over all steps.
    pub step_total_s: f64,
    pub compute_total_s: Vec<f64>,
    pub between_total_s: f64,
}

/// A step that was collected.
#[derive(Clone, Copy, Debug)]
pub struct StepTimes<'a> {
    /// Begins with the coordinator.
    pub compute_us: &'a [u32],
    /// From the submission of the step to its states.
    pub whole: Duration,
    pub rows: usize,
    pub state_rows: usize,
}

impl ChainTimes {
    /// Another chain begins.
    pub fn restart(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = StageTimes::default();
    }

    pub fn record(&self, step: StepTimes<'_>) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let stages = step.compute_us.len();
        if times.compute_s.len() != stages {
            let zeros = vec![0.0; stages];
            *times = StageTimes { compute_s: zeros.clone(), compute_total_s: zeros, ..StageTimes::default() };
        }
        times.add(step);
    }

    pub fn get(&self) -> StageTimes {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl StageTimes {
    fn add(&mut self, step: StepTimes<'_>) {
        let is_first = self.steps == 0;
        let update = |mean: &mut f64, total: &mut f64, value: f64| {
            *mean = if is_first { value } else { *mean + WEIGHT * (value - *mean) };
            *total += value;
        };
        let mut computing = 0.0;
        for ((mean, total), &us) in self.compute_s.iter_mut().zip(&mut self.compute_total_s).zip(step.compute_us) {
            let seconds = f64::from(us) * 1e-6;
            computing += seconds;
            update(mean, total, seconds);
        }
        let whole = step.whole.as_secs_f64();
        update(&mut self.step_s, &mut self.step_total_s, whole);
        update(&mut self.between_s, &mut self.between_total_s, (whole - computing).max(0.0));
        self.steps += 1;
        self.rows += step.rows as u64;
        self.state_rows += step.state_rows as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(compute_us: &[u32], whole_ms: u64, rows: usize) -> StepTimes<'_> {
        StepTimes { compute_us, whole: Duration::from_millis(whole_ms), rows, state_rows: 1 }
    }

    #[test]
    fn means_and_sums_follow_the_steps_of_one_chain() {
        let times = ChainTimes::default();
        times.record(step(&[1000, 3000], 10, 2));
        let first = StageTimes {
            steps: 1,
            rows: 2,
            state_rows: 1,
            step_s: 0.01,
            compute_s: vec![0.001, 0.003],
            between_s: 0.006,
            step_total_s: 0.01,
            compute_total_s: vec![0.001, 0.003],
            between_total_s: 0.006,
        };
        assert_eq!(times.get(), first);
        times.record(step(&[2000, 3000], 10, 1));
        let later = times.get();
        assert!((later.compute_s[0] - 0.0011).abs() < 1e-9 && later.rows == 3, "{later:?}");
        assert!((later.compute_total_s[0] - 0.003).abs() < 1e-9 && later.state_rows == 2, "{later:?}");
        times.record(step(&[1], 1, 1));
        assert_eq!(times.get().steps, 1, "another chain begins anew");
        times.restart();
        assert_eq!(times.get(), StageTimes::default());
    }
}
