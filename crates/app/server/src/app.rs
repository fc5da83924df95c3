//! `App`: the state that all handlers share.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::HeaderValue;
use engine::Health;

use crate::auth::ApiKeys;
use crate::body_budget::BodyBudget;
use crate::cluster::{SharedInviter, SharedMonitor};
use crate::error::ApiError;
use crate::load_stage::LoadStage;
use crate::metrics::{ConnectionMetrics, Metrics};
use crate::responses::{ResponseStore, StoreLimits};
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
    /// The first keys; see [`App::replace_keys`].
    pub keys: ApiKeys,
    pub body_bytes_max: usize,
    /// Called on a thread for blocking work after large bodies: returns memory to the system.
    pub trim_memory: fn(),
    /// After this time without an event, a stream sends one, or a comment.
    pub keep_alive: Duration,
    /// Origins that CORS allows; `*` allows any. None by default.
    pub origins: Vec<HeaderValue>,
    /// Names by which clients may call a server without keys, beside `localhost` and addresses.
    pub allowed_hosts: Vec<String>,
    /// Whether `/v1/responses` stores what it answers, for `previous_response_id`.
    pub stores_responses: bool,
}

impl Config {
    pub fn new(model: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            aliases: Vec::new(),
            keys: ApiKeys::default(),
            body_bytes_max: BODY_BYTES_MAX,
            trim_memory: || {},
            keep_alive: KEEP_ALIVE,
            origins: Vec::new(),
            allowed_hosts: Vec::new(),
            stores_responses: true,
        }
    }
}

/// One served model, its load stage, and the metrics of its requests.
pub struct App {
    config: Config,
    keys: RwLock<Arc<ApiKeys>>,
    stage: RwLock<LoadStage>,
    cluster: RwLock<Option<SharedMonitor>>,
    inviter: RwLock<Option<SharedInviter>>,
    metrics: Metrics,
    bodies: Arc<BodyBudget>,
    responses: Arc<ResponseStore>,
    started: Instant,
    created: u64,
}

impl App {
    pub fn new(config: Config) -> Arc<Self> {
        let metrics = Metrics::new(&config.model);
        let bodies = BodyBudget::new(config.body_bytes_max, !config.keys.is_empty(), config.trim_memory);
        let stage = RwLock::new(LoadStage::Loading(Default::default()));
        let store_limits = StoreLimits { conversation_bytes_max: config.body_bytes_max, ..StoreLimits::DEFAULT };
        let responses = Arc::new(ResponseStore::new(store_limits));
        let keys = RwLock::new(Arc::new(config.keys.clone()));
        let (started, created) = (Instant::now(), crate::ids::unix_now());
        let (cluster, inviter) = (RwLock::default(), RwLock::default());
        Arc::new(Self { config, keys, stage, cluster, inviter, metrics, bodies, responses, started, created })
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

    /// Sets who knows the machines that run the model.
    pub fn set_cluster(&self, monitor: SharedMonitor) {
        *self.cluster.write().unwrap_or_else(PoisonError::into_inner) = Some(monitor);
    }

    /// `None` if the model runs on this machine alone.
    pub(crate) fn cluster(&self) -> Option<SharedMonitor> {
        self.cluster.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets who can let other machines join the cluster of this one.
    pub fn set_inviter(&self, inviter: SharedInviter) {
        *self.inviter.write().unwrap_or_else(PoisonError::into_inner) = Some(inviter);
    }

    /// `None` if this machine has no cluster.
    pub(crate) fn inviter(&self) -> Option<SharedInviter> {
        self.inviter.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The keys that are accepted now.
    pub(crate) fn keys(&self) -> Arc<ApiKeys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Accepts these keys instead of the current ones. A key that stays keeps its tenant.
    pub fn replace_keys(&self, keys: ApiKeys) {
        let mut current = self.keys.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(keys.with_tenants_of(&current));
    }

    /// The metrics for [`crate::Listener::with_metrics`].
    pub fn connection_metrics(&self) -> ConnectionMetrics {
        self.metrics.http().connections.clone()
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(crate) fn bodies(&self) -> &Arc<BodyBudget> {
        &self.bodies
    }

    pub(crate) fn responses(&self) -> &Arc<ResponseStore> {
        &self.responses
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
