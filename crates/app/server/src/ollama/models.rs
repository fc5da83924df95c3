//! `/api/tags`, `/api/ps`, `/api/show` and `/api/version`: the models, as Ollama describes them.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Json;
use axum::extract::State;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::{LATEST, slot};
use crate::app::{App, SharedApp};
use crate::blocking;
use crate::error::{ApiError, OllamaErrorBody};
use crate::error_responses::OllamaErrors;
use crate::json_body::JsonBody;
use crate::models::{LibraryModel, ModelDetails, ModelSlot};
use crate::served_model::ModelDescription;

/// The release of Ollama whose API this is. Clients require a certain one, so it is not the version of this server.
const OLLAMA_VERSION: &str = "0.32.15";
/// `expires_at` for a model that is never unloaded: this long after the start of the server.
const KEPT: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

#[derive(Serialize, ToSchema)]
pub struct OllamaModels {
    models: Vec<OllamaModel>,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaModel {
    name: String,
    model: String,
    /// RFC 3339
    modified_at: String,
    /// Bytes of the weights in the model's files; 0 while the model loads
    size: u64,
    /// SHA-256 of this description, not of the weights
    digest: String,
    details: OllamaModelDetails,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaRunningModels {
    models: Vec<OllamaRunningModel>,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaRunningModel {
    name: String,
    model: String,
    /// Bytes of memory of the weights and the KV cache
    size: u64,
    /// SHA-256 of the model's description, not of its weights
    digest: String,
    details: OllamaModelDetails,
    /// When the model is unloaded if no request comes; a distant date: when another one needs the memory
    expires_at: String,
    /// Always 0
    size_vram: u64,
    /// Maximum tokens of prompt and output together
    context_length: usize,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaModelDetails {
    parent_model: String,
    /// `gguf` or `safetensors`
    format: String,
    /// The architecture
    family: String,
    families: Vec<String>,
    /// Such as `7.6B`
    parameter_size: String,
    /// The number format of the weights, such as `BF16` or `Q4_K_M`
    quantization_level: String,
}

/// The name of a model
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaModelName {
    /// Model name, with or without `:latest`
    pub model: Option<String>,
    /// The older name of `model`
    pub name: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaModelInfo {
    modelfile: String,
    /// The default sampling settings, one per line
    parameters: String,
    /// The chat template, in Jinja
    template: String,
    details: OllamaModelDetails,
    /// GGUF's keys: `general.architecture`, `general.parameter_count`, and sizes
    #[schema(value_type = Object)]
    model_info: Map<String, Value>,
    /// `completion`, `tools`, `thinking`
    #[schema(value_type = Vec<String>)]
    capabilities: Vec<&'static str>,
    modified_at: String,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaVersion {
    /// The release of Ollama whose API this server follows; its own version is at `/version`
    #[schema(value_type = String)]
    version: &'static str,
}

/// List the models
#[utoipa::path(
    get, path = "/api/tags", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The models", body = OllamaModels),
        (status = 401, description = "No key, or an unknown one", body = OllamaErrorBody),
    )
)]
pub async fn list(State(app): State<SharedApp>) -> Result<Json<OllamaModels>, ApiError> {
    let model = |LibraryModel { name, bytes, modified, description }: LibraryModel| {
        let name = tagged_name(&name);
        OllamaModel {
            model: name.clone(),
            modified_at: modified_at(&app, modified),
            size: bytes,
            digest: digest(&name, &description),
            details: OllamaModelDetails::from(&description),
            name,
        }
    };
    Ok(Json(OllamaModels { models: app.list().await?.into_iter().map(model).collect() }))
}

/// List the models that are loaded
#[utoipa::path(
    get, path = "/api/ps", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The loaded models", body = OllamaRunningModels),
        (status = 401, description = "No key, or an unknown one", body = OllamaErrorBody),
    )
)]
pub async fn running(State(app): State<SharedApp>) -> Json<OllamaRunningModels> {
    let model = |slot: Arc<ModelSlot>| {
        let model = slot.stage().model().ok()?;
        let name = tagged_name(slot.name());
        let expires = match slot.expires_at() {
            Some(at) => SystemTime::now() + at.saturating_duration_since(Instant::now()),
            None => SystemTime::UNIX_EPOCH + Duration::from_secs(app.created()).saturating_add(KEPT),
        };
        Some(OllamaRunningModel {
            model: name.clone(),
            size: model.memory_bytes,
            digest: digest(&name, &model.description),
            details: OllamaModelDetails::from(&model.description),
            expires_at: rfc3339(expires),
            size_vram: 0,
            context_length: model.context,
            name,
        })
    };
    Json(OllamaRunningModels { models: app.models().slots().into_iter().filter_map(model).collect() })
}

/// Describe the model
#[utoipa::path(
    post, path = "/api/show", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaModelName,
    responses((status = 200, description = "The model", body = OllamaModelInfo), OllamaErrors)
)]
pub async fn show(
    State(app): State<SharedApp>,
    JsonBody(request, _): JsonBody<OllamaModelName>,
) -> Result<Json<OllamaModelInfo>, ApiError> {
    let slot = slot(&app, &model_name(request)?).await?;
    let details = match (slot.stage().loaded_model(), app.models().library()) {
        (Some(model), _) => ModelDetails::from(&*model),
        (None, Some(library)) => {
            let (library, slot) = (Arc::clone(library), Arc::clone(&slot));
            blocking::run(move || Ok(library.details(slot.name())?)).await?
        }
        (None, None) => ModelDetails::from(&*slot.stage().model()?),
    };
    Ok(Json(OllamaModelInfo {
        modelfile: format!("FROM {}\n", tagged_name(slot.name())),
        parameters: parameters(&details),
        details: OllamaModelDetails::from(&details.description),
        model_info: model_info(&details),
        capabilities: capabilities(&details),
        modified_at: modified_at(&app, details.description.modified),
        template: details.template.unwrap_or_default(),
    }))
}

/// Get the version of Ollama's API
#[utoipa::path(
    get, path = "/api/version", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The version", body = OllamaVersion),
        (status = 401, description = "No key, or an unknown one", body = OllamaErrorBody),
    )
)]
pub async fn version() -> Json<OllamaVersion> {
    Json(OllamaVersion { version: OLLAMA_VERSION })
}

/// The name in either of the two fields.
pub fn model_name(OllamaModelName { model, name }: OllamaModelName) -> Result<String, ApiError> {
    let given = model.filter(|model| !model.is_empty()).or(name).filter(|name| !name.is_empty());
    given.ok_or_else(|| ApiError::invalid("model", "model is required"))
}

/// The name, with a tag.
fn tagged_name(name: &str) -> String {
    let last = name.rsplit('/').next().unwrap_or(name);
    if last.contains(':') { name.to_owned() } else { format!("{name}{LATEST}") }
}

fn modified_at(app: &App, modified: Option<SystemTime>) -> String {
    rfc3339(modified.unwrap_or_else(|| SystemTime::UNIX_EPOCH + Duration::from_secs(app.created())))
}

fn rfc3339(time: SystemTime) -> String {
    Timestamp::try_from(time).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

/// 64 hexadecimal digits, as clients expect. They change when another model is served.
fn digest(name: &str, description: &ModelDescription) -> String {
    let digest = Sha256::digest(format!("{name} {description:?}"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn capabilities(model: &ModelDetails) -> Vec<&'static str> {
    // Every chat template can be given tools: where it has no place for them, they are written into the system prompt.
    let tools = model.template.is_some().then_some("tools");
    let thinking = model.has_reasoning.then_some("thinking");
    ["completion"].into_iter().chain(tools).chain(thinking).collect()
}

/// The settings of requests that give none, as lines of a Modelfile.
fn parameters(model: &ModelDetails) -> String {
    let defaults = model.defaults.sampling();
    let lines = [
        ("temperature", defaults.temperature.to_string()),
        ("top_p", defaults.top_p.to_string()),
        ("top_k", defaults.top_k.to_string()),
        ("min_p", defaults.min_p.to_string()),
        ("repeat_penalty", defaults.repetition_penalty.to_string()),
        ("num_ctx", model.context.to_string()),
    ];
    lines.map(|(name, value)| format!("{name:<30} {value}")).join("\n")
}

fn model_info(model: &ModelDetails) -> Map<String, Value> {
    let description = &model.description;
    let architecture = &description.architecture;
    let sizes = [
        ("context_length", description.context_trained),
        ("embedding_length", description.hidden),
        ("block_count", description.layers),
        ("attention.head_count", description.heads),
        ("attention.head_count_kv", description.kv_heads),
        ("vocab_size", model.vocab),
    ];
    let general = [
        ("general.architecture".to_owned(), json!(architecture)),
        ("general.parameter_count".to_owned(), json!(description.parameters)),
    ];
    let sizes = sizes.into_iter().map(|(name, size)| (format!("{architecture}.{name}"), json!(size)));
    general.into_iter().chain(sizes).collect()
}

impl From<&ModelDescription> for OllamaModelDetails {
    fn from(description: &ModelDescription) -> Self {
        Self {
            parent_model: String::new(),
            format: description.file_format.clone(),
            family: description.architecture.clone(),
            families: vec![description.architecture.clone()],
            parameter_size: rounded(description.parameters),
            quantization_level: description.weight_format.clone(),
        }
    }
}

/// `134.52M`, `7.6B`; empty for 0.
fn rounded(count: u64) -> String {
    match count as f64 {
        0.0 => String::new(),
        count if count >= 1e9 => format!("{:.1}B", count / 1e9),
        count if count >= 1e6 => format!("{:.2}M", count / 1e6),
        count => format!("{:.2}K", count / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_tag() {
        for (name, expected) in
            [("m", "m:latest"), ("owner/m:Q4_K_M", "owner/m:Q4_K_M"), ("host:80/m", "host:80/m:latest")]
        {
            assert_eq!(tagged_name(name), expected);
        }
    }

    #[test]
    fn counts_are_rounded() {
        for (count, expected) in
            [(0, ""), (4_200, "4.20K"), (134_515_008, "134.52M"), (999_999_999, "1000.00M"), (7_615_616_512, "7.6B")]
        {
            assert_eq!(rounded(count), expected);
        }
    }
}
