//! Metrics of each rank, with the label `rank`. A model in one process has none.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use engine::RankReport;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Label {
    rank: u64,
}

type Seconds = Counter<f64, AtomicU64>;

#[derive(Default)]
pub struct RankMetrics {
    ready: Family<Label, Gauge>,
    weight_bytes: Family<Label, Gauge>,
    kv_bytes: Family<Label, Gauge>,
    resident_bytes: Family<Label, Gauge>,
    restarts: Family<Label, Counter>,
    steps: Family<Label, Counter>,
    step_time: Family<Label, Seconds>,
    wait_time: Family<Label, Seconds>,
    send_time: Family<Label, Seconds>,
    drains: Family<Label, Counter>,
    drain_max: Family<Label, Gauge<f64, AtomicU64>>,
}

impl RankMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("rank_ready", "1 if the rank can run steps", self.ready.clone());
        let bytes = [
            ("rank_weight", "Size of the rank's weights", &self.weight_bytes),
            ("rank_kv", "Size of the rank's KV cache", &self.kv_bytes),
            ("rank_resident", "Resident memory of the rank's process", &self.resident_bytes),
        ];
        for (name, help, gauge) in bytes {
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
        }
        registry.register("rank_restarts", "Restarts of the rank's process", self.restarts.clone());
        let drains = "Steps that the rank aborted because another rank was lost";
        registry.register("rank_drains", drains, self.drains.clone());
        let longest = "Longest time that the rank took to abort such a step";
        registry.register_with_unit("rank_drain_max", longest, Unit::Seconds, self.drain_max.clone());
        registry.register("rank_steps", "Steps that the rank has run", self.steps.clone());
        let seconds = [
            ("rank_step", "Time that the rank spent in steps", &self.step_time),
            ("rank_collective_wait", "Time in steps that the rank waited for other ranks", &self.wait_time),
            ("rank_send", "Time to send steps to the rank", &self.send_time),
        ];
        for (name, help, counter) in seconds {
            registry.register_with_unit(name, help, Unit::Seconds, counter.clone());
        }
    }

    /// `reported` contains the counts that were already added to the counters.
    pub fn update(&self, now: &[RankReport], reported: &[RankReport]) {
        for report in now {
            let reported = reported.iter().find(|reported| reported.rank == report.rank);
            let label = Label { rank: report.rank.index() as u64 };
            self.ready.get_or_create(&label).set(i64::from(report.ready));
            self.weight_bytes.get_or_create(&label).set(report.weight_bytes as i64);
            self.kv_bytes.get_or_create(&label).set(report.kv_bytes as i64);
            self.resident_bytes.get_or_create(&label).set(report.resident_bytes as i64);
            let add_increase = |family: &Family<Label, Counter>, count: fn(&RankReport) -> u64| {
                family.get_or_create(&label).inc_by(growth(count(report), reported.map(count)));
            };
            add_increase(&self.restarts, |report| report.restarts);
            add_increase(&self.steps, |report| report.steps);
            add_increase(&self.drains, |report| report.drains);
            self.drain_max.get_or_create(&label).set(report.drain_max.as_secs_f64());
            let grow_time = |family: &Family<Label, Seconds>, time: fn(&RankReport) -> Duration| {
                let micros = |report| time(report).as_micros() as u64;
                family.get_or_create(&label).inc_by(growth(micros(report), reported.map(micros)) as f64 * 1e-6);
            };
            grow_time(&self.step_time, |report| report.step_time);
            grow_time(&self.wait_time, |report| report.wait_time);
            grow_time(&self.send_time, |report| report.send_time);
        }
    }
}

/// The increase of a count. A process that replaces another starts at 0.
fn growth(now: u64, reported: Option<u64>) -> u64 {
    now.checked_sub(reported.unwrap_or(0)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;
    use types::WorldSize;

    fn report(index: u16, restarts: u64, steps: u64) -> RankReport {
        RankReport {
            rank: WorldSize::new(2).unwrap().rank(index).unwrap(),
            pid: Some(7),
            ready: restarts == 0,
            state: "ready",
            restarts,
            weight_bytes: 100,
            kv_bytes: 20,
            resident_bytes: 150,
            steps,
            step_time: Duration::from_millis(10 * steps),
            wait_time: Duration::from_millis(steps),
            send_time: Duration::ZERO,
            drains: 0,
            drain_max: Duration::ZERO,
        }
    }

    #[test]
    fn counts_go_on_when_a_process_takes_the_place_of_another() {
        let mut registry = Registry::default();
        let metrics = RankMetrics::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(!text.contains("rank="), "{text}");

        let (before, after) = ([report(0, 0, 50), report(1, 0, 40)], [report(0, 0, 60), report(1, 1, 3)]);
        metrics.update(&before, &[]);
        metrics.update(&after, &before);
        text.clear();
        encode(&mut text, &registry).unwrap();
        for line in [
            r#"rank_ready{rank="0"} 1"#,
            r#"rank_ready{rank="1"} 0"#,
            r#"rank_restarts_total{rank="1"} 1"#,
            r#"rank_steps_total{rank="0"} 60"#,
            r#"rank_steps_total{rank="1"} 43"#,
            r#"rank_step_seconds_total{rank="0"} 0.6"#,
            r#"rank_collective_wait_seconds_total{rank="0"} 0.06"#,
            r#"rank_weight_bytes{rank="0"} 100"#,
            r#"rank_kv_bytes{rank="0"} 20"#,
            r#"rank_resident_bytes{rank="1"} 150"#,
        ] {
            assert!(text.lines().any(|own| own == line), "{line} is missing:\n{text}");
        }
    }
}
