//! What a worker needs of whoever runs layers: [`CakeLoader`] loads a range of them, [`CakeStage`] opens sessions on it.

use std::sync::Arc;

use model::Checkpoint;
use types::LayerRange;

/// Why layers cannot be loaded or run, for the master and for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CakeStageError(pub String);

pub trait CakeLoader: Send + Sync {
    fn load(&self, checkpoint: &Checkpoint, layers: LayerRange) -> Result<Arc<dyn CakeStage>, CakeStageError>;

    /// Tokens of the longest session, for a model that could have longer ones.
    fn positions_max(&self, checkpoint: &Checkpoint) -> usize;
}

/// A loaded range of layers.
pub trait CakeStage: Send + Sync {
    /// Opens an empty session. Dropping it closes it.
    fn open(&self) -> Result<Box<dyn CakeSession>, CakeStageError>;
}

/// One sequence's K/V in the layers of a stage.
pub trait CakeSession: Send {
    /// Runs the layers on the activations `[rows, hidden]` of the tokens from `position` on, and replaces these. What the
    /// session holds from `position` on is discarded; `position` is at most the number of tokens that it holds.
    fn forward(&mut self, position: usize, activations: &mut Vec<f32>) -> Result<(), CakeStageError>;
}
