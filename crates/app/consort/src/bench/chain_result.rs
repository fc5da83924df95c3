//! `ChainResult`: what a chain of machines did in all tests, beside what its plan predicted.

use std::fmt;

use chains::MeanTime;
use cluster::chain::{ChainTimes, StageTimes};
use cluster::coordinator::PlanReport;
use serde::Serialize;

#[derive(Debug, Serialize)]
pub struct ChainResult {
    /// From the coordinator to the first stage, from stage to stage, and back.
    hops: usize,
    /// Half a round trip of each hop, as measured before the chain was formed.
    half_round_trip_ms: Vec<f64>,
    /// The time of a step that is no stage's computation: all hops, and queues if several steps are in flight.
    gap_ms: Percentiles,
    /// The mean time of a step in each stage, the coordinator's first.
    compute_ms: Vec<f64>,
    /// The mean time of final norm, LM head and sampler on the coordinator.
    head_ms: f64,
    steps: u64,
    /// Of one sequence alone.
    predicted_tokens_per_s: f64,
    /// Of `batch` sequences together, the largest batch of the tests.
    predicted_batch_tokens_per_s: f64,
    batch: usize,
}

#[derive(Debug, Serialize)]
struct Percentiles {
    median: f64,
    p90: f64,
    p99: f64,
}

impl ChainResult {
    pub fn new(plan: &PlanReport, times: &ChainTimes) -> Self {
        let hops: Vec<_> = plan.stages.iter().filter_map(|stage| stage.hop).collect();
        let StageTimes { steps, compute, head, .. } = times.get();
        let mean_ms = |time: MeanTime| 1e3 * time.total_s / steps.max(1) as f64;
        Self {
            hops: hops.len(),
            half_round_trip_ms: hops.iter().map(|hop| 1e3 * hop.round_trip_seconds / 2.0).collect(),
            gap_ms: Percentiles::of(times.gaps().iter().map(|gap| 1e3 * gap.as_secs_f64()).collect()),
            compute_ms: compute.into_iter().map(mean_ms).collect(),
            head_ms: mean_ms(head),
            steps,
            predicted_tokens_per_s: plan.tokens_per_s,
            predicted_batch_tokens_per_s: plan.batch_tokens_per_s,
            batch: plan.batch,
        }
    }
}

impl fmt::Display for ChainResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |values: &[f64]| values.iter().map(|value| format!("{value:.2}")).collect::<Vec<_>>().join(" + ");
        let Percentiles { median, p90, p99 } = &self.gap_ms;
        write!(
            f,
            "{} hops of {} ms (half a round trip); a step is {median:.2} ms on the way (p90 {p90:.2}, p99 {p99:.2}) and computes for \
             {} ms, head {:.2} ms; predicted: {:.1} tokens/s",
            self.hops,
            list(&self.half_round_trip_ms),
            list(&self.compute_ms),
            self.head_ms,
            self.predicted_tokens_per_s,
        )?;
        match self.batch {
            1 => Ok(()),
            batch => write!(f, ", {:.1} for {batch} sequences", self.predicted_batch_tokens_per_s),
        }
    }
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get((part * values.len() as f64) as usize).copied().unwrap_or(0.0);
        Self { median: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cluster::chain::StepTimes;
    use cluster::coordinator::{PlannedHop, PlannedStageReport};
    use kernels::cpu::Level;
    use plan::{Bits, MemoryUse};
    use types::LayerRange;

    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let Percentiles { median, p90, p99 } = Percentiles::of((1..=100).rev().map(f64::from).collect());
        assert_eq!((median, p90, p99), (51.0, 91.0, 100.0));
        assert_eq!(Percentiles::of(Vec::new()).p99, 0.0);
    }

    #[test]
    fn a_chain_is_told_in_milliseconds_for_each_step() {
        let stage = |layers, round_trip_seconds| PlannedStageReport {
            name: String::new(),
            address: None,
            layers,
            level: Level::Scalar,
            threads: 1,
            memory: MemoryUse { weights: 0, kv: 0, working: 0, free: 0 },
            hop: Some(PlannedHop { seconds: 0.0, round_trip_seconds }),
        };
        let plan = PlanReport {
            stages: vec![stage(None, 2e-4), stage(LayerRange::new(0, 4), 4e-4)],
            tokens_per_s: 50.0,
            batch_tokens_per_s: 80.0,
            batch: 4,
            bits: Bits::Same(Level::Scalar),
        };
        let times = ChainTimes::default();
        for (us, head) in [(2000, 1), (4000, 2)] {
            let whole = Duration::from_millis(6);
            times.record(StepTimes { compute_us: &[500, us], whole, rows: 1, state_rows: 1 });
            times.record_head(Duration::from_millis(head));
        }
        let result = ChainResult::new(&plan, &times);
        assert_eq!((result.hops, result.steps), (2, 2));
        assert_eq!(result.half_round_trip_ms, [0.1, 0.2]);
        assert_eq!((result.compute_ms.clone(), result.head_ms), (vec![0.5, 3.0], 1.5));
        assert_eq!(result.gap_ms.median, 3.5);
        assert_eq!(
            result.to_string(),
            "2 hops of 0.10 + 0.20 ms (half a round trip); a step is 3.50 ms on the way (p90 3.50, p99 3.50) and computes for \
             0.50 + 3.00 ms, head 1.50 ms; predicted: 50.0 tokens/s, 80.0 for 4 sequences"
        );
    }
}
