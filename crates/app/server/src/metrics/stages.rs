//! Metrics of a chain of machines: of each stage with the labels `stage` and `node`, of its nodes by state. A model on one
//! machine has none.
//!
//! A counter has the sum over the current chain, so it starts again when another chain is formed. Series of stages that are gone
//! are removed: names come from other machines, and must not make more series than there are stages.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::cluster::{ChainSnapshot, StageSnapshot, bounded_name};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct StageLabel {
    pub stage: u64,
    pub node: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// For counters of a model that may have no chain: without a label set nothing is written.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct NoLabel {}

pub(super) type Seconds = Counter<f64, AtomicU64>;
pub(super) type StageSeconds = Family<StageLabel, Seconds>;
type StageGauge = Family<StageLabel, Gauge>;

#[derive(Default)]
pub struct StageMetrics {
    layers: StageGauge,
    used_bytes: StageGauge,
    available_bytes: StageGauge,
    steps: Family<StageLabel, Counter>,
    compute: StageSeconds,
    hop: StageSeconds,
    activation_bytes: Family<StageLabel, Counter>,
    step: Family<NoLabel, Seconds>,
    between: Family<NoLabel, Seconds>,
    chains: Family<NoLabel, Counter>,
    nodes: Family<StateLabel, Gauge>,
}

impl StageMetrics {
    pub fn register(&self, registry: &mut Registry) {
        registry.register("stage_layers", "Layers of the stage", self.layers.clone());
        let used = "Memory of the stage: weights, KV cache and working memory";
        registry.register_with_unit("stage_memory_used", used, Unit::Bytes, self.used_bytes.clone());
        let available = "Memory that layers may take on the stage's machine";
        registry.register_with_unit("stage_memory_available", available, Unit::Bytes, self.available_bytes.clone());
        registry.register("stage_steps", "Steps of the current chain", self.steps.clone());
        let seconds = [
            ("stage_compute", "Time that the stage computed", &self.compute),
            ("stage_hop", "Time from the stage to the next one: its part of the time between stages", &self.hop),
        ];
        for (name, help, family) in seconds {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        }
        let activations = "Activations that the stage sent to the next one";
        registry.register_with_unit("stage_activations", activations, Unit::Bytes, self.activation_bytes.clone());
        let step = "Time from the submission of steps to their results";
        registry.register_with_unit("chain_step", step, Unit::Seconds, self.step.clone());
        let between = "Time of steps in which no stage computed: hops, and waiting for a stage";
        registry.register_with_unit("chain_between_stages", between, Unit::Seconds, self.between.clone());
        registry.register("chains_formed", "Chains of machines that were formed", self.chains.clone());
        registry.register("cluster_nodes", "Machines that were found, by state", self.nodes.clone());
    }

    /// Replaces all values. No other thread may encode them meanwhile.
    pub fn update(&self, chain: &ChainSnapshot) {
        self.clear();
        for (index, stage) in chain.stages.iter().enumerate() {
            let steps = stage.peer.as_ref().map_or(chain.steps, |peer| peer.runs);
            self.add_stage(&StageLabel::new(index, stage), stage, steps);
        }
        add_seconds(&self.step, &NoLabel {}, chain.step.total_s);
        add_seconds(&self.between, &NoLabel {}, chain.between.total_s);
        self.chains.get_or_create(&NoLabel {}).inc_by(chain.chains);
        for state in ["used", "spare", "connecting", "failed", "lost"] {
            let count = chain.nodes.iter().filter(|node| node.usage.name() == state).count();
            self.nodes.get_or_create(&StateLabel { state }).set(count as i64);
        }
    }

    fn add_stage(&self, label: &StageLabel, stage: &StageSnapshot, steps: u64) {
        let set = |family: &StageGauge, value: u64| {
            family.get_or_create(label).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.layers, stage.layers.map_or(0, |layers| layers.count() as u64));
        if let Some(memory) = stage.memory {
            set(&self.used_bytes, memory.used());
            set(&self.available_bytes, memory.available);
        }
        self.steps.get_or_create(label).inc_by(steps);
        if let Some(compute) = stage.compute {
            add_seconds(&self.compute, label, compute.total_s);
        }
        if let Some(hop) = stage.hop {
            add_seconds(&self.hop, label, hop.time.unwrap_or_default().total_s);
            self.activation_bytes.get_or_create(label).inc_by(hop.bytes);
        }
    }

    fn clear(&self) {
        for family in [&self.layers, &self.used_bytes, &self.available_bytes] {
            family.clear();
        }
        for family in [&self.steps, &self.activation_bytes] {
            family.clear();
        }
        for family in [&self.compute, &self.hop] {
            family.clear();
        }
        for family in [&self.step, &self.between] {
            family.clear();
        }
        self.chains.clear();
        self.nodes.clear();
    }
}

impl StageLabel {
    pub fn new(index: usize, stage: &StageSnapshot) -> Self {
        Self { stage: index as u64, node: bounded_name(&stage.name) }
    }
}

pub(super) fn add_seconds<L: Clone + Eq + std::hash::Hash>(family: &Family<L, Seconds>, label: &L, seconds: f64) {
    family.get_or_create(label).inc_by(seconds);
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use types::LayerRange;

    use super::*;
    use crate::cluster::{HopSnapshot, NodeSnapshot, NodeUse, StageMemory, StageTime};

    fn stage(name: &str, start: u32, end: u32) -> StageSnapshot {
        let time = |total_s| StageTime { mean_s: 0.5, total_s };
        StageSnapshot {
            name: name.to_owned(),
            layers: LayerRange::new(start, end),
            memory: Some(StageMemory { weights: 70, kv: 20, working: 10, available: 1000 }),
            compute: Some(time(1.5)),
            hop: Some(HopSnapshot { time: Some(time(0.25)), bytes: 4096, ..HopSnapshot::default() }),
            ..StageSnapshot::default()
        }
    }

    fn text(metrics: &StageMetrics, chain: &ChainSnapshot) -> String {
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        metrics.update(chain);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    fn check(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.lines().any(|own| own == *line), "{line} is missing:\n{text}");
        }
    }

    #[test]
    fn every_stage_has_its_series_until_another_chain_takes_its_place() {
        let metrics = StageMetrics::default();
        let node = |usage| NodeSnapshot {
            name: None,
            address: Some("10.0.0.2:7420".to_owned()),
            usage,
            level: None,
            threads: None,
            memory_bytes: None,
            round_trip_s: None,
            peer: None,
        };
        let mut chain = ChainSnapshot {
            stages: vec![stage("this machine", 0, 4), stage("attic\n\"", 4, 9)],
            nodes: vec![node(NodeUse::Used), node(NodeUse::Failed { why: "gone".to_owned() })],
            chains: 1,
            steps: 3,
            step: StageTime { mean_s: 0.1, total_s: 4.0 },
            ..ChainSnapshot::default()
        };
        check(
            &text(&metrics, &chain),
            &[
                r#"stage_layers{stage="0",node="this machine"} 4"#,
                "stage_layers{stage=\"1\",node=\"attic\u{fffd}\\\"\"} 5",
                r#"stage_memory_used_bytes{stage="0",node="this machine"} 100"#,
                r#"stage_steps_total{stage="0",node="this machine"} 3"#,
                r#"stage_compute_seconds_total{stage="0",node="this machine"} 1.5"#,
                r#"stage_hop_seconds_total{stage="0",node="this machine"} 0.25"#,
                r#"stage_activations_bytes_total{stage="0",node="this machine"} 4096"#,
                "chain_step_seconds_total{} 4.0",
                "chains_formed_total{} 1",
                r#"cluster_nodes{state="used"} 1"#,
                r#"cluster_nodes{state="failed"} 1"#,
                r#"cluster_nodes{state="spare"} 0"#,
            ],
        );
        chain.stages[1].name = "cellar".to_owned();
        chain.chains = 2;
        let after = text(&metrics, &chain);
        check(&after, &[r#"stage_layers{stage="1",node="cellar"} 5"#, "chains_formed_total{} 2"]);
        assert!(!after.contains("attic"), "{after}");
    }

    #[test]
    fn a_model_without_a_chain_has_no_series() {
        let mut registry = Registry::default();
        StageMetrics::default().register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        assert!(!text.lines().any(|line| !line.starts_with('#')), "{text}");
    }
}
