//! `/v1/answers`: kept answers over HTTP. Requests of other APIs make them; see `answer_id` of chat completions.

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, OpenApi, ToSchema};

use super::KeptAnswer;
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::error::{ApiError, ApiErrorKind, OpenAiErrorBody};
use crate::excerpt::excerpt;
use crate::sse::{self, ServerSentEvent};

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/answers/{id}", get(read)).route("/v1/answers/{id}/cancel", post(cancel))
}

#[derive(OpenApi)]
#[openapi(paths(read, cancel))]
pub struct KeptAnswersPaths;

/// Resume an answer
///
/// The events of an answer that was asked for with `answer_id`, from the first one on or after the one with the number
/// `starting_after`. The `id` of each event is its number. The stream ends with the answer.
#[utoipa::path(
    get, path = "/v1/answers/{id}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The answer's id"), AnswerQuery),
    responses(
        (status = 200, description = "The events", content((ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The query cannot be read", body = OpenAiErrorBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such answer, or it is kept no more", body = OpenAiErrorBody),
    )
)]
async fn read(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<AnswerQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.body_text()))?;
    let id = id.map_err(|_| not_found("?"))?.0;
    let answer = app.kept_answers().get(tenant, &id).ok_or_else(|| not_found(&id))?;
    resume(&app, answer, query.starting_after).ok_or_else(|| not_found(&id))
}

/// Cancel an answer
///
/// It ends after what it has. Those who read it get the end.
#[utoipa::path(
    post, path = "/v1/answers/{id}/cancel", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The answer's id")),
    responses(
        (status = 200, description = "It has ended, or ends", body = AnswerCancelled),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such answer", body = OpenAiErrorBody),
    )
)]
async fn cancel(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<AnswerCancelled>, ApiError> {
    let id = id.map_err(|_| not_found("?"))?.0;
    let answer = app.kept_answers().get(tenant, &id).ok_or_else(|| not_found(&id))?;
    answer.cancel();
    Ok(Json(AnswerCancelled { id, cancelled: true }))
}

#[derive(Debug, Default, Deserialize, IntoParams)]
struct AnswerQuery {
    /// The number of the last event that the client has
    starting_after: Option<u64>,
}

#[derive(Serialize, ToSchema)]
struct AnswerCancelled {
    id: String,
    cancelled: bool,
}

/// Streams an answer. `None` if the events after this number are kept no more.
pub fn resume(app: &SharedApp, answer: Arc<KeptAnswer>, starting_after: Option<u64>) -> Option<Response> {
    let next = starting_after.map_or(0, |number| number.saturating_add(1));
    let frames = answer.read(next, app.config().keep_alive)?;
    Some(sse::respond_framed(frames, sse::SERVER_SENT_EVENTS))
}

fn not_found(id: &str) -> ApiError {
    let message = format!("there is no answer with the id '{}', or it is kept no more", excerpt(id));
    ApiError::new(ApiErrorKind::NotFound, message).code("answer_not_found")
}
