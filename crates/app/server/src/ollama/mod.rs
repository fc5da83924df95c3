//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and the routes that describe and manage models.
//!
//! Names may have the tag `:latest`, which Ollama's clients add.

mod convert;
mod embed;
mod encoder;
mod manage;
mod models;
mod request;
mod response;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::app::{App, SharedApp};
use crate::error::{ApiError, ApiErrorKind, OllamaErrorBody};
use crate::error_responses::OllamaErrors;
use crate::excerpt::excerpt;
use crate::generation::{ChoiceOutput, Generation};
use crate::json_body::JsonBody;
use crate::models::{ModelSlot, ModelUse};
use crate::served_model::ServedModel;
use crate::sse;
use crate::stream::{self, StreamEncoder};
use encoder::{OllamaEncoder, ReplyHeader, ReplyKind};
use request::{OllamaChatRequest, OllamaGenerateRequest, OllamaKeepAlive};
use response::{OllamaChatReply, OllamaDoneReason, OllamaGenerateReply};

pub fn router() -> Router<SharedApp> {
    Router::new()
        .route("/api/chat", post(chat))
        .route("/api/generate", post(generate))
        .route("/api/embed", post(embed::create))
        .route("/api/embeddings", post(embed::create_one))
        .route("/api/tags", get(models::list))
        .route("/api/ps", get(models::running))
        .route("/api/show", post(models::show))
        .route("/api/version", get(models::version))
        .route("/api/pull", post(manage::pull))
        .route("/api/create", post(manage::create))
        .route("/api/copy", post(manage::copy))
        .route("/api/push", post(manage::push))
        .route("/api/delete", delete(manage::delete))
}

#[derive(OpenApi)]
#[openapi(
    paths(
        chat,
        generate,
        embed::create,
        embed::create_one,
        models::list,
        models::running,
        models::show,
        models::version,
        manage::pull,
        manage::create,
        manage::copy,
        manage::delete
    ),
    components(schemas(OllamaErrorBody))
)]
pub struct OllamaPaths;

/// Continue a conversation
///
/// The reply is a stream of JSON objects, one per line, unless `stream` is false. A stream ends with an object whose `done`
/// is true, or with `{"error": …}`.
#[utoipa::path(
    post, path = "/api/chat", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaChatRequest,
    responses(
        (status = 200, description = "The answer",
            content((OllamaChatReply = "application/json"), (OllamaChatReply = "application/x-ndjson"))),
        OllamaErrors,
    )
)]
async fn chat(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<OllamaChatRequest>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let slot = slot(&app, &request.model).await?;
    let header = ReplyHeader { kind: ReplyKind::Chat, model: request.model.clone() };
    let keep = KeepAlive::new(request.keep_alive.as_ref())?;
    if request.messages.as_ref().is_none_or(Vec::is_empty) {
        return idle(&app, &slot, &header, keep).await;
    }
    let model = keep.acquire(&app, &slot).await?;
    let streams = request.stream.unwrap_or(true);
    let convert = move |model: &ServedModel| {
        let request = convert::chat_request(model, request)?;
        let (tokenizer, logprobs) = (model.tokenizer.clone(), request.logprobs.is_some());
        Ok((request, OllamaEncoder::new(header, tokenizer, logprobs, false, started)))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    respond(generation, encoder, streams, app.config().keep_alive).await
}

/// Answer a prompt
///
/// The reply is a stream of JSON objects, one per line, unless `stream` is false. A stream ends with an object whose `done`
/// is true, or with `{"error": …}`.
#[utoipa::path(
    post, path = "/api/generate", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaGenerateRequest,
    responses(
        (status = 200, description = "The answer",
            content((OllamaGenerateReply = "application/json"), (OllamaGenerateReply = "application/x-ndjson"))),
        OllamaErrors,
    )
)]
async fn generate(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<OllamaGenerateRequest>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let slot = slot(&app, &request.model).await?;
    let header = ReplyHeader { kind: ReplyKind::Generate, model: request.model.clone() };
    let keep = KeepAlive::new(request.keep_alive.as_ref())?;
    if request.prompt.as_ref().is_none_or(String::is_empty) {
        return idle(&app, &slot, &header, keep).await;
    }
    let model = keep.acquire(&app, &slot).await?;
    let streams = request.stream.unwrap_or(true);
    let convert = move |model: &ServedModel| {
        let request = convert::generate_request(model, request)?;
        let (logprobs, returns_context) = (request.logprobs.is_some(), request.return_tokens);
        let encoder = OllamaEncoder::new(header, model.tokenizer.clone(), logprobs, returns_context, started);
        Ok((request, encoder))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    respond(generation, encoder, streams, app.config().keep_alive).await
}

async fn respond(
    mut generation: Generation,
    mut encoder: OllamaEncoder,
    streams: bool,
    keep_alive: Duration,
) -> Result<Response, ApiError> {
    if streams {
        return Ok(sse::respond(stream::events(generation, encoder, keep_alive), sse::JSON_LINES));
    }
    let mut output = ChoiceOutput::default();
    while let Some(event) = generation.next().await {
        let (_, event) = event?;
        encoder.observe(&event);
        output.push(event);
    }
    Ok(Json(encoder.into_body(vec![output], generation.usage())).into_response())
}

/// The reply to a request without a prompt, which loads or unloads the model.
async fn idle(app: &App, slot: &Arc<ModelSlot>, header: &ReplyHeader, keep: KeepAlive) -> Result<Response, ApiError> {
    let reason = if keep == KeepAlive::For(Duration::ZERO) {
        app.models().unload(slot).await;
        OllamaDoneReason::Unload
    } else {
        keep.acquire(app, slot).await?;
        OllamaDoneReason::Load
    };
    Ok(Json(header.idle(reason)).into_response())
}

/// The slot of the model with this name.
async fn slot(app: &App, name: &str) -> Result<Arc<ModelSlot>, ApiError> {
    if name.is_empty() {
        return Err(ApiError::invalid("model", "model is required"));
    }
    let untagged = name.strip_suffix(LATEST).unwrap_or(name);
    let known = if app.has_model(name).await? { name } else { untagged };
    // Ollama's clients look for these words.
    app.slot(Some(known)).await.map_err(|error| match error.code {
        Some("model_not_found") => {
            let message = format!("model '{}' not found", excerpt(name));
            ApiError::new(ApiErrorKind::NotFound, message).code("model_not_found").param("model")
        }
        _ => error,
    })
}

/// The tag of names that have none.
const LATEST: &str = ":latest";

/// What a request says of how long its model stays loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeepAlive {
    /// Nothing: as the server was started.
    Default,
    /// Until another model needs the memory.
    UntilNeeded,
    For(Duration),
}

impl KeepAlive {
    fn new(given: Option<&OllamaKeepAlive>) -> Result<Self, ApiError> {
        let Some(given) = given else { return Ok(Self::Default) };
        let unreadable = || ApiError::invalid("keep_alive", "`keep_alive` must be seconds, or a duration such as `5m`");
        let seconds = given.seconds().ok_or_else(unreadable)?;
        Ok(Duration::try_from_secs_f64(seconds).map_or(Self::UntilNeeded, Self::For))
    }

    /// The model, loaded, which is to be kept so long.
    async fn acquire(self, app: &App, slot: &Arc<ModelSlot>) -> Result<ModelUse, ApiError> {
        let model = app.models().acquire(slot).await?;
        match self {
            Self::Default => {}
            Self::UntilNeeded => slot.set_keep(None),
            Self::For(time) => slot.set_keep(Some(time)),
        }
        Ok(model)
    }
}
