//! `App`: the state that all handlers share.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::HeaderValue;

use crate::auth::ApiKeys;
use crate::blocking;
use crate::body_budget::BodyBudget;
use crate::cluster::{SharedInviter, SharedMonitor};
use crate::error::ApiError;
use crate::generation::CompilerThreads;
use crate::kept_answers::{KeptAnswers, KeptLimits};
use crate::load_stage::LoadStage;
use crate::metrics::{ConnectionMetrics, ServerMetrics};
use crate::models::{LibraryModel, LibraryOptions, ModelLibrary, ModelSlot, ModelUse, Models};
use crate::responses::{ResponseStore, StoreLimits};
use crate::served_model::ModelDescription;

/// The default of [`Config::body_bytes_max`].
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Proxies close connections that are idle for 30 to 60 seconds.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

pub(crate) type SharedApp = Arc<App>;

/// The settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name under which the one model is served. With a library its models have names of their own.
    pub model: String,
    /// Further names of the one model.
    pub aliases: Vec<String>,
    /// Whether a request has to name a model that is here. Otherwise a server of one model answers it whatever the name.
    pub strict_names: bool,
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
            strict_names: false,
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

/// The models of a server, and what all requests share.
pub struct App {
    config: Config,
    keys: RwLock<Arc<ApiKeys>>,
    models: Arc<Models>,
    metrics: ServerMetrics,
    bodies: Arc<BodyBudget>,
    compiler_threads: CompilerThreads,
    responses: Arc<ResponseStore>,
    kept_answers: Arc<KeptAnswers>,
    started: Instant,
    created: u64,
}

impl App {
    /// A server of one model, which is loading.
    pub fn new(config: Config) -> Arc<Self> {
        let models = Models::single(&config.model);
        Self::with_models(config, models)
    }

    /// A server of the models of a library.
    pub fn with_library(config: Config, library: Arc<dyn ModelLibrary>, options: LibraryOptions) -> Arc<Self> {
        let models = Models::of_library(library, options, config.trim_memory);
        Self::with_models(config, models)
    }

    fn with_models(config: Config, models: Models) -> Arc<Self> {
        let bodies = BodyBudget::new(config.body_bytes_max, !config.keys.is_empty(), config.trim_memory);
        let store_limits = StoreLimits { conversation_bytes_max: config.body_bytes_max, ..StoreLimits::DEFAULT };
        let responses = Arc::new(ResponseStore::new(store_limits));
        let kept_answers = KeptAnswers::new(KeptLimits::DEFAULT);
        let keys = RwLock::new(Arc::new(config.keys.clone()));
        let (started, created) = (Instant::now(), crate::ids::unix_now());
        let (models, metrics) = (Arc::new(models), ServerMetrics::new());
        let compiler_threads = CompilerThreads::default();
        Arc::new(Self {
            config,
            keys,
            models,
            metrics,
            bodies,
            compiler_threads,
            responses,
            kept_answers,
            started,
            created,
        })
    }

    /// Sets the stage of the one model.
    pub fn set_stage(&self, stage: LoadStage) {
        self.models.slots().iter().for_each(|slot| slot.set_stage(stage.clone()));
    }

    /// The stage of the model that requests without a name get.
    pub fn stage(&self) -> LoadStage {
        self.models.default_slot().map_or(LoadStage::Unloaded, |slot| slot.stage())
    }

    /// Sets who knows the machines that run the one model.
    pub fn set_cluster(&self, monitor: SharedMonitor) {
        self.models.slots().iter().for_each(|slot| slot.set_cluster(Arc::clone(&monitor)));
    }

    /// Who can let other machines join the cluster of this one; `None` if it has none.
    pub(crate) fn inviter(&self) -> Option<SharedInviter> {
        self.models.slots().iter().find_map(|slot| slot.inviter())
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn models(&self) -> &Arc<Models> {
        &self.models
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

    pub(crate) fn metrics(&self) -> &ServerMetrics {
        &self.metrics
    }

    pub(crate) fn bodies(&self) -> &Arc<BodyBudget> {
        &self.bodies
    }

    pub(crate) fn compiler_threads(&self) -> &CompilerThreads {
        &self.compiler_threads
    }

    pub(crate) fn responses(&self) -> &Arc<ResponseStore> {
        &self.responses
    }

    pub(crate) fn kept_answers(&self) -> &Arc<KeptAnswers> {
        &self.kept_answers
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The start time of the server, in seconds since 1970.
    pub(crate) fn created(&self) -> u64 {
        self.created
    }

    /// The models that requests may name.
    pub(crate) async fn list(&self) -> Result<Vec<LibraryModel>, ApiError> {
        if let Some(library) = self.models.library().cloned() {
            return blocking::run(move || Ok(library.list())).await;
        }
        let model = |slot: Arc<ModelSlot>| {
            let description =
                slot.stage().model().map_or_else(|_| ModelDescription::default(), |m| m.description.clone());
            LibraryModel {
                name: slot.name().to_owned(),
                bytes: description.file_bytes,
                modified: description.modified,
                description,
            }
        };
        Ok(self.models.slots().into_iter().map(model).collect())
    }

    /// The slot of the model with this name; `None` selects the default one. Whether it is loaded does not matter.
    pub(crate) async fn slot(&self, name: Option<&str>) -> Result<Arc<ModelSlot>, ApiError> {
        let Some(name) = name else { return self.default_slot().await };
        if let Some(slot) = self.models.slot(name) {
            return Ok(slot);
        }
        match self.models.library().cloned() {
            None if self.config.strict_names && !self.config.aliases.iter().any(|alias| alias == name) => {
                Err(ApiError::unknown_model(name))
            }
            None => self.default_slot().await,
            Some(library) => {
                let asked = name.to_owned();
                let found = blocking::run(move || Ok(library.resolve(&asked))).await?;
                found.map(|found| self.models.slot_of(&found)).ok_or_else(|| ApiError::unknown_model(name))
            }
        }
    }

    /// Whether there is a model with this name.
    pub(crate) async fn has_model(&self, name: &str) -> Result<bool, ApiError> {
        let is_known = self.models.slot(name).is_some() || self.config.aliases.iter().any(|alias| alias == name);
        match self.models.library().cloned() {
            Some(library) if !is_known => {
                let asked = name.to_owned();
                blocking::run(move || Ok(library.resolve(&asked).is_some())).await
            }
            _ => Ok(is_known),
        }
    }

    async fn default_slot(&self) -> Result<Arc<ModelSlot>, ApiError> {
        if let Some(slot) = self.models.default_slot() {
            return Ok(slot);
        }
        let first = self.list().await?.into_iter().next();
        let first = first.ok_or_else(|| {
            let message = "there is no model here: `consort pull NAME`, or Ollama's /api/pull, fetches one";
            ApiError::new(crate::ApiErrorKind::NotFound, message).code("model_not_found")
        })?;
        Ok(self.models.slot_of(&first.name))
    }

    /// The model with this name, loaded; `None` selects the default one.
    pub async fn model(&self, name: Option<&str>) -> Result<ModelUse, ApiError> {
        let slot = self.slot(name).await?;
        self.models.acquire(&slot).await
    }
}
