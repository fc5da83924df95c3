//! `/v1/models`: the served model and its aliases. They are also listed while the model loads.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::{App, SharedApp};
use crate::error::{ApiError, OpenAiErrorBody};

pub fn router() -> Router<SharedApp> {
    // Model names contain slashes.
    Router::new().route("/v1/models", get(list)).route("/v1/models/{*model}", get(one))
}

/// List the models
#[utoipa::path(
    get, path = "/v1/models", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The models", body = ModelList),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
    )
)]
pub async fn list(State(app): State<SharedApp>) -> Json<ModelList> {
    let names = std::iter::once(&app.config().model).chain(&app.config().aliases);
    Json(ModelList { object: "list", data: names.map(|name| ModelObject::new(&app, name)).collect() })
}

/// Get one model
#[utoipa::path(
    get, path = "/v1/models/{model}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("model" = String, Path, description = "The model's name")),
    responses(
        (status = 200, description = "The model", body = ModelObject),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 404, description = "There is no such model", body = OpenAiErrorBody),
    )
)]
pub async fn one(
    State(app): State<SharedApp>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelObject>, ApiError> {
    // No model has a name that is not UTF-8.
    let Path(name) = name.map_err(|_| ApiError::unknown_model("?"))?;
    if app.has_model(&name) { Ok(Json(ModelObject::new(&app, &name))) } else { Err(ApiError::unknown_model(&name)) }
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
