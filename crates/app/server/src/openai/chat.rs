//! `/v1/chat/completions`.

mod encoder;
mod format;
mod message;
mod request;
mod response;
mod tool;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;

pub use message::{ChatMessage, conversation};
pub use request::{ChatRequest, prompt_ending};
pub use response::{ChatCompletion, LogprobsBody, TokenLogprob};
pub use tool::{ChatTool, tools};

use crate::app::SharedApp;
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::Generation;
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream;
use encoder::ChatEncoder;

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/chat/completions", post(complete))
}

/// Create a chat completion
///
/// With `stream`, the response is a stream of `chat.completion.chunk` events that ends with `[DONE]`, or with an event
/// `{"error": …}`.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer", content((ChatCompletion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        OpenAiErrors,
    )
)]
pub async fn complete(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<ChatRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    let (streams, options) = (request.stream.unwrap_or(false), request.stream_options.unwrap_or_default());
    let name = model.name().to_owned();
    let convert = move |model: &ServedModel| {
        let request = request.into_generation_request()?;
        let (choices, logprobs) = (request.choices, request.logprobs.is_some());
        Ok((request, ChatEncoder::new(&name, model.tokenizer.clone(), choices, logprobs, options)))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}
