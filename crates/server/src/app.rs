//! `App`: the state that all handlers share.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use engine::Health;

use crate::auth::ApiKeys;
use crate::body_budget::BodyBudget;
use crate::error::ApiError;
use crate::load_stage::LoadStage;
use crate::metrics::Metrics;
use crate::served_model::ServedModel;

/// The default of [`Config::body_bytes_max`].
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Proxies close connections that are idle for 30 to 60 seconds.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub(crate) type SharedApp = Arc<App>;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name under which the model is served.
    pub model: String,
    /// Further names that requests may give.
    pub aliases: Vec<String>,
    pub keys: ApiKeys,
    pub body_bytes_max: usize,
    /// After this time without an event, a stream sends a comment.
    pub keep_alive: Duration,
    /// Origins that CORS allows; `*` allows any. None by default.
    pub origins: Vec<HeaderValue>,
}

impl Config {
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            aliases: Vec::new(),
            keys: ApiKeys::default(),
            body_bytes_max: BODY_BYTES_MAX,
            keep_alive: KEEP_ALIVE,
            origins: Vec::new(),
        }
    }
}

/// One served model, its load stage, and the metrics of its requests.
pub struct App {
    config: Config,
    stage: RwLock<LoadStage>,
    metrics: Metrics,
    bodies: Arc<BodyBudget>,
    started: Instant,
    created: u64,
}

impl App {
    pub fn new(config: Config) -> Arc<Self> {
        let metrics = Metrics::new(&config.model);
        let bodies = BodyBudget::new(config.body_bytes_max, !config.keys.is_empty());
        let stage = RwLock::new(LoadStage::Loading(Default::default()));
        Arc::new(Self { config, stage, metrics, bodies, started: Instant::now(), created: crate::ids::unix_now() })
    }

    pub fn set_stage(&self, stage: LoadStage) {
        *self.stage.write().unwrap_or_else(PoisonError::into_inner) = stage;
    }

    /// The stage that was set, updated by the health of the engine.
    pub fn stage(&self) -> LoadStage {
        let stage = self.stage.read().unwrap_or_else(PoisonError::into_inner).clone();
        let LoadStage::Ready(model) = stage else { return stage };
        if model.service.has_stopped() {
            let reason = "the model has stopped by a mistake of this program: start the server again";
            return LoadStage::Failed(reason.to_owned());
        }
        match model.service.health() {
            Health::Ready => LoadStage::Ready(model),
            Health::Rebuilding { why } => LoadStage::Rebuilding { model, why },
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(crate) fn bodies(&self) -> &Arc<BodyBudget> {
        &self.bodies
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The start time of the server, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    pub(crate) fn has_model(&self, model: &str) -> bool {
        self.config.model == model || self.config.aliases.iter().any(|alias| alias == model)
    }

    /// The model with this name; `None` selects the served model.
    pub fn model(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        match name {
            Some(name) if !self.has_model(name) => Err(ApiError::unknown_model(name)),
            _ => self.stage().model(),
        }
    }
}
