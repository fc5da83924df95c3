//! Predicted times of stages and hops, and the memory of ranges of layers.
//!
//! Times are whole picoseconds: sums do not depend on their order, so equal plans compare as equal.

use super::assignment::Assignment;
use super::facts::{COORDINATOR, Cluster, LayerFacts, ModelFacts, NodeFacts};

/// A cost that nothing reaches.
pub(super) const NEVER: u64 = u64::MAX;

/// Longer times of a layer or a hop count as this one, so that no sum over layers, nodes and steps overflows.
const PICOSECONDS_MAX: f64 = 1e14;

fn picoseconds(seconds: f64) -> u64 {
    (seconds * 1e12).round().clamp(0.0, PICOSECONDS_MAX) as u64
}

pub(super) fn seconds(picoseconds: u64) -> f64 {
    picoseconds as f64 / 1e12
}

/// What one step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepRows {
    pub rows: usize,
    /// Tokens whose keys and values it reads.
    pub kv_tokens: u64,
    /// Rows that need logits.
    pub head_rows: usize,
}

/// The times of steps on every node and link.
pub(super) struct Costs {
    nodes: Vec<NodeCosts>,
    /// `[from][to]`.
    hops: Vec<Vec<HopCosts>>,
}

struct NodeCosts {
    /// The first step: what it costs beside layers, and sums over the layers before an index.
    pass_fixed: u64,
    pass: Vec<u64>,
    /// The same for all steps together.
    busy_fixed: u64,
    busy: Vec<u64>,
}

#[derive(Clone, Copy)]
struct HopCosts {
    /// The first step, from the start of sending to the end of receiving.
    pass: u64,
    /// The time in which the link is occupied by all steps.
    busy: u64,
}

impl Costs {
    /// `steps` are those in flight together, the largest first. There is at least one.
    pub fn new(cluster: &Cluster, model: &ModelFacts, steps: &[StepRows]) -> Self {
        let count = cluster.nodes().len();
        let nodes = cluster.nodes().iter().enumerate();
        Self {
            nodes: nodes.map(|(index, node)| NodeCosts::new(index, node, model, steps)).collect(),
            hops: (0..count)
                .map(|from| (0..count).map(|to| HopCosts::new(cluster, model, steps, from, to)).collect())
                .collect(),
        }
    }

    /// The time of the first step in a stage; for the coordinator, whose range may be empty, with the head.
    pub fn pass(&self, node: usize, start: usize, end: usize) -> u64 {
        let costs = &self.nodes[node];
        costs.pass_fixed + (costs.pass[end] - costs.pass[start])
    }

    /// The time of all steps in a stage.
    pub fn busy(&self, node: usize, start: usize, end: usize) -> u64 {
        let costs = &self.nodes[node];
        costs.busy_fixed + (costs.busy[end] - costs.busy[start])
    }

    pub fn hop(&self, from: usize, to: usize) -> u64 {
        self.hops[from][to].pass
    }

    pub fn hop_busy(&self, from: usize, to: usize) -> u64 {
        self.hops[from][to].busy
    }

    /// The hops of a chain.
    pub fn chain_hops(assignment: &Assignment) -> impl Iterator<Item = (usize, usize)> {
        let remote = assignment.remote().iter().map(|(node, _)| *node);
        let from = std::iter::once(COORDINATOR).chain(remote.clone());
        let to = remote.chain((!assignment.remote().is_empty()).then_some(COORDINATOR));
        from.zip(to)
    }

    /// The time of the first step through the whole chain and back.
    pub fn chain_pass(&self, assignment: &Assignment) -> u64 {
        let own = assignment.layers_of(COORDINATOR).map_or(0, |layers| layers.end());
        let remote = assignment.remote().iter();
        let stages: u64 = remote.map(|(node, layers)| self.pass(*node, layers.start(), layers.end())).sum();
        let hops: u64 = Self::chain_hops(assignment).map(|(from, to)| self.hop(from, to)).sum();
        self.pass(COORDINATOR, 0, own) + stages + hops
    }

    /// The longest time that all steps together occupy one node or link.
    pub fn chain_busy(&self, assignment: &Assignment) -> u64 {
        let own = assignment.layers_of(COORDINATOR).map_or(0, |layers| layers.end());
        let remote = assignment.remote().iter();
        let stages = remote.map(|(node, layers)| self.busy(*node, layers.start(), layers.end()));
        let hops = Self::chain_hops(assignment).map(|(from, to)| self.hop_busy(from, to));
        stages.chain(hops).fold(self.busy(COORDINATOR, 0, own), u64::max)
    }
}

impl NodeCosts {
    fn new(index: usize, node: &NodeFacts, model: &ModelFacts, steps: &[StepRows]) -> Self {
        let fixed = |step: &StepRows| {
            let head = if index == COORDINATOR { head_seconds(node, model, step) } else { 0.0 };
            picoseconds(node.step_seconds) + picoseconds(head)
        };
        let layer = |layer: &LayerFacts, step: &StepRows| picoseconds(layer_seconds(node, layer, step));
        let all = |of: &dyn Fn(&StepRows) -> u64| steps.iter().map(of).sum::<u64>();
        Self {
            pass_fixed: fixed(&steps[0]),
            pass: prefix_sums(model.layers.iter().map(|facts| layer(facts, &steps[0]))),
            busy_fixed: all(&fixed),
            busy: prefix_sums(model.layers.iter().map(|facts| all(&|step| layer(facts, step)))),
        }
    }
}

/// A layer reads its weights and the cache while it computes: the slower of the two counts.
fn layer_seconds(node: &NodeFacts, layer: &LayerFacts, step: &StepRows) -> f64 {
    let rows = step.rows as f64;
    let weights = (layer.weight_bytes as f64).min(rows * layer.token_bytes as f64);
    let read = weights + step.kv_tokens as f64 * layer.kv_bytes as f64;
    (read / node.read_bytes_per_s).max(rows * layer.multiply_adds as f64 / node.multiply_adds_per_s)
}

fn head_seconds(node: &NodeFacts, model: &ModelFacts, step: &StepRows) -> f64 {
    if step.head_rows == 0 {
        return 0.0;
    }
    let read = model.head.read_bytes as f64 / node.read_bytes_per_s;
    read.max(step.head_rows as f64 * model.head.multiply_adds as f64 / node.multiply_adds_per_s)
}

impl HopCosts {
    fn new(cluster: &Cluster, model: &ModelFacts, steps: &[StepRows], from: usize, to: usize) -> Self {
        let link = cluster.links().between(from, to);
        let transfer = |step: &StepRows| {
            // The last stage returns only the rows that need logits.
            let rows = if to == COORDINATOR { step.head_rows } else { step.rows };
            picoseconds((rows * model.hidden * size_of::<f32>()) as f64 / link.bytes_per_s)
        };
        Self {
            pass: picoseconds(link.round_trip_seconds / 2.0) + transfer(&steps[0]),
            busy: steps.iter().map(transfer).sum(),
        }
    }
}

fn prefix_sums<T: Copy + Default + std::ops::Add<Output = T>>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut sum = T::default();
    let sums = values.map(|value| {
        sum = sum + value;
        sum
    });
    std::iter::once(T::default()).chain(sums).collect()
}

/// The memory of ranges of layers, and what each node has for them.
pub(super) struct Room {
    /// Weights, and keys and values, of the layers before an index. Wide enough for any sum.
    weights: Vec<u128>,
    kv: Vec<u128>,
    both: Vec<u128>,
    /// What a node has for layers, after working memory and, on the coordinator, embedding and head.
    free: Vec<u64>,
}

impl Room {
    pub fn new(cluster: &Cluster, model: &ModelFacts, kv_tokens: u64) -> Self {
        let weights = |layer: &LayerFacts| u128::from(layer.weight_bytes);
        let kv = |layer: &LayerFacts| u128::from(layer.kv_bytes.saturating_mul(kv_tokens));
        let free = |(index, node): (usize, &NodeFacts)| {
            let taken = if index == COORDINATOR { model.coordinator_bytes() } else { 0 };
            node.memory_free.saturating_sub(taken.saturating_add(model.stage_working_bytes))
        };
        Self {
            weights: prefix_sums(model.layers.iter().map(weights)),
            kv: prefix_sums(model.layers.iter().map(kv)),
            both: prefix_sums(model.layers.iter().map(|layer| weights(layer) + kv(layer))),
            free: cluster.nodes().iter().enumerate().map(free).collect(),
        }
    }

    pub fn weights(&self, start: usize, end: usize) -> u64 {
        saturated(self.weights[end] - self.weights[start])
    }

    pub fn kv(&self, start: usize, end: usize) -> u64 {
        saturated(self.kv[end] - self.kv[start])
    }

    pub fn bytes(&self, start: usize, end: usize) -> u64 {
        saturated(self.both[end] - self.both[start])
    }

    pub fn free(&self, node: usize) -> u64 {
        self.free[node]
    }

    /// An empty range always fits.
    pub fn fits(&self, node: usize, start: usize, end: usize) -> bool {
        start == end || self.both[end] - self.both[start] <= u128::from(self.free[node])
    }

    /// The furthest end of a range of this node that begins at `start`.
    pub fn reach(&self, node: usize, start: usize) -> usize {
        let limit = self.both[start] + u128::from(self.free[node]);
        start + self.both[start + 1..].partition_point(|&bytes| bytes <= limit)
    }

    /// Whether the node can hold any layer at all.
    pub fn holds_a_layer(&self, node: usize) -> bool {
        self.smallest_layer() <= self.free[node]
    }

    pub fn smallest_layer(&self) -> u64 {
        self.both.windows(2).map(|pair| saturated(pair[1] - pair[0])).min().unwrap_or(0)
    }
}

fn saturated(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

impl ModelFacts {
    /// What the coordinator needs whether it has layers or not.
    pub(super) fn coordinator_bytes(&self) -> u64 {
        self.head.weight_bytes.saturating_add(self.head.working_bytes)
    }
}
