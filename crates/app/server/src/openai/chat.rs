//! `/v1/chat/completions`.

mod encoder;
mod format;
mod message;
mod request;
mod response;
mod tool;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{Instrument, Span};

pub use message::{ChatMessage, conversation};
pub use request::{ChatRequest, prompt_ending};
pub use response::{ChatCompletion, LogprobsBody, TokenLogprob};
pub use tool::{ChatTool, tools};

use crate::app::SharedApp;
use crate::body_budget::BodyPermit;
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::Generation;
use crate::json_body::JsonBody;
use crate::kept_answers;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream::{self, StreamEvent};
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
    let streams = request.stream.unwrap_or(false);
    if let Some(id) = &request.answer_id {
        kept_answers::check_id(id)?;
        if streams {
            return keep(app, id.clone(), request, permit).await;
        }
    }
    let (generation, encoder) = start(&app, request, permit).await?;
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}

/// Generates the answer on a task that goes on if the client disconnects, and streams it.
async fn keep(app: SharedApp, id: String, request: ChatRequest, permit: BodyPermit) -> Result<Response, ApiError> {
    let writer = app.kept_answers().begin(permit.tenant(), &id)?;
    let answer = writer.answer();
    let (tell, mut refused) = oneshot::channel();
    let generate = {
        let app = Arc::clone(&app);
        async move {
            match start(&app, request, permit).await {
                Ok((generation, encoder)) => {
                    drop(tell);
                    writer.append(generation, encoder).await;
                }
                Err(error) => {
                    // Who resumes it before the client is told has to know why there is no answer.
                    writer.push(StreamEvent::json(&error.openai_body()));
                    writer.discard(&id);
                    // The client may have disconnected.
                    let _ = tell.send(error);
                }
            }
        }
    };
    tokio::spawn(generate.instrument(Span::current()));
    // A refusal gets its status. An answer that has to wait for long, as for its model, begins with comments.
    match timeout(app.config().keep_alive, &mut refused).await {
        Ok(Ok(error)) => Err(error),
        Ok(Err(_)) | Err(_) => kept_answers::resume(&app, answer, None)
            .ok_or_else(|| ApiError::internal("the answer was too long for its client")),
    }
}

async fn start(
    app: &SharedApp,
    request: ChatRequest,
    permit: BodyPermit,
) -> Result<(Generation, ChatEncoder), ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    let options = request.stream_options.unwrap_or_default();
    let name = model.name().to_owned();
    let convert = move |model: &ServedModel| {
        let request = request.into_generation_request()?;
        let (choices, logprobs) = (request.choices, request.logprobs.is_some());
        Ok((request, ChatEncoder::new(&name, model.tokenizer.clone(), choices, logprobs, options)))
    };
    Generation::start(app, model, permit, convert).await
}
