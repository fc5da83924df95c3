//! OpenAI's Responses: `/v1/responses`, without a memory. Whoever asks sends the whole conversation each time.

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

use crate::answer::Answer;
use crate::app::Shared;
use crate::auth::Caller;
use crate::body::Body;
use crate::error::ApiError;
use crate::failures::OpenAiFailures;
use crate::{narrate, sse};
use request::Request;
use teller::Teller;

pub fn router() -> Router<Shared> {
    Router::new().route("/v1/responses", post(create))
}

#[derive(OpenApi)]
#[openapi(paths(create), components(schemas(reply::Event)))]
pub struct Paths;

/// A response to an input
#[utoipa::path(
    post, path = "/v1/responses", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    request_body = Request,
    responses(
        (status = 200, description = "The response; with `stream`, the events that make it up",
            content((reply::Response = "application/json"), (sse::Event = "text/event-stream"))),
        OpenAiFailures,
    )
)]
async fn create(
    State(app): State<Shared>,
    Extension(Caller(tenant)): Extension<Caller>,
    Body(request): Body<Request>,
) -> Result<Response, ApiError> {
    let served = app.served(Some(&request.model))?;
    let (ask, streams) = (ask::ask(&request)?, request.stream == Some(true));
    let answer = Answer::begin(&app, served.clone(), ask, tenant).await?;
    let teller = Teller::new(request, move |token| reply::Logprob::of(token, &served.tokenizer));
    if streams {
        return Ok(sse::respond(narrate::events(answer, teller), app.config().keep_alive));
    }
    Ok(Json(narrate::whole(answer, teller).await?.into_response()).into_response())
}
