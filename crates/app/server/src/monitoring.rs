//! `/health`, `/ready`, `/metrics` and `/status`, and the tracing span of each request.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use engine::RankReport;
use serde::{Deserialize, Serialize};
use text::SamplingDefaults;
use tracing::{Instrument, debug, info, info_span};
use utoipa::{IntoParams, ToSchema};

use crate::app::{App, SharedApp};
use crate::blocking;
use crate::error::{ApiError, RETRY_AFTER};
use crate::excerpt::excerpt;
use crate::ids;
use crate::load_stage::{LoadStage, Progress};
use crate::metrics::merge;
use crate::models::ModelSlot;

/// Routes without authentication.
pub fn public_router() -> Router<SharedApp> {
    Router::new().route("/health", get(health)).route("/ready", get(ready))
}

/// Routes that need an API key, if the server has keys.
pub fn protected_router() -> Router<SharedApp> {
    Router::new().route("/metrics", get(metrics)).route("/status", get(status))
}

/// Liveness: the process is running
#[utoipa::path(get, path = "/health", tag = "server", responses((status = 200, description = "The process runs", body = HealthBody)))]
async fn health() -> Json<HealthBody> {
    Json(HealthBody::OK)
}

#[derive(Serialize, ToSchema)]
#[schema(as = Health)]
pub struct HealthBody {
    /// Always `ok`
    #[schema(value_type = String)]
    status: &'static str,
}

impl HealthBody {
    pub const OK: Self = Self { status: "ok" };
}

/// Readiness: the model can serve requests now, and the server takes them
#[utoipa::path(
    get, path = "/ready", tag = "server",
    responses(
        (status = 200, description = "The model can answer", body = Readiness),
        (status = 503, description = "The model is loading, rebuilding or failed, the server shuts down, or requests wait for others for seconds", body = Readiness),
    )
)]
async fn ready(State(app): State<SharedApp>) -> Response {
    let (name, stage) = app
        .models()
        .default_slot()
        .map_or_else(|| (String::new(), LoadStage::Unloaded), |slot| (slot.name().to_owned(), slot.stage()));
    let mut readiness = Readiness::new(&name, &stage);
    // A server that loads models when they are asked for can take requests as long as it does not shut down.
    let loads_itself = app.models().library().is_some() && !matches!(stage, LoadStage::Draining(_));
    let ready = if loads_itself { Ok(()) } else { stage.check_ready() };
    let ready = match ready {
        Ok(()) if !blocking::takes_work().await => Err(ApiError::unavailable(BUSY, RETRY_AFTER)),
        ready => ready,
    };
    match ready {
        Ok(()) => Json(readiness).into_response(),
        Err(error) => {
            let wait = error.retry_after.map_or(1, |wait| wait.as_secs());
            readiness.reason.get_or_insert(error.message);
            (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, wait.to_string())], Json(readiness))
                .into_response()
        }
    }
}

/// The model could answer, but requests do not get to it.
const BUSY: &str = "the server takes no requests: all threads that prepare them are busy";

#[derive(Serialize, ToSchema)]
pub struct Readiness {
    model: String,
    /// `unloaded`, `loading`, `ready`, `rebuilding`, `failed` or `draining`
    #[schema(value_type = String)]
    state: &'static str,
    /// Why the model is not ready, or takes no requests
    reason: Option<String>,
    progress: Option<ProgressBody>,
}

/// Progress of loading
#[derive(Serialize, ToSchema)]
pub struct ProgressBody {
    doing: String,
    done: u64,
    total: u64,
    /// From 0 to 1
    fraction: f64,
}

impl Readiness {
    fn new(model: &str, stage: &LoadStage) -> Self {
        let progress = match stage {
            LoadStage::Loading(progress) => Some(ProgressBody::from(progress)),
            _ => None,
        };
        let reason = stage.check_ready().err().map(|error| error.message);
        Self { model: model.to_owned(), state: stage.name(), reason, progress }
    }
}

impl From<&Progress> for ProgressBody {
    fn from(progress: &Progress) -> Self {
        let Progress { doing, done, total } = progress.clone();
        Self { doing, done, total, fraction: progress.fraction() }
    }
}

/// Metrics in Prometheus' text format
#[utoipa::path(
    get, path = "/metrics", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "OpenMetrics text", body = String, content_type = METRICS_TYPE),
        (status = 401, description = "No key, or an unknown one", body = crate::error::OpenAiErrorBody),
    )
)]
async fn metrics(State(app): State<SharedApp>) -> Response {
    let of_model = |slot: Arc<ModelSlot>| {
        let model = slot.stage().loaded_model();
        let chain = slot.cluster().map(|monitor| monitor.snapshot());
        slot.metrics().text(model.as_ref().map(|model| &model.service), chain.as_ref())
    };
    let models = app.models().slots().into_iter().map(of_model);
    let texts: Vec<_> = [app.metrics().text()].into_iter().chain(models).collect();
    ([(header::CONTENT_TYPE, METRICS_TYPE)], merge(&texts)).into_response()
}

pub(crate) const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Which model a question is about
#[derive(Debug, Deserialize, IntoParams)]
pub struct ModelQuery {
    /// Its name; by default the model that requests without a name get
    pub model: Option<String>,
}

/// The state of the server and of one model, for the chat page
#[utoipa::path(
    get, path = "/status", tag = "server", security(("key" = []), ("x-api-key" = [])),
    params(ModelQuery),
    responses(
        (status = 200, description = "The current state", body = ServerStatus),
        (status = 401, description = "No key, or an unknown one", body = crate::error::OpenAiErrorBody),
        (status = 404, description = "There is no such model", body = crate::error::OpenAiErrorBody),
    )
)]
async fn status(
    State(app): State<SharedApp>,
    query: Result<Query<ModelQuery>, QueryRejection>,
) -> Result<Json<ServerStatus>, ApiError> {
    let slot = slot_of(&app, query).await?;
    let stage = slot.as_ref().map_or(LoadStage::Unloaded, |slot| slot.stage());
    let readiness = Readiness::new(slot.as_ref().map_or("", |slot| slot.name()), &stage);
    let model = stage.loaded_model();
    let (stats, page_tokens) = model
        .as_ref()
        .map_or_else(Default::default, |model| (model.service.stats(), model.service.capacity().page_tokens));
    let ranks: Vec<_> =
        model.as_ref().map_or_else(Vec::new, |model| model.service.ranks().iter().map(RankStatus::from).collect());
    Ok(Json(ServerStatus {
        model: readiness.model,
        state: readiness.state,
        reason: readiness.reason,
        progress: readiness.progress,
        context: model.as_ref().map(|model| model.context),
        memory_bytes: model.as_ref().map(|model| model.memory_bytes),
        sampling_defaults: model.as_ref().map(|model| model.defaults.sampling().into()),
        digest: model.as_ref().and_then(|model| model.digest.clone()),
        resident_bytes: resident_bytes().map(|own| own + ranks.iter().map(|rank| rank.resident_bytes).sum::<u64>()),
        kv: KvStatus {
            tokens_total: stats.pages_total * page_tokens,
            tokens_used: stats.pages_total.saturating_sub(stats.pages_free) * page_tokens,
            tokens_cached: stats.pages_cached * page_tokens,
        },
        requests: RequestStatus { running: stats.running, waiting: stats.waiting, finished: stats.finished.total() },
        tokens: TokenStatus { prompt_total: stats.prefix_lookup_tokens, generated_total: stats.decoded_tokens },
        ranks,
        uptime_s: app.uptime().as_secs_f64(),
    }))
}

/// The model that a question is about; `None` if none is named, and none was used yet.
pub async fn slot_of(
    app: &App,
    query: Result<Query<ModelQuery>, QueryRejection>,
) -> Result<Option<Arc<ModelSlot>>, ApiError> {
    let Query(ModelQuery { model }) = query.map_err(|error| ApiError::invalid("model", error.body_text()))?;
    match model {
        Some(name) => app.slot(Some(&name)).await.map(Some),
        None => Ok(app.models().default_slot()),
    }
}

/// The resident set size of this process; unknown where there is no `/proc`.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

#[derive(Serialize, ToSchema)]
#[schema(as = Status)]
pub struct ServerStatus {
    model: String,
    /// `unloaded`, `loading`, `ready`, `rebuilding`, `failed` or `draining`
    #[schema(value_type = String)]
    state: &'static str,
    reason: Option<String>,
    progress: Option<ProgressBody>,
    /// Context size: maximum tokens of prompt and output together
    context: Option<usize>,
    /// Memory that the weights and the KV cache may take
    memory_bytes: Option<u64>,
    sampling_defaults: Option<SamplingDefaultsStatus>,
    /// Digest of the weights, if it was computed
    digest: Option<String>,
    /// Memory that this process and its ranks have in RAM now
    resident_bytes: Option<u64>,
    kv: KvStatus,
    requests: RequestStatus,
    tokens: TokenStatus,
    /// The rank processes of the model; empty if there is only one process
    ranks: Vec<RankStatus>,
    uptime_s: f64,
}

/// The sampling settings of a request that gives none
#[derive(Serialize, ToSchema)]
pub struct SamplingDefaultsStatus {
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
}

impl From<SamplingDefaults> for SamplingDefaultsStatus {
    fn from(defaults: SamplingDefaults) -> Self {
        let SamplingDefaults { temperature, top_p, top_k, min_p, repetition_penalty } = defaults;
        let (presence_penalty, frequency_penalty) = (0.0, 0.0);
        Self { temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty }
    }
}

#[derive(Serialize, ToSchema)]
pub struct KvStatus {
    tokens_total: usize,
    tokens_used: usize,
    /// Tokens in free pages that the prefix cache can still reuse
    tokens_cached: usize,
}

#[derive(Serialize, ToSchema)]
pub struct RequestStatus {
    running: usize,
    waiting: usize,
    finished: u64,
}

#[derive(Serialize, ToSchema)]
pub struct TokenStatus {
    prompt_total: u64,
    generated_total: u64,
}

/// One rank process of the model
#[derive(Serialize, ToSchema)]
pub struct RankStatus {
    rank: usize,
    ready: bool,
    /// Human-readable state, such as `ready`, `starting` or `loading`
    #[schema(value_type = String)]
    state: &'static str,
    /// Process id, while the process runs
    pid: Option<u32>,
    /// Number of earlier processes of this rank
    restarts: u64,
    weight_bytes: u64,
    kv_bytes: u64,
    resident_bytes: u64,
    /// Steps since the process started
    steps: u64,
    /// Time spent in steps
    step_s: f64,
    /// Time in steps that the rank waited for other ranks
    wait_s: f64,
}

impl From<&RankReport> for RankStatus {
    fn from(report: &RankReport) -> Self {
        Self {
            rank: report.rank.index(),
            ready: report.ready,
            state: report.state,
            pid: report.pid,
            restarts: report.restarts,
            weight_bytes: report.weight_bytes,
            kv_bytes: report.kv_bytes,
            resident_bytes: report.resident_bytes,
            steps: report.steps,
            step_s: report.step_time.as_secs_f64(),
            wait_s: report.wait_time.as_secs_f64(),
        }
    }
}

/// One span for each request, and one log line when its response starts. Pages, probes and scrapers ask often, so their
/// requests are logged at debug level.
pub async fn trace(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    let id = ids::new_id("req_");
    let is_routine = is_routine(request.uri().path());
    let method = excerpt(request.method().as_str()).into_owned();
    let path = excerpt(request.uri().path()).into_owned();
    let span = info_span!("http", request = %id);
    let started = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let error = response.extensions().get::<ApiError>();
    if let Some(error) = error {
        app.metrics().http().failed(error);
    }
    let error = error.map(|error| error.message.as_str());
    span.in_scope(|| {
        let (status, ms) = (response.status().as_u16(), started.elapsed().as_millis() as u64);
        match is_routine {
            true => debug!(method, path, status, ms, error, "response"),
            false => info!(method, path, status, ms, error, "response"),
        }
    });
    if let Ok(value) = HeaderValue::from_str(&id) {
        // OpenAI's clients read the first header, Anthropic's the second.
        response.headers_mut().insert(HeaderName::from_static("x-request-id"), value.clone());
        response.headers_mut().insert(HeaderName::from_static("request-id"), value);
    }
    response
}

/// Whether this is the path of a probe, of `/metrics`, `/status` or `/v1/cluster`, or of a file of the page.
fn is_routine(path: &str) -> bool {
    matches!(path, "/" | "/health" | "/ready" | "/metrics" | "/status" | "/v1/cluster") || path.starts_with("/page/")
}

#[derive(utoipa::OpenApi)]
#[openapi(paths(health, ready, metrics, status))]
pub struct MonitoringPaths;
