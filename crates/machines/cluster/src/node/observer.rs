//! `NodeObserver`: who wants to know what a node receives.

use std::fmt::Debug;

use types::LayerRange;

/// Called by the threads of a node. They wait for it.
pub trait NodeObserver: Debug + Send + Sync {
    /// Weights are about to be received. The result gets the number of bytes that have come, again and again, and is
    /// dropped when all have come, or no more will.
    fn receiving(&self, weights: &IncomingWeights<'_>) -> Box<dyn FnMut(u64)>;
}

/// The weights of a stage that were not in the store.
#[derive(Clone, Copy, Debug)]
pub struct IncomingWeights<'a> {
    /// What the coordinator calls the model.
    pub model: &'a str,
    pub layers: LayerRange,
    pub bytes: u64,
}

/// For a node that nobody watches.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoObserver;

impl NodeObserver for NoObserver {
    fn receiving(&self, _: &IncomingWeights<'_>) -> Box<dyn FnMut(u64)> {
        Box::new(|_| {})
    }
}
