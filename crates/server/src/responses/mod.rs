//! OpenAI's Responses API: `/v1/responses`. A request contains the whole conversation, or continues a stored response.

mod convert;
mod custom_input;
mod encoder;
mod open_item;
mod request;
mod response;
mod store;
mod stored;
mod tool_types;
mod tools;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use engine::TenantId;
use serde_json::{Value, json};
use utoipa::OpenApi;

use crate::app::{App, SharedApp};
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::{Generation, ScoredToken};
use crate::ids::new_id;
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream;
use crate::text_or_parts::TextOrParts;
use encoder::ResponsesEncoder;
use request::{ResponsesInputItem, ResponsesRequest};
use response::{ResponsesEvent, ResponsesLogprob, ResponsesReply};
use store::StoreTicket;
pub use store::{ResponseStore, StoreLimits};
use tools::OfferedTools;

pub fn router() -> Router<SharedApp> {
    Router::new()
        .route("/v1/responses", post(create))
        .route("/v1/responses/{id}", get(stored::get).delete(stored::delete))
        .route("/v1/responses/{id}/input_items", get(stored::input_items))
}

#[derive(OpenApi)]
#[openapi(
    paths(create, stored::get, stored::delete, stored::input_items),
    components(schemas(ResponsesEvent, stored::ResponsesItemsOrder))
)]
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
    let (tenant, streams, state) = (permit.tenant(), request.stream == Some(true), Arc::clone(&app));
    let convert = move |model: &ServedModel| {
        let conversation = previous_conversation(&state, &request, tenant)?;
        let history = conversation.iter().map(|item| serde_json::from_value(item.clone()));
        let history: Vec<ResponsesInputItem> =
            history.collect::<Result<_, _>>().map_err(|error| ApiError::internal(error.to_string()))?;
        let tools = OfferedTools::new(request.tools.as_deref().unwrap_or_default())?;
        let generation_request = convert::generation_request(&request, &history, &tools)?;
        let ticket = ticket(&state, &request, conversation, tenant);
        let tokenizer = model.tokenizer.clone();
        let encode_logprob = move |token: &ScoredToken| ResponsesLogprob::new(token, &tokenizer);
        Ok((generation_request, ResponsesEncoder::new(request, tools.into_forms(), ticket, encode_logprob)))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}

/// The conversation that the request continues; empty if it begins a new one.
fn previous_conversation(app: &App, request: &ResponsesRequest, tenant: TenantId) -> Result<Vec<Value>, ApiError> {
    let Some(id) = &request.previous_response_id else { return Ok(Vec::new()) };
    let previous = app.responses().get(tenant, id, Instant::now());
    Ok(previous.ok_or_else(|| stored::previous_not_found(id))?.conversation())
}

/// What is stored with the response; `None` if the client or the operator wants nothing to be stored.
fn ticket(app: &App, request: &ResponsesRequest, conversation: Vec<Value>, tenant: TenantId) -> Option<StoreTicket> {
    if !app.config().stores_responses || request.store == Some(false) {
        return None;
    }
    let mut input = conversation;
    match &request.input {
        TextOrParts::Text(text) => {
            let content = json!([{"type": "input_text", "text": text}]);
            input.push(with_id(json!({"type": "message", "role": "user", "content": content})));
        }
        TextOrParts::Parts(items) => {
            input.extend(items.iter().map(|ResponsesInputItem(item)| with_id(json!(item))));
        }
    }
    Some(StoreTicket { store: Arc::clone(app.responses()), tenant, input })
}

fn with_id(mut item: Value) -> Value {
    if item["id"].is_null() {
        item["id"] = json!(new_id(if item["type"] == "message" { "msg_" } else { "item_" }));
    }
    item
}
