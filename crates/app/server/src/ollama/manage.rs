//! Routes that change Ollama's library of models. This server has one model, which its operator chooses.

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::is_served;
use super::models::{OllamaModelName, model_name};
use crate::app::SharedApp;
use crate::error::{ApiError, ApiErrorKind};
use crate::error_responses::OllamaErrors;
use crate::json_body::JsonBody;
use crate::sse;
use crate::stream::StreamEvent;

/// A model to download
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaPullRequest {
    /// Model name, with or without `:latest`
    pub model: Option<String>,
    /// The older name of `model`
    pub name: Option<String>,
    /// False: one reply instead of a stream
    pub stream: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaProgress {
    /// Always `success`
    #[schema(value_type = String)]
    status: &'static str,
}

/// Download a model: succeeds for the served one
#[utoipa::path(
    post, path = "/api/pull", tag = "ollama", security(("key" = []), ("x-api-key" = [])),
    request_body = OllamaPullRequest,
    responses(
        (status = 200, description = "The model is here",
            content((OllamaProgress = "application/json"), (OllamaProgress = "application/x-ndjson"))),
        OllamaErrors,
    )
)]
pub async fn pull(
    State(app): State<SharedApp>,
    JsonBody(request, _): JsonBody<OllamaPullRequest>,
) -> Result<Response, ApiError> {
    let name = model_name(OllamaModelName { model: request.model, name: request.name })?;
    if !is_served(&app, &name) {
        return Err(not_managed());
    }
    let progress = OllamaProgress { status: "success" };
    if request.stream == Some(false) {
        return Ok(Json(progress).into_response());
    }
    let events = stream::iter([StreamEvent::json(&progress)]);
    Ok(sse::respond(events, sse::JSON_LINES))
}

/// Creating, copying, deleting and uploading models.
pub async fn refuse(_: Request) -> ApiError {
    not_managed()
}

fn not_managed() -> ApiError {
    let message = "this server has one model, which was chosen when it was started: use `consort serve MODEL`";
    ApiError::new(ApiErrorKind::Invalid, message).code("unsupported_operation")
}
