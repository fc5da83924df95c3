//! `/v1/models`: which model is here. It is listed while it still loads.

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::{App, Shared};
use crate::error::{ApiError, OpenAiBody};

pub fn router() -> Router<Shared> {
    // Names of models have slashes in them.
    Router::new().route("/v1/models", get(list)).route("/v1/models/{*model}", get(one))
}

/// The models that can be asked
#[utoipa::path(
    get, path = "/v1/models", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "One", body = ModelList),
        (status = 401, description = "No key, or an unknown one", body = OpenAiBody),
    )
)]
pub async fn list(State(app): State<Shared>) -> Json<ModelList> {
    let names = std::iter::once(&app.config().model).chain(&app.config().aliases);
    Json(ModelList { object: "list", data: names.map(|name| Model::new(&app, name)).collect() })
}

/// One of the models
#[utoipa::path(
    get, path = "/v1/models/{model}", tag = "openai", security(("key" = []), ("x-api-key" = [])),
    params(("model" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "It is here", body = Model),
        (status = 401, description = "No key, or an unknown one", body = OpenAiBody),
        (status = 404, description = "It is not", body = OpenAiBody),
    )
)]
pub async fn one(
    State(app): State<Shared>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    // A name that is not even text is the name of nothing.
    let Path(name) = name.map_err(|_| ApiError::unknown_model("?"))?;
    if app.knows(&name) { Ok(Json(Model::new(&app, &name))) } else { Err(ApiError::unknown_model(&name)) }
}

#[derive(Serialize, ToSchema)]
pub struct ModelList {
    /// Always `list`
    #[schema(value_type = String)]
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Serialize, ToSchema)]
pub struct Model {
    id: String,
    /// Always `model`
    #[schema(value_type = String)]
    object: &'static str,
    /// Seconds since 1970
    created: u64,
    #[schema(value_type = String)]
    owned_by: &'static str,
    /// Tokens that a prompt and its answer may have together, once the model is loaded
    max_model_len: Option<usize>,
}

impl Model {
    fn new(app: &App, name: &str) -> Self {
        let max_model_len = app.stage().served().ok().map(|served| served.context);
        Self { id: name.to_owned(), object: "model", created: app.created(), owned_by: "consort", max_model_len }
    }
}
