//! Why there is no plan.

use types::LayerRange;

use super::facts::{LAYERS_MAX, NODES_MAX};
use super::units::Bytes;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("{nodes} nodes are too many: at most {NODES_MAX} take part in a plan")]
    TooManyNodes { nodes: usize },
    #[error("node {node:?} reports no usable value for {fact}")]
    Facts { node: String, fact: String },
    #[error("a plan is for 1 to {LAYERS_MAX} layers, the model has {layers}")]
    LayerCount { layers: usize },
    #[error(
        "the coordinator has no room for embedding, head and working memory: {} are needed, {} are free",
        Bytes(*needed), Bytes(*free)
    )]
    CoordinatorTooSmall { needed: u64, free: u64 },
    #[error(
        "no plan fits: {} are missing. The layers need {} of weights and {} of keys and values; {} are free on {nodes} \
         node{}",
        Bytes(*missing), Bytes(*weights), Bytes(*kv), Bytes(*free), if *nodes == 1 { "" } else { "s" }
    )]
    NoRoom {
        /// Weights, keys and values of the layers that are left over when the nodes hold as many as they can.
        missing: u64,
        weights: u64,
        kv: u64,
        /// On all nodes together, without working memory.
        free: u64,
        nodes: usize,
    },
    #[error(
        "node {node:?} has no room for layers {layers}: {} are needed, {} are free",
        Bytes(*needed), Bytes(*free)
    )]
    StageTooLarge { node: String, layers: LayerRange, needed: u64, free: u64 },
    #[error(transparent)]
    Assignment(#[from] AssignmentError),
}

/// Why ranges of layers are not an assignment of all layers to nodes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignmentError {
    #[error("there is no node {node}: the cluster has {nodes}")]
    NoSuchNode { node: usize, nodes: usize },
    #[error("node {name:?} has two stages: layers {first} and {second}; a node holds one range")]
    Twice { name: String, first: LayerRange, second: LayerRange },
    #[error("layers {layers} of node {name:?} do not follow: layer {expected} is next")]
    Gap { name: String, layers: LayerRange, expected: usize },
    #[error("layers {layers} of node {name:?} go beyond the model, which has {model}")]
    Beyond { name: String, layers: LayerRange, model: usize },
    #[error("the coordinator has layers {layers}, but it can only have the first")]
    CoordinatorNotFirst { layers: LayerRange },
    #[error("layers {from}..{model} have no node")]
    Unassigned { from: usize, model: usize },
    #[error("the split has {sum} layers, the model {model}")]
    SplitSum { sum: usize, model: usize },
}
