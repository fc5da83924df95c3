//! `/v1/models`: the served model, in OpenAI's format, or in Anthropic's for its clients. It is also listed while it loads.
//! Aliases are names that requests may give; they are not listed.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::{App, SharedApp};
use crate::error::{ApiError, OpenAiErrorBody};
use crate::messages::{MessagesModel, MessagesModelList, is_messages_client};

pub fn router() -> Router<SharedApp> {
    // Model names contain slashes.
    Router::new().route("/v1/models", get(list)).route("/v1/models/{*model}", get(one))
}

/// List the models
///
/// In Anthropic's format if the request has a header `anthropic-version`.
#[utoipa::path(
    get, path = "/v1/models", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The models", body = ModelListBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
    )
)]
pub async fn list(State(app): State<SharedApp>, headers: HeaderMap) -> Json<ModelListBody> {
    let name = &app.config().model;
    Json(match is_messages_client(&headers) {
        true => ModelListBody::Messages(MessagesModelList::new(vec![MessagesModel::new(&app, name)])),
        false => ModelListBody::OpenAi(ModelList { object: "list", data: vec![ModelObject::new(&app, name)] }),
    })
}

/// Get one model
///
/// In Anthropic's format if the request has a header `anthropic-version`.
#[utoipa::path(
    get, path = "/v1/models/{model}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("model" = String, Path, description = "The model's name")),
    responses(
        (status = 200, description = "The model", body = ModelBody),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such model", body = OpenAiErrorBody),
    )
)]
pub async fn one(
    State(app): State<SharedApp>,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelBody>, ApiError> {
    // No model has a name that is not UTF-8.
    let Path(name) = name.map_err(|_| ApiError::unknown_model("?"))?;
    if !app.has_model(&name) {
        return Err(ApiError::unknown_model(&name));
    }
    Ok(Json(match is_messages_client(&headers) {
        true => ModelBody::Messages(MessagesModel::new(&app, &name)),
        false => ModelBody::OpenAi(ModelObject::new(&app, &name)),
    }))
}

/// In the format of the client's API
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub enum ModelListBody {
    OpenAi(ModelList),
    Messages(MessagesModelList),
}

/// In the format of the client's API
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub enum ModelBody {
    OpenAi(ModelObject),
    Messages(MessagesModel),
}

#[derive(Serialize, ToSchema)]
pub struct ModelList {
    /// Always `list`
    #[schema(value_type = String)]
    object: &'static str,
    data: Vec<ModelObject>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Model)]
pub struct ModelObject {
    id: String,
    /// Always `model`
    #[schema(value_type = String)]
    object: &'static str,
    /// Seconds since 1970
    created: u64,
    #[schema(value_type = String)]
    owned_by: &'static str,
    /// Context size: maximum tokens of prompt and output together, once the model is loaded
    max_model_len: Option<usize>,
}

impl ModelObject {
    fn new(app: &App, name: &str) -> Self {
        let max_model_len = app.stage().model().ok().map(|model| model.context);
        Self { id: name.to_owned(), object: "model", created: app.created(), owned_by: "consort", max_model_len }
    }
}
