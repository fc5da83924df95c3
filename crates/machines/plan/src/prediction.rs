//! What is predicted of a chain: the time of a token by part, of a full batch, and of a prompt; and the memory of each node.

use types::LayerRange;

use super::assignment::Assignment;
use super::cost::{Costs, StepRows, seconds};
use super::facts::{COORDINATOR, Optimise};
use super::search::Problem;

/// Predicted times, in seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// One token of a sequence that runs alone: the sum of the parts.
    pub token_seconds: f64,
    /// Tokens before it.
    pub positions: u64,
    /// Its parts: embedding, head and sampler on the coordinator,
    pub head_seconds: f64,
    /// the layers of each stage,
    pub stages: Vec<StageTime>,
    /// and the hops in between, the last of them back to the coordinator.
    pub hops: Vec<HopTime>,
    /// A token for each sequence of a full batch.
    pub batch_seconds: f64,
    pub batch: usize,
    /// The whole prompt, up to the first token.
    pub prompt_seconds: f64,
    pub prompt_tokens: usize,
    /// What the plan minimises.
    pub optimise: Optimise,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageTime {
    pub node: usize,
    pub layers: LayerRange,
    /// For the coordinator without head and sampler.
    pub seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HopTime {
    pub from: usize,
    pub to: usize,
    pub seconds: f64,
}

impl Prediction {
    pub(super) fn new(problem: &Problem, assignment: &Assignment) -> Self {
        let token = problem.token_costs();
        let head = token.pass(COORDINATOR, 0, 0);
        let stage = |&(node, layers): &(usize, LayerRange)| {
            let pass = token.pass(node, layers.start(), layers.end());
            let pass = if node == COORDINATOR { pass - head } else { pass };
            StageTime { node, layers, seconds: seconds(pass) }
        };
        let hop = |(from, to)| HopTime { from, to, seconds: seconds(token.hop(from, to)) };
        let batch = problem.batch_costs(assignment.stages().len());
        Self {
            token_seconds: seconds(token.chain_pass(assignment)),
            positions: problem.workload.positions,
            head_seconds: seconds(head),
            stages: assignment.stages().iter().map(stage).collect(),
            hops: Costs::chain_hops(assignment).map(hop).collect(),
            batch_seconds: seconds(batch.chain_pass(assignment).max(batch.chain_busy(assignment))),
            batch: problem.workload.batch.max(1),
            prompt_seconds: prompt_seconds(problem, assignment),
            prompt_tokens: problem.workload.prompt_tokens,
            optimise: problem.optimise,
        }
    }

    /// What the plan minimises.
    pub fn minimised_seconds(&self) -> f64 {
        match self.optimise {
            Optimise::Latency => self.token_seconds,
            Optimise::Throughput => self.batch_seconds,
        }
    }

    /// Tokens per second of a sequence that runs alone.
    pub fn tokens_per_s(&self) -> f64 {
        1.0 / self.token_seconds
    }

    /// Tokens per second of a full batch together.
    pub fn batch_tokens_per_s(&self) -> f64 {
        self.batch as f64 / self.batch_seconds
    }
}

/// Chunks follow one another through the stages, as many at once as there are stages; the last one needs the head.
fn prompt_seconds(problem: &Problem, assignment: &Assignment) -> f64 {
    let tokens = problem.workload.prompt_tokens;
    let chunk = problem.workload.chunk_rows.max(1);
    let before = tokens.saturating_sub(1) / chunk;
    let full = StepRows { rows: chunk, kv_tokens: tokens as u64 / 2, head_rows: 0 };
    let last = StepRows { rows: tokens - before * chunk, kv_tokens: tokens as u64, head_rows: 1 };
    let (full, last) = (problem.costs(&[full]), problem.costs(&[last]));
    let per_stage = full.chain_pass(assignment) / assignment.stages().len() as u64;
    let period = per_stage.max(full.chain_busy(assignment));
    before as f64 * seconds(period) + seconds(last.chain_pass(assignment))
}

/// The memory of a node, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// With embedding and head, on the coordinator.
    pub weights: u64,
    pub kv: u64,
    pub working: u64,
    /// What the node has for all of that.
    pub free: u64,
}

impl MemoryUse {
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.working)
    }

    pub(super) fn of_all(problem: &Problem, assignment: &Assignment) -> Vec<Self> {
        (0..problem.cluster.nodes().len()).map(|node| Self::new(problem, assignment, node)).collect()
    }

    fn new(problem: &Problem, assignment: &Assignment, node: usize) -> Self {
        let (model, room) = (problem.model, &problem.room);
        let mut memory = Self { weights: 0, kv: 0, working: 0, free: problem.cluster.nodes()[node].memory_free };
        if node == COORDINATOR {
            memory.weights = model.head.weight_bytes;
            memory.working = model.head.working_bytes;
        }
        if let Some(layers) = assignment.layers_of(node) {
            memory.weights = memory.weights.saturating_add(room.weights(layers.start(), layers.end()));
            memory.kv = room.kv(layers.start(), layers.end());
            memory.working = memory.working.saturating_add(model.stage_working_bytes);
        }
        memory
    }
}
