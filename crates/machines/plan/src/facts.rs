//! What the planner knows: the nodes and the links between them as measured, the model, and what it will be used for.

use kernels::cpu::Level;

use super::error::PlanError;
use net::PeerAddress;

/// The index of the coordinator among the nodes of a [`Cluster`].
pub const COORDINATOR: usize = 0;

/// The most nodes, with the coordinator.
pub const NODES_MAX: usize = 64;

/// The most layers of a model.
pub const LAYERS_MAX: usize = 1024;

/// One machine as measured: the coordinator, or a node that can hold a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeFacts {
    pub name: String,
    /// `None` for the coordinator.
    pub address: Option<PeerAddress>,
    pub level: Level,
    pub threads: usize,
    /// Bytes that the node may allocate for weights, keys and values, and working memory.
    pub memory_free: u64,
    /// Bytes of weights that a decode step reads per second, with the kernels that will run.
    pub read_bytes_per_s: f64,
    /// Multiplications with an addition per second, in steps of many rows.
    pub multiply_adds_per_s: f64,
    /// What every step costs beside its layers: receive, wake, send.
    pub step_seconds: f64,
}

/// The connection between two nodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub round_trip_seconds: f64,
    pub bytes_per_s: f64,
}

/// The links between all pairs of nodes. A link is the same in both directions.
#[derive(Clone, Debug, PartialEq)]
pub struct Links {
    default: Link,
    measured: Vec<(usize, usize, Link)>,
}

impl Links {
    /// `default` stands for pairs that were not measured.
    pub fn new(default: Link) -> Self {
        Self { default, measured: Vec::new() }
    }

    /// Sets the link between two nodes, given by their indices in the [`Cluster`].
    pub fn set(&mut self, a: usize, b: usize, link: Link) {
        let (a, b) = (a.min(b), a.max(b));
        match self.measured.iter_mut().find(|(x, y, _)| (*x, *y) == (a, b)) {
            Some((_, _, old)) => *old = link,
            None => self.measured.push((a, b, link)),
        }
    }

    pub fn between(&self, a: usize, b: usize) -> Link {
        let (a, b) = (a.min(b), a.max(b));
        self.measured.iter().find(|(x, y, _)| (*x, *y) == (a, b)).map_or(self.default, |(_, _, link)| *link)
    }
}

/// The machines that can run the model. The first is the coordinator.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    nodes: Vec<NodeFacts>,
    links: Links,
}

impl Cluster {
    pub fn new(coordinator: NodeFacts, others: Vec<NodeFacts>, links: Links) -> Result<Self, PlanError> {
        let mut nodes = vec![coordinator];
        nodes.extend(others);
        if nodes.len() > NODES_MAX {
            return Err(PlanError::TooManyNodes { nodes: nodes.len() });
        }
        nodes.iter().try_for_each(NodeFacts::check)?;
        let pairs = (0..nodes.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
        for (a, b) in pairs {
            let link = links.between(a, b);
            if !(is_time(link.round_trip_seconds) && is_rate(link.bytes_per_s)) {
                return Err(PlanError::Facts {
                    node: nodes[b].name.clone(),
                    fact: format!("the link to {:?}: {link:?}", nodes[a].name),
                });
            }
        }
        Ok(Self { nodes, links })
    }

    /// All nodes, the coordinator first.
    pub fn nodes(&self) -> &[NodeFacts] {
        &self.nodes
    }

    pub fn links(&self) -> &Links {
        &self.links
    }

    /// The names of the nodes, by index.
    pub(super) fn names(&self) -> Vec<&str> {
        self.nodes.iter().map(|node| node.name.as_str()).collect()
    }
}

impl NodeFacts {
    /// The node, if everything takes it so many times as long.
    pub fn slowed(self, factor: f64) -> Self {
        Self {
            read_bytes_per_s: self.read_bytes_per_s / factor,
            multiply_adds_per_s: self.multiply_adds_per_s / factor,
            step_seconds: self.step_seconds * factor,
            ..self
        }
    }

    fn check(&self) -> Result<(), PlanError> {
        let checks = [
            ("bytes read per second", self.read_bytes_per_s, is_rate(self.read_bytes_per_s)),
            ("multiply-adds per second", self.multiply_adds_per_s, is_rate(self.multiply_adds_per_s)),
            ("seconds per step", self.step_seconds, is_time(self.step_seconds)),
        ];
        match checks.into_iter().find(|(_, _, valid)| !valid) {
            None => Ok(()),
            Some((name, value, _)) => {
                Err(PlanError::Facts { node: self.name.clone(), fact: format!("{name}: {value}") })
            }
        }
    }
}

fn is_rate(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

fn is_time(value: f64) -> bool {
    value.is_finite() && value >= 0.0
}

/// One decoder layer, as it will lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerFacts {
    pub weight_bytes: u64,
    /// The weights that one token needs: less than all in a mixture of experts.
    pub token_bytes: u64,
    /// Keys and values of one token.
    pub kv_bytes: u64,
    /// Multiplications with an addition for one token. Attention is not counted.
    pub multiply_adds: u64,
}

/// What the coordinator holds and runs beside layers: embedding, final norm, LM head, sampler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadFacts {
    /// Embedding and head in memory; a table that serves as both counts once.
    pub weight_bytes: u64,
    /// What a step with logits reads of it.
    pub read_bytes: u64,
    pub multiply_adds: u64,
    /// Logits and what else the coordinator needs for steps, without layers.
    pub working_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFacts {
    pub name: String,
    pub hidden: usize,
    pub layers: Vec<LayerFacts>,
    pub head: HeadFacts,
    /// Working memory of a node that has layers.
    pub stage_working_bytes: u64,
}

/// What the model will be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Tokens whose keys and values every stage has room for, of all sequences together.
    pub kv_tokens: u64,
    /// Tokens before the one that a decode step computes.
    pub positions: u64,
    /// Sequences of a full batch.
    pub batch: usize,
    pub prompt_tokens: usize,
    /// The most rows of a step in prefill.
    pub chunk_rows: usize,
}

/// What a plan minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Optimise {
    /// The time of a token of one sequence that runs alone.
    #[default]
    Latency,
    /// The time in which each sequence of a full batch gets a token. As many parts of the batch are in flight as there
    /// are stages.
    Throughput,
}
