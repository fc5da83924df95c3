//! `/v1/completions`: continues text, without a chat template.

mod encoder;
mod logprobs;
mod request;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use serde::Serialize;
use text::Tokenizer;
use utoipa::ToSchema;

pub use logprobs::CompletionLogprobs;
pub use request::{CompletionRequest, PromptField};

use super::usage::UsageBody;
use crate::app::SharedApp;
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::{Generation, GenerationInput, Prompt};
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream;
use encoder::CompletionEncoder;

pub fn router() -> Router<SharedApp> {
    Router::new().route("/v1/completions", post(complete))
}

/// Create a completion
///
/// With `stream`, the response is a stream of `text_completion` events that ends with `[DONE]`, or with an event
/// `{"error": …}`.
#[utoipa::path(
    post, path = "/v1/completions", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "The continuations", content((Completion = "application/json"), (ServerSentEvent = "text/event-stream"))),
        OpenAiErrors,
    )
)]
pub async fn complete(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<CompletionRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    let (streams, options) = (request.stream.unwrap_or(false), request.stream_options.unwrap_or_default());
    let echo = request.echo.unwrap_or(false);
    let name = model.name().to_owned();
    let convert = move |model: &ServedModel| {
        let request = request.into_generation_request()?;
        let (logprobs, tokenizer) = (request.logprobs.is_some(), model.tokenizer.clone());
        let echoes = echoes(&tokenizer, &request.input, request.choices, echo);
        Ok((request, CompletionEncoder::new(&name, tokenizer, echoes, logprobs, options)))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}

/// The text before each choice: its prompt if `echo` is set, else empty. The choices of a prompt share it.
fn echoes(tokenizer: &Tokenizer, input: &GenerationInput, choices: usize, echo: bool) -> Vec<Arc<str>> {
    let GenerationInput::Prompts(prompts) = input else { return Vec::new() };
    let text = |prompt: &Prompt| match prompt {
        _ if !echo => Arc::default(),
        Prompt::Text(text) => Arc::from(text.as_str()),
        Prompt::Tokens(tokens) => Arc::from(tokenizer.decode(tokens, text::SpecialTokens::Show)),
    };
    prompts.iter().flat_map(|prompt| std::iter::repeat_n(text(prompt), choices)).collect()
}

#[derive(Serialize, ToSchema)]
pub struct Completion {
    pub id: String,
    /// Always `text_completion`
    #[schema(value_type = String)]
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    pub usage: UsageBody,
}

#[derive(Serialize, ToSchema)]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`
    #[schema(value_type = String)]
    pub finish_reason: &'static str,
}
