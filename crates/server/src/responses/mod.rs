//! OpenAI's Responses API: `/v1/responses`, without stored state: each request contains the whole conversation.

mod convert;
mod encoder;
mod request;
mod response;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use utoipa::OpenApi;

use crate::app::SharedApp;
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::Generation;
use crate::json_body::JsonBody;
use crate::sse::ServerSentEvent;
use crate::stream;
use encoder::ResponsesEncoder;
use request::ResponsesRequest;
use response::{ResponsesEvent, ResponsesLogprob, ResponsesReply};

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/responses", post(create))
}

#[derive(OpenApi)]
#[openapi(paths(create), components(schemas(ResponsesEvent)))]
pub struct ResponsesPaths;

/// Create a response
#[utoipa::path(
    post, path = "/v1/responses", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = ResponsesRequest,
    responses(
        (status = 200, description = "The response; with `stream`, the events that make it up",
            content((ResponsesReply = "application/json"), (ServerSentEvent = "text/event-stream"))),
        OpenAiErrors,
    )
)]
async fn create(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(Some(&request.model))?;
    let (tokenizer, streams) = (model.tokenizer.clone(), request.stream == Some(true));
    let generation = Generation::start(&app, model, convert::generation_request(&request)?, permit).await?;
    let encoder = ResponsesEncoder::new(request, move |token| ResponsesLogprob::new(token, &tokenizer));
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}
