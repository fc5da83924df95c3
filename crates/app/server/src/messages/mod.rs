//! Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`.

mod convert;
mod encoder;
mod models;
mod request;
mod response;
mod tools;

use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use axum::{Json, Router};
use utoipa::OpenApi;

use crate::app::SharedApp;
use crate::blocking;
use crate::error::{ApiError, MessagesErrorBody};
use crate::error_responses::MessagesErrors;
use crate::generation::{Generation, chat_tokens};
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream;
use encoder::MessagesEncoder;
pub use models::{MessagesModel, MessagesModelList, is_messages_client};
use request::{MessagesCountRequest, MessagesRequest};
use response::{MessagesEvent, MessagesReply, MessagesTokenCount};

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/messages", post(create)).route("/v1/messages/count_tokens", post(count_tokens))
}

#[derive(OpenApi)]
#[openapi(paths(create, count_tokens), components(schemas(MessagesErrorBody, MessagesEvent)))]
pub struct MessagesPaths;

/// Create a message
#[utoipa::path(
    post, path = "/v1/messages", tag = "anthropic", security(("key" = []), ("x-api-key" = [])),
    request_body = MessagesRequest,
    responses(
        (status = 200, description = "The message; with `stream`, the events that make it up",
            content((MessagesReply = "application/json"), (ServerSentEvent = "text/event-stream"))),
        MessagesErrors,
    )
)]
async fn create(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<MessagesRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(Some(&request.model)).await?;
    let streams = request.stream == Some(true);
    let convert = move |_: &ServedModel| {
        let encoder = MessagesEncoder::new(&request);
        Ok((convert::generation_request(request)?, encoder))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}

/// Count the prompt tokens of messages
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "anthropic", security(("key" = []), ("x-api-key" = [])),
    request_body = MessagesCountRequest,
    responses((status = 200, description = "The number of input tokens", body = MessagesTokenCount), MessagesErrors)
)]
async fn count_tokens(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<MessagesCountRequest>,
) -> Result<Json<MessagesTokenCount>, ApiError> {
    let model = app.model(Some(&request.model)).await?;
    let count = move || {
        let _permit = permit;
        let prompt = chat_tokens(&model, &convert::count_input(request)?)?;
        Ok(Json(MessagesTokenCount { input_tokens: prompt.len() }))
    };
    blocking::run(count).await
}
