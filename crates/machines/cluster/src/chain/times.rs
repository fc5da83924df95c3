//! `ChainTimes`: how long steps take, in all and in each stage, for people and for the planner.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chains::MeanTime;

/// The latest steps whose gaps are kept.
const GAPS_MAX: usize = 4096;

/// Shared by the executor, which records, and whoever shows it.
#[derive(Debug, Default)]
pub struct ChainTimes(Mutex<RecordedSteps>);

#[derive(Debug, Default)]
struct RecordedSteps {
    times: StageTimes,
    /// The time of each of the latest steps that is no stage's computation, the oldest first.
    gaps: VecDeque<Duration>,
}

/// The steps of one chain: running means over the latest ones, and sums over all of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageTimes {
    pub steps: u64,
    pub rows: u64,
    /// Rows whose states the last stage returned.
    pub state_rows: u64,
    /// From the submission of a step to its states.
    pub step: MeanTime,
    /// Computation in each stage, the coordinator's first.
    pub compute: Vec<MeanTime>,
    /// What is left of a step: the hops and the queues before stages.
    pub between: MeanTime,
    /// What the coordinator does after a step's states have come: final norm, LM head and sampler.
    pub head: MeanTime,
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
        *self.lock() = RecordedSteps::default();
    }

    pub fn record(&self, step: StepTimes<'_>) {
        let mut recorded = self.lock();
        let stages = step.compute_us.len();
        if recorded.times.compute.len() != stages {
            let times = StageTimes { compute: vec![MeanTime::default(); stages], ..StageTimes::default() };
            *recorded = RecordedSteps { times, ..RecordedSteps::default() };
        }
        recorded.times.add(step);
        if recorded.gaps.len() == GAPS_MAX {
            recorded.gaps.pop_front();
        }
        recorded.gaps.push_back(step.gap());
    }

    /// Records what the coordinator did with the states of the step that was recorded last.
    pub fn record_head(&self, time: Duration) {
        self.lock().times.head.add(time);
    }

    pub fn get(&self) -> StageTimes {
        self.lock().times.clone()
    }

    /// The time of each of the latest steps that is no stage's computation, the oldest first.
    pub fn gaps(&self) -> Vec<Duration> {
        self.lock().gaps.iter().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, RecordedSteps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StepTimes<'_> {
    /// The hops and the queues before stages.
    fn gap(&self) -> Duration {
        let computing = self.compute_us.iter().map(|&us| Duration::from_micros(us.into())).sum();
        self.whole.saturating_sub(computing)
    }
}

impl StageTimes {
    fn add(&mut self, step: StepTimes<'_>) {
        for (mean, &us) in self.compute.iter_mut().zip(step.compute_us) {
            mean.add(Duration::from_micros(us.into()));
        }
        self.step.add(step.whole);
        self.between.add(step.gap());
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
        let once = |seconds| MeanTime { mean_s: seconds, total_s: seconds, count: 1 };
        times.record(step(&[1000, 3000], 10, 2));
        let first = StageTimes {
            steps: 1,
            rows: 2,
            state_rows: 1,
            step: once(0.01),
            compute: vec![once(0.001), once(0.003)],
            between: once(0.006),
            ..StageTimes::default()
        };
        assert_eq!(times.get(), first);
        times.record(step(&[2000, 3000], 10, 1));
        let later = times.get();
        assert!((later.compute[0].mean_s - 0.0011).abs() < 1e-9 && later.rows == 3, "{later:?}");
        assert!((later.compute[0].total_s - 0.003).abs() < 1e-9 && later.state_rows == 2, "{later:?}");
        times.record(step(&[1], 1, 1));
        assert_eq!(times.get().steps, 1, "another chain begins anew");
        times.restart();
        assert_eq!(times.get(), StageTimes::default());
    }

    #[test]
    fn the_gaps_of_the_latest_steps_are_kept() {
        let times = ChainTimes::default();
        for ms in 0..GAPS_MAX as u64 + 2 {
            times.record(step(&[1000, 2000], 3 + ms, 1));
        }
        let gaps = times.gaps();
        assert_eq!((gaps.len(), gaps[0]), (GAPS_MAX, Duration::from_millis(2)));
        times.record(step(&[5000, 2000], 3, 1));
        assert_eq!(times.gaps().last(), Some(&Duration::ZERO));
        times.record(step(&[1], 1, 1));
        assert_eq!(times.gaps().len(), 1, "another chain begins anew");
    }

    #[test]
    fn the_head_is_counted_apart_from_steps() {
        let times = ChainTimes::default();
        for ms in [10, 20] {
            times.record(step(&[1000], 10, 1));
            times.record_head(Duration::from_millis(ms));
        }
        let StageTimes { head, step, .. } = times.get();
        assert!((head.mean_s - 0.011).abs() < 1e-9 && (head.total_s - 0.03).abs() < 1e-9, "{head:?}");
        assert!((step.total_s - 0.02).abs() < 1e-9);
    }
}
