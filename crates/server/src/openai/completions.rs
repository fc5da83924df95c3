//! `/v1/completions`: texts to continue, without turns.

mod logprobs;
mod request;
mod stream;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use serde::Serialize;
use text::Tokenizer;
use utoipa::ToSchema;

pub use logprobs::CompletionLogprobs;
pub use request::{CompletionRequest, PromptField};

use super::usage::UsageBody;
use crate::answer::{Answer, Finish, Input, Prompt, Reply, Usage};
use crate::app::Shared;
use crate::auth::Caller;
use crate::body::Body;
use crate::error::ApiError;
use crate::failures::OpenAiFailures;
use crate::{identity, sse};
use logprobs::Offsets;
use stream::CompletionWriter;

pub fn router() -> Router<Shared> {
    Router::new().route("/v1/completions", post(complete))
}

/// Continue texts
///
/// With `stream`, the response is a stream of `text_completion` events that ends with `[DONE]`, or with an event
/// `{"error": …}`.
#[utoipa::path(
    post, path = "/v1/completions", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "The continuations", content((Completion = "application/json"), (sse::Event = "text/event-stream"))),
        OpenAiFailures,
    )
)]
pub async fn complete(
    State(app): State<Shared>,
    Extension(Caller(tenant)): Extension<Caller>,
    Body(request): Body<CompletionRequest>,
) -> Result<Response, ApiError> {
    let served = app.served(request.model.as_deref())?;
    let (streams, options) = (request.stream.unwrap_or(false), request.stream_options.as_ref());
    let include_usage = options.and_then(|options| options.include_usage).unwrap_or(false);
    let echo = request.echo.unwrap_or(false);
    let ask = request.into_ask()?;
    let tokenizer = served.tokenizer.clone();
    let shape = Shape {
        tokenizer,
        echoes: echoes(&served.tokenizer, &ask.input, ask.choices, echo),
        logprobs: ask.logprobs.is_some(),
    };
    let answer = Answer::begin(&app, served, ask, tenant).await?;
    if streams {
        let writer = CompletionWriter::new(&app.config().model, shape, include_usage);
        return Ok(sse::respond(sse::events(answer, writer), app.config().keep_alive));
    }
    let (replies, usage) = answer.collect().await?;
    Ok(Json(Completion::new(&app.config().model, shape, replies, usage)).into_response())
}

/// What the choices of a completion need besides their replies.
struct Shape {
    tokenizer: Tokenizer,
    /// The text that comes before each choice: its prompt, if that is to be echoed, else nothing.
    echoes: Vec<String>,
    logprobs: bool,
}

/// The prompt of each choice as text.
fn echoes(tokenizer: &Tokenizer, input: &Input, choices: usize, echo: bool) -> Vec<String> {
    let Input::Prompts(prompts) = input else { return Vec::new() };
    let text = |prompt: &Prompt| match prompt {
        _ if !echo => String::new(),
        Prompt::Text(text) => text.clone(),
        Prompt::Tokens(tokens) => tokenizer.decode(tokens, text::SpecialTokens::Show),
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

impl Completion {
    fn new(model: &str, shape: Shape, replies: Vec<Reply>, usage: Usage) -> Self {
        let choice = |(index, (reply, echo)): (usize, (Reply, String))| {
            let logprobs = shape.logprobs.then(|| {
                let (mut offsets, mut logprobs) = (Offsets::default(), CompletionLogprobs::default());
                logprobs.extend(&shape.tokenizer, &reply.prompt, &mut offsets);
                logprobs.extend(&shape.tokenizer, &reply.tokens, &mut offsets);
                logprobs
            });
            CompletionChoice {
                index,
                text: echo + &reply.text,
                logprobs,
                finish_reason: finish_reason(reply.finish.as_ref()),
            }
        };
        Self {
            id: identity::fresh("cmpl-"),
            object: "text_completion",
            created: identity::unix_now(),
            model: model.to_owned(),
            choices: replies.into_iter().zip(shape.echoes).enumerate().map(choice).collect(),
            usage: usage.into(),
        }
    }
}

fn finish_reason(finish: Option<&Finish>) -> &'static str {
    if finish == Some(&Finish::Length) { "length" } else { "stop" }
}
