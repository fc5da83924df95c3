//! `PlanReport`: the plan of the current chain, for people: who has which layers, what that takes, and what was predicted.

use std::net::SocketAddr;

use kernels::cpu::Level;
use plan::{Bits, COORDINATOR, Cluster, MemoryUse, Plan};
use types::LayerRange;

#[derive(Clone, Debug, PartialEq)]
pub struct PlanReport {
    /// The coordinator, also if it has no layers, and the nodes of the chain in order.
    pub stages: Vec<PlannedStageReport>,
    /// Tokens per second of a sequence that runs alone.
    pub tokens_per_s: f64,
    /// Tokens per second of `batch` sequences together.
    pub batch_tokens_per_s: f64,
    pub batch: usize,
    pub bits: Bits,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PlannedStageReport {
    pub name: String,
    /// `None` for the coordinator.
    pub address: Option<SocketAddr>,
    pub layers: Option<LayerRange>,
    pub level: Level,
    pub threads: usize,
    pub memory: MemoryUse,
    /// The way to the next stage, from the last one to the coordinator. `None` if the coordinator has all layers.
    pub hop: Option<PlannedHop>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlannedHop {
    /// Predicted for a step with one row.
    pub seconds: f64,
    pub round_trip_seconds: f64,
}

impl PlanReport {
    /// `address` gives the address of a node by its index in the cluster, `numbered` planned layers as the model numbers them.
    pub fn new(
        cluster: &Cluster,
        plan: &Plan,
        address: impl Fn(usize) -> Option<SocketAddr>,
        numbered: impl Fn(LayerRange) -> LayerRange,
    ) -> Self {
        let remote = plan.assignment.stages().iter().map(|(node, _)| *node).filter(|node| *node != COORDINATOR);
        let stage = |node: usize| PlannedStageReport {
            name: cluster.nodes()[node].name.clone(),
            address: address(node),
            layers: plan.assignment.layers_of(node).map(&numbered),
            level: cluster.nodes()[node].level,
            threads: cluster.nodes()[node].threads,
            memory: plan.memory[node],
            hop: plan.prediction.hops.iter().find(|hop| hop.from == node).map(|hop| PlannedHop {
                seconds: hop.seconds,
                round_trip_seconds: cluster.links().between(hop.from, hop.to).round_trip_seconds,
            }),
        };
        Self {
            stages: std::iter::once(COORDINATOR).chain(remote).map(stage).collect(),
            tokens_per_s: plan.prediction.tokens_per_s(),
            batch_tokens_per_s: plan.prediction.batch_tokens_per_s(),
            batch: plan.prediction.batch,
            bits: plan.bits,
        }
    }
}

#[cfg(test)]
mod tests {
    use plan::{Assignment, HeadFacts, LayerFacts, Link, Links, ModelFacts, NodeFacts, Optimise, Planner, Workload};

    use super::*;

    fn node(name: &str) -> NodeFacts {
        NodeFacts {
            name: name.to_owned(),
            address: None,
            level: Level::Scalar,
            threads: 2,
            memory_free: 1 << 30,
            read_bytes_per_s: 1e9,
            multiply_adds_per_s: 1e10,
            step_seconds: 1e-4,
        }
    }

    #[test]
    fn the_coordinator_is_first_and_every_stage_has_its_hop() {
        let link = |round_trip_seconds| Link { round_trip_seconds, bytes_per_s: 1e8 };
        let mut links = Links::new(link(0.5e-3));
        links.set(1, 2, link(2e-3));
        let cluster = Cluster::new(node("here"), vec![node("a"), node("b")], links).unwrap();
        let layer = LayerFacts { weight_bytes: 1000, token_bytes: 1000, kv_bytes: 10, multiply_adds: 1000 };
        let head = HeadFacts::default();
        let model =
            ModelFacts { name: "m".to_owned(), hidden: 8, layers: vec![layer; 5], head, stage_working_bytes: 100 };
        let workload = Workload { kv_tokens: 32, positions: 8, batch: 4, prompt_tokens: 8, chunk_rows: 8 };
        let planner = Planner::new(&cluster, &model, workload, Optimise::Latency).unwrap();
        let addresses = [None, Some("10.0.0.2:1".parse().unwrap()), Some("10.0.0.3:1".parse().unwrap())];
        let report = |split: &[usize]| {
            let split: Vec<_> = (1..).map(Some).zip(split.iter().copied()).collect();
            let plan = planner.evaluate(&Assignment::split(&cluster, 5, &split).unwrap()).unwrap();
            let layers = LayerRange::new(7, 12).unwrap();
            PlanReport::new(&cluster, &plan, |node| addresses[node], |planned| layers.at(planned).unwrap())
        };
        let all = report(&[2, 3]);
        let stages: Vec<_> =
            all.stages.iter().map(|stage| (stage.name.as_str(), stage.layers, stage.address)).collect();
        let range = LayerRange::new;
        assert_eq!(stages, [("here", None, None), ("a", range(7, 9), addresses[1]), ("b", range(9, 12), addresses[2])]);
        let trips: Vec<_> = all.stages.iter().map(|stage| stage.hop.unwrap().round_trip_seconds).collect();
        assert_eq!(trips, [0.5e-3, 2e-3, 0.5e-3]);
        assert_eq!((all.stages[1].memory.weights, all.bits), (2000, Bits::Same(Level::Scalar)));
        let alone = report(&[0, 0]);
        assert_eq!((alone.stages.len(), alone.stages[0].hop), (1, None));
    }
}
