//! `App`: what all handlers share.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use engine::Health;

use crate::auth::ApiKeys;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::served::Served;
use crate::state::LoadStage;

/// The longest body, unless told otherwise.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Proxies cut connections that are silent for a minute or half of one.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub(crate) type Shared = Arc<App>;

/// What the server is told before it starts.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name under which the model is served.
    pub model: String,
    /// Further names by which requests may call it.
    pub aliases: Vec<String>,
    pub keys: ApiKeys,
    pub body_bytes_max: usize,
    /// Silence after which a comment is sent in a stream.
    pub keep_alive: Duration,
    /// Origins whose pages may call this server; `*` is any. None by default.
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

/// One served model, on its way from loading to draining, and what is known about its requests.
pub struct App {
    config: Config,
    stage: RwLock<LoadStage>,
    metrics: Metrics,
    started: Instant,
    created: u64,
}

impl App {
    pub fn new(config: Config) -> Arc<Self> {
        let metrics = Metrics::new(&config.model);
        let stage = RwLock::new(LoadStage::Loading(Default::default()));
        Arc::new(Self { config, stage, metrics, started: Instant::now(), created: crate::identity::unix_now() })
    }

    pub fn set_stage(&self, stage: LoadStage) {
        *self.stage.write().unwrap_or_else(PoisonError::into_inner) = stage;
    }

    /// Where the model is now: what was set, and what has become of it since.
    pub fn stage(&self) -> LoadStage {
        let stage = self.stage.read().unwrap_or_else(PoisonError::into_inner).clone();
        let LoadStage::Ready(served) = stage else { return stage };
        if served.service.has_stopped() {
            let reason = "the model has stopped by a mistake of this program: start the server again";
            return LoadStage::Failed(reason.to_owned());
        }
        match served.service.health() {
            Health::Ready => LoadStage::Ready(served),
            Health::Rebuilding { why } => LoadStage::Rebuilding { served, why },
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// When the model was first offered, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    pub(crate) fn knows(&self, model: &str) -> bool {
        self.config.model == model || self.config.aliases.iter().any(|alias| alias == model)
    }

    /// The model that a request names; naming none means the one there is.
    pub fn served(&self, model: Option<&str>) -> Result<Arc<Served>, ApiError> {
        match model {
            Some(name) if !self.knows(name) => Err(ApiError::unknown_model(name)),
            _ => self.stage().served(),
        }
    }
}
