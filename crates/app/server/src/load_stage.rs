//! `LoadStage`: the load state of the model. The server accepts connections while the model loads.

use std::sync::{Arc, Weak};

use crate::error::{ApiError, RETRY_AFTER};
use crate::served_model::ServedModel;

/// The state of the model that a server serves.
#[derive(Clone)]
pub enum LoadStage {
    /// It is loaded when a request asks for it.
    Unloaded,
    Loading(Progress),
    Ready(Arc<ServedModel>),
    /// A rank was lost and is being replaced, with the reason. Requests are accepted, and wait.
    Rebuilding {
        model: Arc<ServedModel>,
        why: Arc<str>,
    },
    /// Loading failed or the engine stopped, with a reason that clients may read: it names no path of this machine.
    Failed(String),
    /// Running requests may finish; new requests are refused. The model is there for its statistics.
    Draining(Weak<ServedModel>),
}

/// The progress of loading: `done` of `total` units of the current step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub doing: String,
    pub done: u64,
    pub total: u64,
}

impl Progress {
    /// From 0 to 1.
    pub fn fraction(&self) -> f64 {
        if self.total == 0 { 0.0 } else { (self.done as f64 / self.total as f64).min(1.0) }
    }
}

impl LoadStage {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Loading(_) => "loading",
            Self::Ready(_) => "ready",
            Self::Rebuilding { .. } => "rebuilding",
            Self::Failed(_) => "failed",
            Self::Draining(_) => "draining",
        }
    }

    /// An error unless requests can run now.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        match self {
            Self::Rebuilding { why, .. } => Err(ApiError::rank_lost(format!("the model is being rebuilt: {why}"))),
            stage => stage.model().map(drop),
        }
    }

    /// The model, if it accepts requests.
    pub fn model(&self) -> Result<Arc<ServedModel>, ApiError> {
        match self {
            Self::Ready(model) | Self::Rebuilding { model, .. } => Ok(Arc::clone(model)),
            Self::Loading(Progress { doing, done, total }) => {
                let message = format!("the model is not ready yet: {doing}, {done} of {total}");
                Err(ApiError::unavailable(message, RETRY_AFTER).code("model_loading"))
            }
            Self::Unloaded => Err(ApiError::unavailable("the model is not loaded", RETRY_AFTER).code("model_loading")),
            Self::Failed(reason) => Err(ApiError::unavailable(reason, RETRY_AFTER).code("model_failed")),
            Self::Draining(_) => Err(ApiError::shutting_down()),
        }
    }

    /// The model, if it is loaded, even if it accepts no requests any more.
    pub(crate) fn loaded_model(&self) -> Option<Arc<ServedModel>> {
        match self {
            Self::Draining(model) => model.upgrade(),
            stage => stage.model().ok(),
        }
    }
}
