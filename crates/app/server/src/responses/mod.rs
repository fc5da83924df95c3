//! OpenAI's Responses API: `/v1/responses`. A request contains the whole conversation, or continues a stored response.

mod background;
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
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use utoipa::OpenApi;

use crate::app::{App, SharedApp};
use crate::error::ApiError;
use crate::error_responses::OpenAiErrors;
use crate::generation::{Generation, GenerationInput, GenerationRequest, ScoredToken};
use crate::ids::new_id;
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;
use crate::sse::ServerSentEvent;
use crate::stream;
use crate::text_or_parts::TextOrParts;
use encoder::ResponsesEncoder;
use request::{ResponsesInputItem, ResponsesRequest};
use response::{ResponsesEvent, ResponsesLogprob, ResponsesReply};
pub use store::{ResponseStore, StoreLimits};
use store::{StoreTicket, StoredResponse};
use tools::OfferedTools;

pub fn router() -> Router<SharedApp> {
    Router::new()
        .route("/v1/responses", post(create))
        .route("/v1/responses/{id}", get(stored::get).delete(stored::delete))
        .route("/v1/responses/{id}/cancel", post(background::cancel))
        .route("/v1/responses/{id}/input_items", get(stored::input_items))
}

#[derive(OpenApi)]
#[openapi(
    paths(create, background::cancel, stored::get, stored::delete, stored::input_items),
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
    JsonBody(request, mut permit): JsonBody<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(Some(&request.model)).await?;
    let is_background = background::is_background(&app, &request)?;
    let previous = previous_response(&app, &request, permit.tenant())?;
    if let Some(previous) = &previous {
        // What is stored is read like a body, so it counts like one.
        permit.grow(previous.bytes().min(app.config().body_bytes_max)).await?;
    }
    let (tenant, streams) = (permit.tenant(), request.stream == Some(true));
    let stores = app.config().stores_responses && request.store != Some(false);
    let store = stores.then(|| Arc::clone(app.responses()));
    let convert = move |model: &ServedModel| {
        let history = previous.map_or_else(Vec::new, |previous| previous.conversation());
        let tools = OfferedTools::new(request.tools.as_deref().unwrap_or_default())?;
        let generation_request = convert::generation_request(&request, &input_items(&history)?, &tools)?;
        let ticket = store.and_then(|store| StoreTicket::new(store, tenant, stored_input(history, &request.input)));
        let tokenizer = model.tokenizer.clone();
        let encode_logprob = move |token: &ScoredToken| ResponsesLogprob::new(token, &tokenizer);
        let request = with_effective_settings(request, &generation_request);
        let encoder = ResponsesEncoder::new(request, tools.into_forms(), ticket, encode_logprob)?;
        Ok((generation_request, encoder))
    };
    let (generation, encoder) = Generation::start(&app, model, permit, convert).await?;
    if is_background {
        return background::respond(&app, tenant, generation, encoder, streams).await;
    }
    stream::respond(generation, encoder, streams, app.config().keep_alive).await
}

/// The response that the request continues; `None` if it begins a new conversation.
fn previous_response(
    app: &App,
    request: &ResponsesRequest,
    tenant: TenantId,
) -> Result<Option<Arc<StoredResponse>>, ApiError> {
    let Some(id) = &request.previous_response_id else { return Ok(None) };
    let previous = app.responses().get(tenant, id, Instant::now());
    previous.map(Some).ok_or_else(|| stored::previous_not_found(id))
}

fn input_items(items: &[Box<RawValue>]) -> Result<Vec<ResponsesInputItem>, ApiError> {
    let items = items.iter().map(|item| serde_json::from_str(item.get()));
    items.collect::<Result<_, _>>().map_err(|error| ApiError::internal(error.to_string()))
}

/// The conversation before the response, as it is stored: `history` and the request's own input.
fn stored_input(history: Vec<Box<RawValue>>, input: &TextOrParts<ResponsesInputItem>) -> String {
    let own = match input {
        TextOrParts::Text(text) => {
            let content = json!([{"type": "input_text", "text": text}]);
            vec![with_id(json!({"type": "message", "role": "user", "content": content}), None)]
        }
        TextOrParts::Parts(items) => items.iter().map(|item| with_id(json!(item.item), item.id.as_deref())).collect(),
    };
    let own = own.iter().map(|item| to_raw_value(item).expect("JSON is written as JSON"));
    let items: Vec<_> = history.into_iter().chain(own).collect();
    serde_json::to_string(&items).expect("JSON is written as JSON")
}

/// The item with the id that the client gave it, or else a new one.
fn with_id(mut item: Value, id: Option<&str>) -> Value {
    let prefix = if item["type"] == "message" { "msg_" } else { "item_" };
    item["id"] = json!(id.map_or_else(|| new_id(prefix), str::to_owned));
    item
}

/// The settings that the response repeats, where the request left one to the server.
fn with_effective_settings(mut request: ResponsesRequest, generation: &GenerationRequest) -> ResponsesRequest {
    if let GenerationInput::Chat(chat) = &generation.input {
        request.parallel_tool_calls = Some(!chat.is_single_tool_call());
    }
    request
}
