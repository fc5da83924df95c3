//! Stored responses over HTTP: to get and delete them, and their input items.

use std::time::Instant;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::background;
use super::response::ResponsesReply;
use crate::app::SharedApp;
use crate::auth::Caller;
use crate::blocking;
use crate::error::{ApiError, ApiErrorKind, OpenAiErrorBody};
use crate::excerpt::excerpt;
use crate::sse::ServerSentEvent;

/// Items on one page, by default and at most.
const PAGE_ITEMS: usize = 20;
const PAGE_ITEMS_MAX: usize = 100;

/// Get a stored response
#[utoipa::path(
    get, path = "/v1/responses/{id}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The response's id"), ResponseQuery),
    responses(
        (status = 200, description = "The response; with `stream`, its events",
            content((ResponsesReply = "application/json"), (ServerSentEvent = "text/event-stream"))),
        (status = 400, description = "The query cannot be read, or the response is not one to stream", body = OpenAiErrorBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such response", body = OpenAiErrorBody),
    )
)]
pub async fn get(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ResponseQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.body_text()))?;
    let id = id_of(id)?;
    if let Some(answer) = app.kept_answers().get(tenant, &id) {
        return background::get(&app, answer, query.stream == Some(true), query.starting_after);
    }
    if query.stream == Some(true) && app.responses().get(tenant, &id, Instant::now()).is_some() {
        let message = "only a response with `background` can be streamed, and not for ever";
        return Err(ApiError::invalid("stream", message));
    }
    let stored = app.responses().get(tenant, &id, Instant::now()).ok_or_else(|| not_found(&id))?;
    Ok(([(CONTENT_TYPE, "application/json")], stored.response().to_owned()).into_response())
}

#[derive(Debug, Default, Deserialize, IntoParams)]
pub struct ResponseQuery {
    /// Send the events of a response with `background`, from the first one on
    stream: Option<bool>,
    /// or after the one with this sequence number
    starting_after: Option<u64>,
}

/// Delete a stored response
#[utoipa::path(
    delete, path = "/v1/responses/{id}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The response's id")),
    responses(
        (status = 200, description = "It is deleted", body = ResponsesDeleted),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such response", body = OpenAiErrorBody),
    )
)]
pub async fn delete(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<ResponsesDeleted>, ApiError> {
    let id = id_of(id)?;
    let was_kept = app.kept_answers().remove(tenant, &id);
    if !app.responses().delete(tenant, &id, Instant::now()) && !was_kept {
        return Err(not_found(&id));
    }
    Ok(Json(ResponsesDeleted { id, object: "response", deleted: true }))
}

/// List the input items of a stored response
#[utoipa::path(
    get, path = "/v1/responses/{id}/input_items", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("id" = String, Path, description = "The response's id"), ResponsesItemsQuery),
    responses(
        (status = 200, description = "The items", body = ResponsesItemList),
        (status = 400, description = "The query cannot be read, or there is no item `after`", body = OpenAiErrorBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such response", body = OpenAiErrorBody),
    )
)]
pub async fn input_items(
    State(app): State<SharedApp>,
    Extension(Caller(tenant)): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ResponsesItemsQuery>, QueryRejection>,
) -> Result<Json<ResponsesItemList>, ApiError> {
    let Query(query) = query.map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.body_text()))?;
    let limit = query.limit.unwrap_or(PAGE_ITEMS);
    if !(1..=PAGE_ITEMS_MAX).contains(&limit) {
        return Err(ApiError::invalid("limit", format!("`limit` must be from 1 to {PAGE_ITEMS_MAX}")));
    }
    let id = id_of(id)?;
    let stored = app.responses().get(tenant, &id, Instant::now()).ok_or_else(|| not_found(&id))?;
    blocking::run(move || Ok(Json(ResponsesItemList::page(stored.input(), &query, limit)?))).await
}

/// Which of the items to list
#[derive(Debug, Default, Deserialize, IntoParams)]
pub struct ResponsesItemsQuery {
    /// Items on one page; 20 by default
    #[param(minimum = 1, maximum = 100)]
    limit: Option<usize>,
    /// `desc`, the newest first, by default
    order: Option<ResponsesItemsOrder>,
    /// The id of the last item on the page before
    after: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ResponsesItemsOrder {
    Asc,
    #[default]
    Desc,
}

#[derive(Serialize, ToSchema)]
pub struct ResponsesDeleted {
    id: String,
    /// Always `response`
    #[schema(value_type = String)]
    object: &'static str,
    deleted: bool,
}

#[derive(Serialize, ToSchema)]
pub struct ResponsesItemList {
    /// Always `list`
    #[schema(value_type = String)]
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<Box<RawValue>>,
    has_more: bool,
    first_id: Option<String>,
    last_id: Option<String>,
}

impl ResponsesItemList {
    fn page(mut items: Vec<Box<RawValue>>, query: &ResponsesItemsQuery, limit: usize) -> Result<Self, ApiError> {
        if query.order.unwrap_or_default() == ResponsesItemsOrder::Desc {
            items.reverse();
        }
        if let Some(after) = &query.after {
            let index = items.iter().position(|item| item_id(item).as_ref() == Some(after));
            let index = index.ok_or_else(|| {
                ApiError::invalid("after", format!("there is no item with the id '{}'", excerpt(after)))
            })?;
            items.drain(..=index);
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let (first_id, last_id) =
            (items.first().and_then(|item| item_id(item)), items.last().and_then(|item| item_id(item)));
        Ok(Self { object: "list", has_more, first_id, last_id, data: items })
    }
}

fn item_id(item: &RawValue) -> Option<String> {
    #[derive(Deserialize)]
    struct Item {
        id: Option<String>,
    }
    serde_json::from_str::<Item>(item.get()).ok()?.id
}

pub fn id_of(id: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    // No response has an id that is not UTF-8.
    id.map(|Path(id)| id).map_err(|_| not_found("?"))
}

pub fn not_found(id: &str) -> ApiError {
    let message = format!("Response with id '{}' not found.", excerpt(id));
    ApiError::new(ApiErrorKind::NotFound, message).code("response_not_found")
}

/// The error of a request that continues a response that is not there.
pub fn previous_not_found(id: &str) -> ApiError {
    let message = format!("Previous response with id '{}' not found.", excerpt(id));
    ApiError::invalid("previous_response_id", message).code("previous_response_not_found")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use serde_json::value::to_raw_value;

    #[test]
    fn items_are_listed_page_by_page() {
        let items = || (0..5).map(|number| to_raw_value(&json!({"id": number.to_string()})).unwrap()).collect();
        let page = |order, after: Option<&str>| {
            let query = ResponsesItemsQuery { order: Some(order), after: after.map(str::to_owned), limit: None };
            let ResponsesItemList { data, has_more, .. } = ResponsesItemList::page(items(), &query, 3)?;
            Ok::<_, ApiError>((data.iter().map(|item| item_id(item).unwrap()).collect::<String>(), has_more))
        };
        assert_eq!(page(ResponsesItemsOrder::Asc, None).unwrap(), ("012".to_owned(), true));
        assert_eq!(page(ResponsesItemsOrder::Asc, Some("2")).unwrap(), ("34".to_owned(), false));
        assert_eq!(page(ResponsesItemsOrder::Desc, Some("3")).unwrap(), ("210".to_owned(), false));
        assert_eq!(page(ResponsesItemsOrder::Desc, Some("x")).unwrap_err().param.as_deref(), Some("after"));
    }
}
