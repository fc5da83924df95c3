//! Which node runs which layers. A plan is a pure function of facts: what nodes and links were measured to do, the model,
//! and what it will be used for. Nothing here measures, and nothing here talks to a node.
#![deny(unsafe_code)]

mod assignment;
mod cost;
mod error;
mod facts;
mod names;
mod orders;
mod prediction;
mod saved;
mod search;
mod subsets;
mod table;
#[cfg(test)]
mod tests;
mod topology;
mod units;

use std::fmt;

use kernels::cpu::Level;
use types::LayerRange;

pub use assignment::Assignment;
pub use error::{AssignmentError, PlanError};
pub use facts::{
    COORDINATOR, Cluster, HeadFacts, LAYERS_MAX, LayerFacts, Link, Links, ModelFacts, NODES_MAX, NodeFacts, Optimise,
    Workload,
};
pub use names::distinct_names;
pub use prediction::{HopTime, MemoryUse, Prediction, StageTime};
pub use saved::{PLAN_BYTES_MAX, SavedNode, SavedPlan, SavedPlanError, SavedStage};
pub use search::EXACT_NODES_MAX;
pub use table::{PlanTable, UnusableNode};
pub use topology::{CakeTopology, CakeTopologyError, CakeTopologyNode, TOPOLOGY_BYTES_MAX};

use cost::Room;
use search::{Constraint, Problem};

/// Layers on nodes, and what is predicted of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub assignment: Assignment,
    pub prediction: Prediction,
    /// For each node of the cluster.
    pub memory: Vec<MemoryUse>,
    pub bits: Bits,
}

/// Whether the nodes compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// All nodes of the cluster have this level: neither the split nor the loss of a node changes a bit.
    Same(Level),
    /// The nodes of the plan have this level, but one that is not used has another: a plan with it can change bits.
    SameWhileUsed(Level),
    /// The nodes of the plan have different levels.
    Unlike { lowest: Level, highest: Level },
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Same(level) => write!(f, "the same on all nodes ({level})"),
            Self::SameWhileUsed(level) => write!(f, "the same on these nodes ({level})"),
            Self::Unlike { lowest, highest } => write!(f, "unlike ({lowest} to {highest})"),
        }
    }
}

/// The speed of the best plan with a node and of the best without it.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Tokens per second; `None` if no such plan has room.
    pub with: Option<f64>,
    pub without: Option<f64>,
    /// Set for a node that the plan does not use.
    pub not_used: Option<NotUsed>,
}

/// Why a plan does not use a node. For the coordinator: why it has no layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotUsed {
    /// It can hold no layer, or none that the plan could give it.
    NoRoom { needed: u64, free: u64 },
    /// The best plan with it is slower, or no faster.
    Slower,
    /// The plan was given, and a plan with this node would be faster.
    NotAsked,
}

/// Makes plans from facts.
pub struct Planner<'a> {
    problem: Problem<'a>,
}

impl<'a> Planner<'a> {
    pub fn new(
        cluster: &'a Cluster,
        model: &'a ModelFacts,
        workload: Workload,
        optimise: Optimise,
    ) -> Result<Self, PlanError> {
        let layers = model.layers.len();
        if !(1..=LAYERS_MAX).contains(&layers) {
            return Err(PlanError::LayerCount { layers });
        }
        let (needed, free) = (model.coordinator_bytes(), cluster.nodes()[COORDINATOR].memory_free);
        if needed > free {
            return Err(PlanError::CoordinatorTooSmall { needed, free });
        }
        let room = Room::new(cluster, model, workload.kv_tokens);
        let candidates = (1..cluster.nodes().len()).filter(|&node| room.holds_a_layer(node)).collect();
        Ok(Self { problem: Problem { cluster, model, workload, optimise, room, candidates } })
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.problem.layers()
    }

    /// The plan with the least predicted time. With up to [`EXACT_NODES_MAX`] nodes besides the coordinator that have room
    /// for a layer it is the best of all; with more it is found by local search.
    pub fn plan(&self) -> Result<Plan, PlanError> {
        match self.problem.best(Constraint::None) {
            Some(found) => Ok(self.predict(found.assignment)),
            None => Err(self.no_room()),
        }
    }

    /// Predicts a given assignment. Fails if a node has too little memory for its layers.
    pub fn evaluate(&self, assignment: &Assignment) -> Result<Plan, PlanError> {
        let (nodes, room) = (self.problem.cluster.nodes(), &self.problem.room);
        for &(node, layers) in assignment.stages() {
            let (start, end) = (layers.start(), layers.end());
            if !room.fits(node, start, end) {
                let (needed, free) = (room.bytes(start, end), room.free(node));
                return Err(PlanError::StageTooLarge { node: nodes[node].name.clone(), layers, needed, free });
            }
        }
        Ok(self.predict(assignment.clone()))
    }

    /// The nodes of an assignment, and how long each is predicted to compute for a step of so many generated tokens, in
    /// seconds. The coordinator's time is without the head.
    pub fn step_seconds(&self, assignment: &Assignment, rows: usize) -> Vec<(usize, f64)> {
        let costs = self.problem.rows_costs(rows);
        let stage = |&(node, layers): &(usize, LayerRange)| {
            (node, cost::seconds(costs.pass(node, layers.start(), layers.end())))
        };
        assignment.stages().iter().map(stage).collect()
    }

    /// Compares, for each node of the cluster, plans with it and without it. Takes longer than [`Self::plan`].
    pub fn compare(&self, plan: &Plan) -> Vec<Comparison> {
        (0..self.problem.cluster.nodes().len()).map(|node| self.compare_node(plan, node)).collect()
    }

    fn compare_node(&self, plan: &Plan, node: usize) -> Comparison {
        let this = self.problem.cost(&plan.assignment);
        let (rate, best) = (|cost| self.rate(cost), |constraint| self.problem.best(constraint).map(|found| found.cost));
        if plan.assignment.layers_of(node).is_some() {
            let without = best(Constraint::Without(node));
            return Comparison { with: Some(rate(this)), without: without.map(rate), not_used: None };
        }
        let with = best(Constraint::With(node));
        let not_used = match with {
            None => NotUsed::NoRoom { needed: self.problem.room.smallest_layer(), free: self.problem.room.free(node) },
            Some(cost) if cost < this => NotUsed::NotAsked,
            Some(_) => NotUsed::Slower,
        };
        Comparison { with: with.map(rate), without: Some(rate(this)), not_used: Some(not_used) }
    }

    fn rate(&self, cost: u64) -> f64 {
        let tokens = match self.problem.optimise {
            Optimise::Latency => 1,
            Optimise::Throughput => self.problem.workload.batch.max(1),
        };
        tokens as f64 / cost::seconds(cost)
    }

    fn predict(&self, assignment: Assignment) -> Plan {
        Plan {
            prediction: Prediction::new(&self.problem, &assignment),
            memory: MemoryUse::of_all(&self.problem, &assignment),
            bits: Bits::new(self.problem.cluster, &assignment),
            assignment,
        }
    }

    fn no_room(&self) -> PlanError {
        let Problem { cluster, room, candidates, .. } = &self.problem;
        let layers = self.problem.layers();
        let reached = match candidates.len() <= EXACT_NODES_MAX {
            true => subsets::reach(&self.problem, candidates),
            false => orders::reach(&self.problem),
        };
        let nodes = cluster.nodes().len();
        PlanError::NoRoom {
            missing: room.bytes(reached, layers),
            weights: room.weights(0, layers),
            kv: room.kv(0, layers),
            free: (0..nodes).fold(0, |sum: u64, node| sum.saturating_add(room.free(node))),
            nodes,
        }
    }
}

impl Bits {
    fn new(cluster: &Cluster, assignment: &Assignment) -> Self {
        let nodes = cluster.nodes();
        let coordinator = nodes[COORDINATOR].level;
        let used = assignment.stages().iter().map(|(node, _)| nodes[*node].level);
        let (lowest, highest) =
            used.fold((coordinator, coordinator), |(low, high), level| (low.min(level), high.max(level)));
        match nodes.iter().all(|node| node.level == coordinator) {
            _ if lowest != highest => Self::Unlike { lowest, highest },
            true => Self::Same(lowest),
            false => Self::SameWhileUsed(lowest),
        }
    }
}
