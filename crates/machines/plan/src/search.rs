//! The search for the best chain: what both searches, over subsets of nodes and over orders of nodes, have in common.
//!
//! A chain has two costs: the *pass* of one step through all stages and hops, and the *busy* time of its most occupied
//! node or link. One sequence alone pays the pass. A full batch pays the larger of the two. The least pass of chains whose
//! busy time is bounded is found by dynamic programming; a bisection of that bound finds the chain for which the
//! larger of the two is least.

use std::rc::Rc;

use super::assignment::Assignment;
use super::cost::{Costs, NEVER, Room, StepRows};
use super::facts::{COORDINATOR, Cluster, ModelFacts, Optimise, Workload};
use super::{orders, subsets};

/// Up to this many nodes besides the coordinator all subsets and orders are searched.
pub const EXACT_NODES_MAX: usize = 8;

/// What is searched: the facts, and the nodes that can hold at least one layer.
pub(super) struct Problem<'a> {
    pub cluster: &'a Cluster,
    pub model: &'a ModelFacts,
    pub workload: Workload,
    pub optimise: Optimise,
    pub room: Room,
    /// Nodes besides the coordinator, in the order of the cluster.
    pub candidates: Vec<usize>,
}

/// A condition that a chain has to fulfil.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Constraint {
    None,
    /// The node has at least one layer.
    With(usize),
    /// The node has no layer.
    Without(usize),
}

impl Constraint {
    pub fn allows(self, node: usize) -> bool {
        self != Self::Without(node)
    }

    pub fn requires(self, node: usize) -> bool {
        self == Self::With(node)
    }
}

/// Chains that are compared by the same costs.
pub(super) struct Shape {
    pub costs: Rc<Costs>,
    /// Stages besides the coordinator's. `None`: any number.
    pub remote: Option<usize>,
    /// How many layers the coordinator may have.
    pub own_min: usize,
    pub own_max: usize,
}

/// A chain and the cost that is minimised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub cost: u64,
    pub assignment: Assignment,
}

impl Problem<'_> {
    pub fn layers(&self) -> usize {
        self.model.layers.len()
    }

    /// The best chain, or `None` if none has room. The same facts always give the same chain: among equals the one with
    /// fewest stages, then the one with the nodes that come first in the cluster.
    pub fn best(&self, constraint: Constraint) -> Option<Found> {
        if matches!(constraint, Constraint::With(node) if node != COORDINATOR && !self.candidates.contains(&node)) {
            return None;
        }
        match self.candidates.len() <= EXACT_NODES_MAX {
            true => subsets::best(self, &self.candidates, constraint),
            false => orders::best(self, constraint),
        }
    }

    /// What is minimised, for a given chain.
    pub fn cost(&self, assignment: &Assignment) -> u64 {
        match self.optimise {
            Optimise::Latency => self.token_costs().chain_pass(assignment),
            Optimise::Throughput => {
                let costs = self.batch_costs(assignment.stages().len());
                costs.chain_pass(assignment).max(costs.chain_busy(assignment))
            }
        }
    }

    /// The shapes of chains with up to `remote_max` stages besides the coordinator's, those with fewer stages first.
    pub fn shapes(&self, remote_max: usize, constraint: Constraint) -> Vec<Shape> {
        let reach = self.room.reach(COORDINATOR, 0);
        let own_min = usize::from(constraint.requires(COORDINATOR));
        let own_max = if constraint.allows(COORDINATOR) { reach } else { 0 };
        if self.optimise == Optimise::Latency {
            return vec![Shape { costs: Rc::new(self.token_costs()), remote: None, own_min, own_max }];
        }
        let mut shapes = Vec::new();
        for stages in 1..=remote_max + 1 {
            let costs = Rc::new(self.batch_costs(stages));
            if own_max > 0 {
                shapes.push(Shape { costs: costs.clone(), remote: Some(stages - 1), own_min: 1, own_max });
            }
            if own_min == 0 && stages <= remote_max {
                shapes.push(Shape { costs, remote: Some(stages), own_min: 0, own_max: 0 });
            }
        }
        shapes
    }

    /// A chain of this shape whose cost is less than `limit`, and least. `least_pass` returns the chain with the least
    /// pass among those that are not busy for longer than a bound.
    pub fn minimise(
        &self,
        shape: &Shape,
        limit: u64,
        mut least_pass: impl FnMut(u64) -> Option<Found>,
    ) -> Option<Found> {
        match self.optimise {
            Optimise::Latency => {
                let found = least_pass(NEVER - 1).filter(|found| found.cost < limit)?;
                Some(balanced(shape, found, least_pass))
            }
            Optimise::Throughput => least_of_both(shape, limit, least_pass),
        }
    }

    pub fn token_costs(&self) -> Costs {
        self.costs(&[self.decode(1)])
    }

    /// The costs of a step with so many rows, without the head.
    pub fn rows_costs(&self, rows: usize) -> Costs {
        self.costs(&[StepRows { head_rows: 0, ..self.decode(rows) }])
    }

    /// The costs of a full batch in as many parts as there are stages.
    pub fn batch_costs(&self, stages: usize) -> Costs {
        let (sequences, parts) = (self.workload.batch.max(1), self.batch_parts(stages));
        let size = |part: usize| sequences / parts + usize::from(part < sequences % parts);
        self.costs(&(0..parts).map(|part| self.decode(size(part))).collect::<Vec<_>>())
    }

    pub fn batch_parts(&self, stages: usize) -> usize {
        stages.clamp(1, self.workload.batch.max(1))
    }

    pub fn costs(&self, steps: &[StepRows]) -> Costs {
        Costs::new(self.cluster, self.model, steps)
    }

    fn decode(&self, rows: usize) -> StepRows {
        StepRows { rows, kv_tokens: self.workload.positions.saturating_mul(rows as u64), head_rows: rows }
    }
}

/// Among chains with the same pass and number of stages, the one whose most occupied part is occupied least: it
/// is as fast for one sequence, and faster for several.
fn balanced(shape: &Shape, mut found: Found, mut least_pass: impl FnMut(u64) -> Option<Found>) -> Found {
    let stages = found.assignment.stages().len();
    let (mut low, mut high) = (0, shape.costs.chain_busy(&found.assignment));
    // The first bound excludes only the chain that was found: mostly it has no equal.
    let mut bound = high.saturating_sub(1);
    while low < high {
        match least_pass(bound) {
            Some(equal) if equal.cost == found.cost && equal.assignment.stages().len() <= stages => {
                high = shape.costs.chain_busy(&equal.assignment);
                found = equal;
            }
            _ => low = bound + 1,
        }
        bound = low + (high - low) / 2;
    }
    found
}

/// Minimises the larger of pass and busy time.
fn least_of_both(shape: &Shape, limit: u64, mut least_pass: impl FnMut(u64) -> Option<Found>) -> Option<Found> {
    let mut best: Option<Found> = None;
    // A better chain has a cost in `low..high`.
    let (mut low, mut high) = (0, limit);
    let mut bound = high.saturating_sub(1);
    while low < high {
        match least_pass(bound) {
            Some(found) => {
                let cost = found.cost.max(shape.costs.chain_busy(&found.assignment));
                // Chains within the bound cost at least their pass, others more than the bound.
                low = low.max(found.cost.min(bound + 1));
                if cost < high {
                    high = cost;
                    best = Some(Found { cost, ..found });
                }
            }
            None => low = bound + 1,
        }
        bound = low + high.saturating_sub(low) / 2;
    }
    best
}

/// Extends chains by one stage. `from[start]` is the least pass of a chain up to layer `start` and the hop to `node`.
/// Sets `to[end]` to the least pass of such a chain with a stage `start..end` of `node`, which has room for it and is busy
/// for no longer than `bound`.
pub(super) fn extend(costs: &Costs, room: &Room, node: usize, bound: u64, from: &[u64], to: &mut [u64]) {
    // Starts that can still be the best, each better than those before it. What a chain costs grows with its end in the
    // same way for all starts.
    let mut starts = std::collections::VecDeque::new();
    let key = |start: usize| i128::from(from[start]) - i128::from(costs.pass(node, 0, start));
    to[0] = NEVER;
    for (start, end) in (0..).zip(1..from.len()) {
        if from[start] != NEVER {
            while starts.back().is_some_and(|&last| key(last) > key(start)) {
                starts.pop_back();
            }
            starts.push_back(start);
        }
        let fits = |start: usize| room.fits(node, start, end) && costs.busy(node, start, end) <= bound;
        while starts.front().is_some_and(|&start| !fits(start)) {
            starts.pop_front();
        }
        to[end] = starts.front().map_or(NEVER, |&start| from[start] + costs.pass(node, start, end));
    }
}

/// The least pass of a chain of the coordinator alone, for each number of its layers.
pub(super) fn coordinator_only(shape: &Shape, layers: usize, bound: u64) -> Vec<u64> {
    let costs = &shape.costs;
    let allowed =
        |end: usize| (shape.own_min..=shape.own_max).contains(&end) && costs.busy(COORDINATOR, 0, end) <= bound;
    (0..=layers).map(|end| if allowed(end) { costs.pass(COORDINATOR, 0, end) } else { NEVER }).collect()
}

/// Sets `into` to the least pass of chains that hop from one of the given stages to `node`.
pub(super) fn hop_to(costs: &Costs, node: usize, bound: u64, stages: &[(usize, &[u64])], into: &mut [u64]) {
    into.fill(NEVER);
    for &(from, passes) in stages {
        if costs.hop_busy(from, node) > bound {
            continue;
        }
        let hop = costs.hop(from, node);
        for (least, &pass) in into.iter_mut().zip(passes) {
            if pass != NEVER {
                *least = (*least).min(pass + hop);
            }
        }
    }
}
