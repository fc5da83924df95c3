//! Responses with `background`: they are generated whether or not the client stays. [`crate::kept_answers`] has their events; the
//! number of an event is its sequence number.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use engine::TenantId;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::encoder::ResponsesEncoder;
use super::request::ResponsesRequest;
use super::response::ResponsesReply;
use super::stored::{id_of, not_found};
use crate::app::{App, SharedApp};
use crate::auth::Caller;
use crate::error::{ApiError, OpenAiErrorBody};
use crate::generation::Generation;
use crate::kept_answers::{self, KeptAnswer};

/// A response that is cancelled ends in this time, unless the machine is very busy.
const CANCEL_MAX: Duration = Duration::from_secs(10);

/// Whether the request asks for a response in the background. It has to be stored, as OpenAI demands.
pub fn is_background(app: &App, request: &ResponsesRequest) -> Result<bool, ApiError> {
    if request.background != Some(true) {
        return Ok(false);
    }
    if request.store == Some(false) {
        return Err(ApiError::invalid(
            "background",
            "a response with `background` has to be stored: leave `store` out",
        ));
    }
    if !app.config().stores_responses {
        return Err(ApiError::unsupported("background", "this server stores no responses"));
    }
    Ok(true)
}

/// Generates on a task, and responds with the events, or with the response as it is at the beginning.
pub async fn respond(
    app: &SharedApp,
    tenant: TenantId,
    generation: Generation,
    encoder: ResponsesEncoder,
    streams: bool,
) -> Result<Response, ApiError> {
    let writer = app.kept_answers().begin(tenant, encoder.id())?;
    let answer = writer.answer();
    writer.run(generation, encoder);
    if !streams {
        answer.wait_until(|answer| answer.ends().is_some()).await;
    }
    get(app, answer, streams, None)
}

/// The response as it is now, or its events after this sequence number.
pub fn get(
    app: &SharedApp,
    answer: Arc<KeptAnswer>,
    streams: bool,
    starting_after: Option<u64>,
) -> Result<Response, ApiError> {
    if streams {
        let gone = || ApiError::invalid("starting_after", "the events after this one are kept no more");
        return kept_answers::resume(app, answer, starting_after).ok_or_else(gone);
    }
    let response = snapshot(&answer).ok_or_else(|| ApiError::internal("the response has no beginning"))?;
    Ok(([(CONTENT_TYPE, "application/json")], response).into_response())
}

/// Cancel a response in the background
///
/// One that has ended is returned as it is.
#[utoipa::path(
    post, path = "/v1/responses/{id}/cancel", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The response's id")),
    responses(
        (status = 200, description = "The response", body = ResponsesReply),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such response in the background", body = OpenAiErrorBody),
    )
)]
pub async fn cancel(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = id_of(id)?;
    let answer = app.kept_answers().get(tenant, &id).ok_or_else(|| not_found(&id))?;
    answer.cancel();
    if timeout(CANCEL_MAX, answer.wait_until(|_| false)).await.is_err() {
        tracing::warn!("a response that was cancelled has not ended yet");
    }
    get(&app, answer, false, None)
}

/// The response in the last event that has one whole, as JSON.
fn snapshot(answer: &KeptAnswer) -> Option<String> {
    #[derive(Deserialize)]
    struct Event {
        response: Option<Box<RawValue>>,
    }
    let (start, last) = answer.ends()?;
    [last, start].iter().find_map(|event| {
        let event: Event = serde_json::from_slice(&event.data).ok()?;
        Some(event.response?.get().to_owned())
    })
}
