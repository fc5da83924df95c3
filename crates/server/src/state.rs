//! How far the model is: it loads while the server already answers, and requests are told so.

use std::sync::Arc;

use crate::error::{ApiError, SOON};
use crate::served::Served;

/// Where a model is on its way from files to answers.
#[derive(Clone)]
pub enum LoadStage {
    Loading(Progress),
    Ready(Arc<Served>),
    /// It lost a part of itself, and gets it back; why. Requests are taken, and wait.
    Rebuilding {
        served: Arc<Served>,
        why: Arc<str>,
    },
    /// It will not become ready, or has stopped; why.
    Failed(String),
    /// Answers under way are finished, new ones are not begun.
    Draining,
}

/// How far loading is: `done` of `total` of whatever is being done.
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
            Self::Loading(_) => "loading",
            Self::Ready(_) => "ready",
            Self::Rebuilding { .. } => "rebuilding",
            Self::Failed(_) => "failed",
            Self::Draining => "draining",
        }
    }

    /// That a request would be run at once, but for others before it.
    pub fn check_ready(&self) -> Result<(), ApiError> {
        match self {
            Self::Rebuilding { why, .. } => Err(ApiError::rank_lost(format!("the model is being rebuilt: {why}"))),
            stage => stage.served().map(drop),
        }
    }

    /// The model that takes requests.
    pub fn served(&self) -> Result<Arc<Served>, ApiError> {
        match self {
            Self::Ready(served) | Self::Rebuilding { served, .. } => Ok(Arc::clone(served)),
            Self::Loading(Progress { doing, done, total }) => {
                let message = format!("the model is not ready yet: {doing}, {done} of {total}");
                Err(ApiError::unavailable(message, SOON).code("model_loading"))
            }
            Self::Failed(reason) => Err(ApiError::unavailable(reason.as_str(), SOON).code("model_failed")),
            Self::Draining => Err(ApiError::shutting_down()),
        }
    }
}
