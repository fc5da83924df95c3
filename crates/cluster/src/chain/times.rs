//! `ChainTimes`: how long steps take, in all and in each stage, for people and for the planner.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The part of a new measurement in a running mean.
const WEIGHT: f64 = 0.1;

/// Shared by the executor, which records, and whoever shows it.
#[derive(Debug, Default)]
pub struct ChainTimes(Mutex<StageTimes>);

/// Running means over the latest steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTimes {
    pub steps: u64,
    pub rows: u64,
    /// From the submission of a step to its states, in seconds.
    pub step_s: f64,
    /// Computation in each stage, the coordinator's first, in seconds.
    pub compute_s: Vec<f64>,
    /// What is left of a step: the hops and the queues before stages.
    pub between_s: f64,
}

impl ChainTimes {
    /// A step was collected. `compute_us` begins with the coordinator.
    pub fn record(&self, compute_us: &[u32], step: Duration, rows: usize) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.compute_s.len() != compute_us.len() {
            *times = StageTimes { compute_s: vec![0.0; compute_us.len()], ..StageTimes::default() };
        }
        let is_first = times.steps == 0;
        let update =
            |mean: &mut f64, value: f64| *mean = if is_first { value } else { *mean + WEIGHT * (value - *mean) };
        let mut computing = 0.0;
        for (mean, &us) in times.compute_s.iter_mut().zip(compute_us) {
            let seconds = f64::from(us) * 1e-6;
            computing += seconds;
            update(mean, seconds);
        }
        update(&mut times.step_s, step.as_secs_f64());
        update(&mut times.between_s, (step.as_secs_f64() - computing).max(0.0));
        times.steps += 1;
        times.rows += rows as u64;
    }

    pub fn get(&self) -> StageTimes {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_follow_the_steps_of_one_chain() {
        let times = ChainTimes::default();
        times.record(&[1000, 3000], Duration::from_millis(10), 2);
        assert_eq!(
            times.get(),
            StageTimes { steps: 1, rows: 2, step_s: 0.01, compute_s: vec![0.001, 0.003], between_s: 0.006 }
        );
        times.record(&[2000, 3000], Duration::from_millis(10), 1);
        let later = times.get();
        assert!((later.compute_s[0] - 0.0011).abs() < 1e-9 && later.rows == 3, "{later:?}");
        times.record(&[1], Duration::from_millis(1), 1);
        assert_eq!(times.get().steps, 1, "another chain begins anew");
    }
}
