//! The exact search: dynamic programming over subsets of nodes. For each subset, last node and number of layers it has the
//! least pass of a chain of exactly these nodes up to there, so every order of nodes and every cut is covered.

use std::cmp::Reverse;

use super::assignment::{Assignment, range};
use super::cost::NEVER;
use super::facts::COORDINATOR;
use super::search::{Constraint, Found, Problem, Shape, coordinator_only, extend, hop_to};

/// The best chain of some of the nodes. Their number is limited by the memory that all subsets need.
pub(super) fn best(problem: &Problem, nodes: &[usize], constraint: Constraint) -> Option<Found> {
    let mut best: Option<Found> = None;
    for shape in problem.shapes(nodes.len(), constraint) {
        let limit = best.as_ref().map_or(NEVER, |found| found.cost);
        let least_pass = |bound| Subsets::new(problem, &shape, nodes, bound).least(constraint);
        best = problem.minimise(&shape, limit, least_pass).or(best);
    }
    best
}

/// How many layers can be held at all, from the first on, by the coordinator and some of the nodes.
pub(super) fn reach(problem: &Problem, nodes: &[usize]) -> usize {
    let own = problem.room.reach(COORDINATOR, 0);
    let mut reached = vec![own; 1 << nodes.len()];
    for subset in 1..reached.len() {
        let last = members(subset).map(|last| problem.room.reach(nodes[last], reached[subset & !(1 << last)]));
        reached[subset] = last.max().unwrap_or(own);
    }
    reached.into_iter().max().unwrap_or(own)
}

fn members(subset: usize) -> impl Iterator<Item = usize> + Clone {
    (0..usize::BITS as usize).filter(move |bit| subset >> bit & 1 == 1)
}

struct Subsets<'a> {
    problem: &'a Problem<'a>,
    shape: &'a Shape,
    nodes: &'a [usize],
    bound: u64,
    /// The coordinator alone: `[layers]`.
    alone: Vec<u64>,
    /// `[subset][last][layers]`.
    passes: Vec<u64>,
}

impl<'a> Subsets<'a> {
    fn new(problem: &'a Problem, shape: &'a Shape, nodes: &'a [usize], bound: u64) -> Self {
        let layers = problem.layers();
        let alone = coordinator_only(shape, layers, bound);
        let passes = vec![NEVER; (nodes.len() << nodes.len()) * (layers + 1)];
        let mut subsets = Self { problem, shape, nodes, bound, alone, passes };
        let (mut from, mut to) = (vec![NEVER; layers + 1], vec![NEVER; layers + 1]);
        let size_max = shape.remote.unwrap_or(nodes.len());
        for subset in (1..1usize << nodes.len()).filter(|subset| subset.count_ones() as usize <= size_max) {
            for last in members(subset) {
                let node = nodes[last];
                hop_to(&shape.costs, node, bound, &subsets.before(subset, last), &mut from);
                extend(&shape.costs, &problem.room, node, bound, &from, &mut to);
                let row = subsets.row(subset, last);
                subsets.passes[row].copy_from_slice(&to);
            }
        }
        subsets
    }

    fn row(&self, subset: usize, last: usize) -> std::ops::Range<usize> {
        let width = self.problem.layers() + 1;
        let index = subset * self.nodes.len() + last;
        index * width..(index + 1) * width
    }

    /// The chains that `last` can follow in `subset`: the node at their end, and their passes.
    fn before(&self, subset: usize, last: usize) -> Vec<(usize, &[u64])> {
        match subset & !(1 << last) {
            0 => vec![(COORDINATOR, self.alone.as_slice())],
            rest => members(rest).map(|prev| (self.nodes[prev], &self.passes[self.row(rest, prev)])).collect(),
        }
    }

    /// The chain with the least pass.
    fn least(&self, constraint: Constraint) -> Option<Found> {
        let all = (0..1usize << self.nodes.len()).filter(|&subset| self.allowed(subset, constraint));
        let ends = all.flat_map(|subset| self.ends(subset).map(move |(last, pass)| (pass, subset, last)));
        let (cost, subset, last) = ends
            .filter(|(pass, ..)| *pass != NEVER)
            .min_by_key(|&(pass, subset, last)| (pass, subset.count_ones(), subset, Reverse(last)))?;
        Some(Found { cost, assignment: self.trace(subset, last) })
    }

    fn allowed(&self, subset: usize, constraint: Constraint) -> bool {
        let mut places = self.nodes.iter().enumerate().map(|(bit, node)| (subset >> bit & 1 == 1, *node));
        let size = subset.count_ones() as usize;
        self.shape.remote.is_none_or(|remote| remote == size)
            && places.all(|(used, node)| if used { constraint.allows(node) } else { !constraint.requires(node) })
    }

    /// Whole chains of a subset: the last node, if there is one, and the pass.
    fn ends(&self, subset: usize) -> impl Iterator<Item = (Option<usize>, u64)> {
        let layers = self.problem.layers();
        let alone = (subset == 0).then(|| (None, self.alone[layers]));
        let remote = members(subset).map(move |last| {
            let (pass, node) = (self.passes[self.row(subset, last)][layers], self.nodes[last]);
            let back = pass != NEVER && self.shape.costs.hop_busy(node, COORDINATOR) <= self.bound;
            (Some(last), if back { pass + self.shape.costs.hop(node, COORDINATOR) } else { NEVER })
        });
        alone.into_iter().chain(remote)
    }

    /// Follows the passes back from the last layer to the first.
    fn trace(&self, mut subset: usize, mut last: Option<usize>) -> Assignment {
        let mut stages = Vec::new();
        let mut end = self.problem.layers();
        while let Some(index) = last {
            let node = self.nodes[index];
            let (prev, start) = self.step_back(subset, index, end);
            stages.extend(range(start, end).map(|layers| (node, layers)));
            subset &= !(1 << index);
            (last, end) = (self.nodes.iter().position(|other| *other == prev), start);
        }
        stages.extend(range(0, end).map(|layers| (COORDINATOR, layers)));
        stages.reverse();
        Assignment::trusted(stages)
    }

    /// The node before `last` and the first layer of `last`, in the best chain of `subset` that ends with `last`.
    fn step_back(&self, subset: usize, last: usize, end: usize) -> (usize, usize) {
        let (node, costs, room) = (self.nodes[last], &self.shape.costs, &self.problem.room);
        let pass = self.passes[self.row(subset, last)][end];
        let before = self.before(subset, last);
        // Among equals, nodes that come first in the cluster come first in the chain.
        let hops = before.iter().rev().filter(|(prev, _)| costs.hop_busy(*prev, node) <= self.bound);
        let starts = hops.flat_map(|&(prev, passes)| (0..end).map(move |start| (prev, start, passes[start])));
        let fits = |start| room.fits(node, start, end) && costs.busy(node, start, end) <= self.bound;
        starts
            .filter(|&(_, start, before)| before != NEVER && fits(start))
            .find(|&(prev, start, before)| before + costs.hop(prev, node) + costs.pass(node, start, end) == pass)
            .map(|(prev, start, _)| (prev, start))
            .expect("a chain with this pass was found")
    }
}
