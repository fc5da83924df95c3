//! Anthropic's Messages: `/v1/messages` and `/v1/messages/count_tokens`.

mod ask;
mod compose;
mod reply;
mod request;
mod teller;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use utoipa::OpenApi;

use crate::answer::{self, Answer};
use crate::app::Shared;
use crate::auth::Caller;
use crate::body::Body;
use crate::error::{AnthropicBody, ApiError};
use crate::failures::AnthropicFailures;
use crate::{narrate, sse};
use reply::{Event, Message, TokenCount};
use request::{CountRequest, Request};
use teller::Teller;

pub fn router() -> Router<Shared> {
    Router::new().route("/v1/messages", post(create)).route("/v1/messages/count_tokens", post(count_tokens))
}

#[derive(OpenApi)]
#[openapi(paths(create, count_tokens), components(schemas(AnthropicBody, Event)))]
pub struct Paths;

/// A message in answer to messages
#[utoipa::path(
    post, path = "/v1/messages", tag = "anthropic", security(("key" = []), ("x-api-key" = [])),
    request_body = Request,
    responses(
        (status = 200, description = "The message; with `stream`, the events that make it up",
            content((Message = "application/json"), (sse::Event = "text/event-stream"))),
        AnthropicFailures,
    )
)]
async fn create(
    State(app): State<Shared>,
    Extension(Caller(tenant)): Extension<Caller>,
    Body(request): Body<Request>,
) -> Result<Response, ApiError> {
    let served = app.served(Some(&request.model))?;
    let (teller, streams) = (Teller::new(&request), request.stream == Some(true));
    let answer = Answer::begin(&app, served, ask::ask(request)?, tenant).await?;
    if streams {
        return Ok(sse::respond(narrate::events(answer, teller), app.config().keep_alive));
    }
    Ok(Json(narrate::whole(answer, teller).await?.into_message()?).into_response())
}

/// The tokens that messages would take as a prompt
#[utoipa::path(
    post, path = "/v1/messages/count_tokens", tag = "anthropic", security(("key" = []), ("x-api-key" = [])),
    request_body = CountRequest,
    responses((status = 200, description = "So many", body = TokenCount), AnthropicFailures)
)]
async fn count_tokens(
    State(app): State<Shared>,
    Body(request): Body<CountRequest>,
) -> Result<Json<TokenCount>, ApiError> {
    let served = app.served(Some(&request.model))?;
    let prompt = answer::chat_tokens(served, ask::count(request)?).await?;
    Ok(Json(TokenCount { input_tokens: prompt.len() }))
}
