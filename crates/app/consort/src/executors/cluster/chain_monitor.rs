//! `ChainMonitor`: the chain of machines that runs a model, as the server shows it.

use std::sync::Arc;

use chains::MeanTime;
use cluster::chain::{ChainTimes, StageTimes};
use cluster::coordinator::{ClusterReport, ClusterWatch, NodeReport, NodeState, PlanReport, PlannedStageReport};
use kernels::cpu::Level;
use plan::Bits;
use server::{
    BatchPrediction, ChainBits, ChainPrediction, ChainSnapshot, ClusterMonitor, HopSnapshot, HopWay, NodeSnapshot,
    NodeUse, StageMemory, StageSnapshot, StageTime,
};

#[derive(Clone)]
pub struct ChainMonitor {
    watch: ClusterWatch,
    times: Arc<ChainTimes>,
    /// Bytes of one row of activations.
    row_bytes: u64,
}

impl ChainMonitor {
    /// `hidden`: values of one row of activations.
    pub fn new(watch: ClusterWatch, times: Arc<ChainTimes>, hidden: usize) -> Self {
        Self { watch, times, row_bytes: (hidden * size_of::<f32>()) as u64 }
    }

    /// The plan of the chain that was formed last.
    pub fn plan(&self) -> Option<PlanReport> {
        self.watch.get().plan
    }

    pub fn times(&self) -> &ChainTimes {
        &self.times
    }
}

impl ClusterMonitor for ChainMonitor {
    fn snapshot(&self) -> ChainSnapshot {
        snapshot(&self.watch.get(), &self.times.get(), self.row_bytes)
    }
}

fn snapshot(report: &ClusterReport, times: &StageTimes, row_bytes: u64) -> ChainSnapshot {
    let plan = report.plan.as_ref();
    ChainSnapshot {
        stages: plan.map_or_else(Vec::new, |plan| stages(plan, report, times, row_bytes)),
        nodes: report.nodes.iter().map(|node| node_snapshot(node, plan)).collect(),
        chains: report.chains,
        waiting: report.waiting.clone(),
        rebuilding: report.rebuilding.clone(),
        prediction: plan.map(|plan| ChainPrediction {
            tokens_per_s: plan.tokens_per_s,
            batch: Some(BatchPrediction { tokens_per_s: plan.batch_tokens_per_s, sequences: plan.batch }),
        }),
        bits: plan.map(|plan| match plan.bits {
            Bits::Same(_) => ChainBits::Same,
            Bits::SameWhileUsed(_) => ChainBits::SameWhileUsed,
            Bits::Unlike { .. } => ChainBits::Unlike,
        }),
        steps: times.steps,
        step: stage_time(times.step),
        between: stage_time(times.between),
        swarm: None,
    }
}

pub fn stage_time(mean: MeanTime) -> StageTime {
    StageTime { mean_s: mean.mean_s, total_s: mean.total_s }
}

fn stages(plan: &PlanReport, report: &ClusterReport, times: &StageTimes, row_bytes: u64) -> Vec<StageSnapshot> {
    let hops_s: f64 = plan.stages.iter().filter_map(|stage| stage.hop).map(|hop| hop.seconds).sum();
    let stage = |(index, stage): (usize, &PlannedStageReport)| {
        let facts = report.nodes.iter().find(|node| Some(node.address) == stage.address);
        let ranks = facts.and_then(|node| node.facts.as_ref()).map_or(1, |facts| usize::from(facts.ranks));
        let is_last = index + 1 == plan.stages.len();
        let rows = if is_last { times.state_rows } else { times.rows };
        StageSnapshot {
            // Another node may have the same name since the plan was made.
            name: facts.and_then(|node| node.name.clone()).unwrap_or_else(|| stage.name.clone()),
            is_coordinator: stage.address.is_none(),
            address: stage.address.map(|address| address.to_string()),
            layers: stage.layers,
            level: Some(stage.level.name().to_owned()),
            threads: Some(stage.threads),
            ranks: Some(ranks),
            memory: Some(StageMemory {
                weights: stage.memory.weights,
                kv: stage.memory.kv,
                working: stage.memory.working,
                available: stage.memory.free,
            }),
            compute: Some(stage_time(times.compute.get(index).copied().unwrap_or_default())),
            hop: stage.hop.map(|hop| {
                let share = if hops_s > 0.0 { hop.seconds / hops_s } else { 0.0 };
                HopSnapshot {
                    time: Some(StageTime {
                        mean_s: share * times.between.mean_s,
                        total_s: share * times.between.total_s,
                    }),
                    round_trip_s: Some(hop.round_trip_seconds),
                    bytes: rows.saturating_mul(row_bytes),
                    way: HopWay::Direct,
                }
            }),
            peer: None,
        }
    };
    plan.stages.iter().enumerate().map(stage).collect()
}

fn node_snapshot(node: &NodeReport, plan: Option<&PlanReport>) -> NodeSnapshot {
    let is_used = plan.is_some_and(|plan| plan.stages.iter().any(|stage| stage.address == Some(node.address)));
    NodeSnapshot {
        name: node.name.clone(),
        address: Some(node.address.to_string()),
        usage: match &node.state {
            NodeState::Connecting => NodeUse::Connecting,
            NodeState::Failed { why } => NodeUse::Failed { why: why.clone() },
            NodeState::Ready if is_used => NodeUse::Used,
            NodeState::Ready => {
                let why = if plan.is_some() { "the plan gives it no layers" } else { "no chain is formed yet" };
                NodeUse::Spare { why: node.not_used.clone().unwrap_or_else(|| why.to_owned()) }
            }
        },
        level: node.facts.as_ref().map(|facts| Level::from(facts.level).name().to_owned()),
        threads: node.facts.as_ref().map(|facts| facts.threads as usize),
        memory_bytes: node.facts.as_ref().map(|facts| facts.memory_bytes),
        round_trip_s: node.link.map(|link| link.round_trip_seconds),
        peer: None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use cluster::coordinator::PlannedHop;
    use plan::MemoryUse;
    use types::LayerRange;

    use super::*;

    fn planned(name: &str, address: Option<SocketAddr>, layers: Option<LayerRange>, hop_s: f64) -> PlannedStageReport {
        PlannedStageReport {
            name: name.to_owned(),
            address,
            layers,
            level: Level::Scalar,
            threads: 2,
            memory: MemoryUse { weights: 10, kv: 5, working: 1, free: 100 },
            hop: Some(PlannedHop { seconds: hop_s, round_trip_seconds: hop_s * 2.0 }),
        }
    }

    fn node(address: SocketAddr, state: NodeState) -> NodeReport {
        NodeReport { address, name: None, state, facts: None, not_used: None, link: None }
    }

    #[test]
    fn times_and_bytes_go_to_their_stages_and_hops() {
        let [a, b, c] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"].map(|address| address.parse().unwrap());
        let stages = vec![
            planned("here", None, None, 1e-3),
            planned("a", Some(a), LayerRange::new(0, 2), 2e-3),
            planned("b", Some(b), LayerRange::new(2, 5), 1e-3),
        ];
        let plan = PlanReport {
            stages,
            tokens_per_s: 50.0,
            batch_tokens_per_s: 80.0,
            batch: 4,
            bits: Bits::Same(Level::Scalar),
        };
        let failed = NodeState::Failed { why: "another key".to_owned() };
        let report = ClusterReport {
            nodes: vec![node(a, NodeState::Ready), node(b, failed), node(c, NodeState::Ready)],
            chains: 3,
            plan: Some(plan),
            ..ClusterReport::default()
        };
        let mean = |mean_s| MeanTime { mean_s, total_s: 10.0 * mean_s, count: 10 };
        let times = StageTimes {
            steps: 7,
            rows: 20,
            state_rows: 7,
            between: mean(0.008),
            compute: vec![mean(0.001), mean(0.002), mean(0.003)],
            ..StageTimes::default()
        };
        let shown = snapshot(&report, &times, 64);
        let hops: Vec<_> = shown.stages.iter().map(|stage| stage.hop.unwrap()).collect();
        assert_eq!(hops.iter().map(|hop| hop.time.unwrap().mean_s).collect::<Vec<_>>(), [0.002, 0.004, 0.002]);
        assert_eq!(hops.iter().map(|hop| hop.bytes).collect::<Vec<_>>(), [20 * 64, 20 * 64, 7 * 64]);
        assert_eq!(shown.stages[2].compute, Some(StageTime { mean_s: 0.003, total_s: 0.03 }));
        let uses: Vec<_> = shown.nodes.iter().map(|node| node.usage.clone()).collect();
        let spare = NodeUse::Spare { why: "the plan gives it no layers".to_owned() };
        assert_eq!(uses, [NodeUse::Used, NodeUse::Failed { why: "another key".to_owned() }, spare]);
        assert_eq!((shown.chains, shown.bits), (3, Some(ChainBits::Same)));
        let not_used = Some("a chain with it is slower".to_owned());
        let told = node_snapshot(&NodeReport { not_used, ..report.nodes[2].clone() }, report.plan.as_ref());
        assert_eq!(told.usage, NodeUse::Spare { why: "a chain with it is slower".to_owned() });
    }

    #[test]
    fn before_the_first_chain_there_are_nodes_and_a_reason() {
        let address = "10.0.0.1:1".parse().unwrap();
        let report = ClusterReport {
            nodes: vec![node(address, NodeState::Ready)],
            waiting: Some("no room".to_owned()),
            ..ClusterReport::default()
        };
        let shown = snapshot(&report, &StageTimes::default(), 64);
        assert!(shown.stages.is_empty() && shown.prediction.is_none());
        assert_eq!(shown.nodes[0].usage, NodeUse::Spare { why: "no chain is formed yet".to_owned() });
        assert_eq!(shown.waiting.as_deref(), Some("no room"));
    }
}
