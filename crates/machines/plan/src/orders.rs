//! The search among many nodes: a local search over orders of nodes. The cuts between the stages of an order are optimal;
//! which nodes are used, and in which order, is improved as long as one change helps: a node is added, removed, replaced
//! or moved, or two are swapped.

use super::assignment::{Assignment, range};
use super::cost::NEVER;
use super::facts::COORDINATOR;
use super::search::{Constraint, EXACT_NODES_MAX, Found, Problem, Shape, coordinator_only, extend, hop_to};
use super::subsets;

/// The most changes, so that the time is bounded. Far fewer are needed.
const CHANGES_MAX: usize = 256;

pub(super) fn best(problem: &Problem, constraint: Constraint) -> Option<Found> {
    best_with(problem, constraint, EXACT_NODES_MAX)
}

/// `few` nodes are searched exactly, to start with.
pub(super) fn best_with(problem: &Problem, constraint: Constraint, few: usize) -> Option<Found> {
    let nodes: Vec<usize> = problem.candidates.iter().copied().filter(|&node| constraint.allows(node)).collect();
    let mut starts = vec![nodes.iter().copied().filter(|&node| constraint.requires(node)).collect()];
    for mut order in sorted(problem, &nodes) {
        order.sort_by_key(|&node| !constraint.requires(node));
        starts.extend(prefixes(problem, &order));
        order.truncate(few);
        let exact = subsets::best(problem, &order, constraint);
        starts.extend(exact.map(|found| found.assignment.remote().iter().map(|(node, _)| *node).collect()));
    }
    best_from(problem, &nodes, constraint, starts)
}

fn best_from(problem: &Problem, nodes: &[usize], constraint: Constraint, starts: Vec<Vec<usize>>) -> Option<Found> {
    let shapes = problem.shapes(nodes.len(), constraint);
    let climbed = starts.into_iter().filter_map(|start| {
        let found = cheapest(problem, &shapes, &start, NEVER)?;
        Some(climb(problem, &shapes, nodes, constraint, start, found))
    });
    climbed.min_by_key(|found| (found.cost, found.assignment.stages().len()))
}

/// How many layers can be held, from the first on, by nodes in one of the orders that the search starts with.
pub(super) fn reach(problem: &Problem) -> usize {
    let reaches = sorted(problem, &problem.candidates).map(|order| reach_of(problem, &order));
    reaches.into_iter().max().unwrap_or(0)
}

fn reach_of(problem: &Problem, order: &[usize]) -> usize {
    order.iter().fold(problem.room.reach(COORDINATOR, 0), |reached, node| problem.room.reach(*node, reached))
}

/// Nodes by bandwidth, and by memory, the largest first.
fn sorted(problem: &Problem, nodes: &[usize]) -> [Vec<usize>; 2] {
    let facts = problem.cluster.nodes();
    let (mut fast, mut large) = (nodes.to_vec(), nodes.to_vec());
    fast.sort_by(|&a, &b| facts[b].read_bytes_per_s.total_cmp(&facts[a].read_bytes_per_s));
    large.sort_by_key(|&node| std::cmp::Reverse(problem.room.free(node)));
    [fast, large]
}

/// As many nodes of an order as the layers need, all nodes, and the number in between.
fn prefixes(problem: &Problem, order: &[usize]) -> Vec<Vec<usize>> {
    let all = order.len();
    match (1..=all).find(|&count| reach_of(problem, &order[..count]) == problem.layers()) {
        Some(enough) => [enough, (enough + all) / 2, all].map(|count| order[..count].to_vec()).to_vec(),
        None => Vec::new(),
    }
}

/// Changes the order as long as that lowers the cost; each time by the change that lowers it most.
fn climb(
    problem: &Problem,
    shapes: &[Shape],
    nodes: &[usize],
    constraint: Constraint,
    mut order: Vec<usize>,
    mut best: Found,
) -> Found {
    let required = nodes.iter().find(|&&node| constraint.requires(node));
    for _ in 0..CHANGES_MAX {
        let mut better = None;
        for changed in neighbours(&order, nodes) {
            if required.is_some_and(|node| !changed.contains(node)) {
                continue;
            }
            if let Some(found) = cheapest(problem, shapes, &changed, best.cost) {
                best = found;
                better = Some(changed);
            }
        }
        match better {
            Some(changed) => order = changed,
            None => break,
        }
    }
    best
}

/// All orders that differ by one change.
fn neighbours(order: &[usize], nodes: &[usize]) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    let unused: Vec<usize> = nodes.iter().copied().filter(|node| !order.contains(node)).collect();
    for at in 0..=order.len() {
        for &node in &unused {
            let mut added = order.to_vec();
            added.insert(at, node);
            all.push(added);
        }
    }
    for at in 0..order.len() {
        let mut rest = order.to_vec();
        let node = rest.remove(at);
        for to in (0..order.len()).filter(|&to| to != at) {
            let mut moved = rest.clone();
            moved.insert(to, node);
            all.push(moved);
        }
        for other in at + 1..order.len() {
            let mut swapped = order.to_vec();
            swapped.swap(at, other);
            all.push(swapped);
        }
        for &other in &unused {
            let mut replaced = order.to_vec();
            replaced[at] = other;
            all.push(replaced);
        }
        all.push(rest);
    }
    all
}

/// The best cuts of a chain that uses exactly these nodes in this order, if it costs less than `limit`.
fn cheapest(problem: &Problem, shapes: &[Shape], order: &[usize], limit: u64) -> Option<Found> {
    let mut best: Option<Found> = None;
    for shape in shapes.iter().filter(|shape| shape.remote.is_none_or(|remote| remote == order.len())) {
        let limit = best.as_ref().map_or(limit, |found| found.cost);
        let least_pass = |bound| Cuts::new(problem, shape, order, bound).least();
        best = problem.minimise(shape, limit, least_pass).or(best);
    }
    best
}

struct Cuts<'a> {
    problem: &'a Problem<'a>,
    shape: &'a Shape,
    order: &'a [usize],
    bound: u64,
    /// `[stages][layers]`: the coordinator alone, then with one node more each time.
    passes: Vec<Vec<u64>>,
}

impl<'a> Cuts<'a> {
    fn new(problem: &'a Problem, shape: &'a Shape, order: &'a [usize], bound: u64) -> Self {
        let layers = problem.layers();
        let mut passes = vec![coordinator_only(shape, layers, bound)];
        let mut from = vec![NEVER; layers + 1];
        let mut last = COORDINATOR;
        for &node in order {
            let mut to = vec![NEVER; layers + 1];
            hop_to(&shape.costs, node, bound, &[(last, &passes[passes.len() - 1])], &mut from);
            extend(&shape.costs, &problem.room, node, bound, &from, &mut to);
            passes.push(to);
            last = node;
        }
        Self { problem, shape, order, bound, passes }
    }

    fn least(&self) -> Option<Found> {
        let costs = &self.shape.costs;
        let pass = *self.passes[self.order.len()].last()?;
        let back = match self.order.last() {
            None => 0,
            Some(&last) if costs.hop_busy(last, COORDINATOR) <= self.bound => costs.hop(last, COORDINATOR),
            Some(_) => return None,
        };
        (pass != NEVER).then(|| Found { cost: pass + back, assignment: self.trace() })
    }

    fn trace(&self) -> Assignment {
        let mut stages = Vec::new();
        let mut end = self.problem.layers();
        for (index, &node) in self.order.iter().enumerate().rev() {
            let start = self.first_layer(index, node, end);
            stages.extend(range(start, end).map(|layers| (node, layers)));
            end = start;
        }
        stages.extend(range(0, end).map(|layers| (COORDINATOR, layers)));
        stages.reverse();
        Assignment::trusted(stages)
    }

    /// The first layer of the stage at `index` of the order, whose last is before `end`.
    fn first_layer(&self, index: usize, node: usize, end: usize) -> usize {
        let (costs, room) = (&self.shape.costs, &self.problem.room);
        let prev = if index == 0 { COORDINATOR } else { self.order[index - 1] };
        let (before, pass, hop) = (&self.passes[index], self.passes[index + 1][end], costs.hop(prev, node));
        let fits = |start| room.fits(node, start, end) && costs.busy(node, start, end) <= self.bound;
        (0..end)
            .filter(|&start| before[start] != NEVER && fits(start))
            .find(|&start| before[start] + hop + costs.pass(node, start, end) == pass)
            .expect("a chain with this pass was found")
    }
}
