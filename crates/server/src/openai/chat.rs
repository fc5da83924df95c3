//! `/v1/chat/completions`.

mod format;
mod message;
mod request;
mod response;
mod stream;
mod tool;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};

pub use message::{ChatMessage, messages};
pub use request::{ChatRequest, turn};
pub use response::ChatCompletion;
pub use tool::{Tool, tools};

use crate::answer::Answer;
use crate::app::Shared;
use crate::auth::Caller;
use crate::body::Body;
use crate::error::ApiError;
use crate::failures::OpenAiFailures;
use crate::sse;
use stream::ChunkWriter;

pub fn router() -> Router<Shared> {
    Router::new().route("/v1/chat/completions", post(complete))
}

/// Go on with a conversation
///
/// With `stream`, the response is a stream of `chat.completion.chunk` events that ends with `[DONE]`, or with an event
/// `{"error": …}`.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer", content((ChatCompletion = "application/json"), (sse::Event = "text/event-stream"))),
        OpenAiFailures,
    )
)]
pub async fn complete(
    State(app): State<Shared>,
    Extension(Caller(tenant)): Extension<Caller>,
    Body(request): Body<ChatRequest>,
) -> Result<Response, ApiError> {
    let served = app.served(request.model.as_deref())?;
    let (streams, options) = (request.stream.unwrap_or(false), request.stream_options.as_ref());
    let include_usage = options.and_then(|options| options.include_usage).unwrap_or(false);
    let ask = request.into_ask()?;
    let (choices, logprobs) = (ask.choices, ask.logprobs.is_some());
    let tokenizer = served.tokenizer.clone();
    let answer = Answer::begin(&app, served, ask, tenant).await?;
    if streams {
        let writer = ChunkWriter::new(&app.config().model, tokenizer, choices, logprobs, include_usage);
        return Ok(sse::respond(sse::events(answer, writer), app.config().keep_alive));
    }
    let (replies, usage) = answer.collect().await?;
    Ok(Json(ChatCompletion::new(&app.config().model, &tokenizer, replies, usage, logprobs)).into_response())
}
