//! `/v1/models`: the models, in OpenAI's format, or in Anthropic's for its clients, whether they are loaded or not. Aliases
//! are names that requests may give; they are not listed. `/models/load` and `/models/unload` are llama.cpp's.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::app::{App, SharedApp};
use crate::error::{ApiError, OpenAiErrorBody};
use crate::error_responses::OpenAiErrors;
use crate::json_body::JsonBody;
use crate::load_stage::LoadStage;
use crate::messages::{MessagesModel, MessagesModelList, is_messages_client};
use crate::models::{LibraryModel, ModelSlot, not_managed};
use crate::monitoring::ProgressBody;
use crate::sse::{self, ServerSentEvent};
use crate::stream::StreamEvent;

pub fn router() -> Router<SharedApp> {
    // Model names contain slashes.
    Router::new()
        .route("/v1/models", get(list))
        .route("/v1/models/{*model}", get(one))
        .route("/models/load", post(load))
        .route("/models/unload", post(unload))
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
pub async fn list(State(app): State<SharedApp>, headers: HeaderMap) -> Result<Json<ModelListBody>, ApiError> {
    let models = app.list().await?;
    Ok(Json(match is_messages_client(&headers) {
        true => {
            let models = models.iter().map(|model| MessagesModel::new(&app, &model.name)).collect();
            ModelListBody::Messages(MessagesModelList::new(models))
        }
        false => {
            let data = models.into_iter().map(|model| ModelObject::new(&app, model)).collect();
            ModelListBody::OpenAi(ModelList { object: "list", data })
        }
    }))
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
    if !app.has_model(&name).await? {
        return Err(ApiError::unknown_model(&name));
    }
    let slot = app.slot(Some(&name)).await?;
    if is_messages_client(&headers) {
        return Ok(Json(ModelBody::Messages(MessagesModel::new(&app, slot.name()).called(&name))));
    }
    let model = app.list().await?.into_iter().find(|model| model.name == slot.name());
    let model = model.ok_or_else(|| ApiError::unknown_model(&name))?;
    Ok(Json(ModelBody::OpenAi(ModelObject { id: name, ..ModelObject::new(&app, model) })))
}

/// Load a model
///
/// The reply comes when the model is loaded; with `stream`, events tell how far that is. The last one has the state
/// `ready`, or is an error.
#[utoipa::path(
    post, path = "/models/load", tag = "server", security(("key" = []), ("x-api-key" = [])),
    request_body = ModelLoadRequest,
    responses(
        (status = 200, description = "The model is loaded",
            content((ModelLoadReply = "application/json"), (ServerSentEvent = "text/event-stream"))),
        OpenAiErrors,
    )
)]
pub async fn load(
    State(app): State<SharedApp>,
    JsonBody(request, _): JsonBody<ModelLoadRequest>,
) -> Result<Response, ApiError> {
    let slot = app.slot(Some(&request.model)).await?;
    if request.stream != Some(true) {
        app.models().acquire(&slot).await?;
        return Ok(Json(ModelLoadReply { success: true }).into_response());
    }
    let changes = slot.changes();
    let models = Arc::clone(app.models());
    let loading = {
        let slot = Arc::clone(&slot);
        Box::pin(async move { models.acquire(&slot).await.map(drop) })
    };
    let events = stream::unfold((slot, changes, Some(loading)), |(slot, mut changes, loading)| async move {
        let mut loading = loading?;
        tokio::select! {
            biased;
            loaded = &mut loading => {
                let event = match loaded {
                    Ok(()) => StreamEvent::json(&ModelState::of(&slot)),
                    Err(error) => StreamEvent::json(&error.openai_body()),
                };
                Some((event, (slot, changes, None)))
            }
            _ = changes.changed() => Some((StreamEvent::json(&ModelState::of(&slot)), (slot, changes, Some(loading)))),
        }
    });
    Ok(sse::respond(events, sse::SERVER_SENT_EVENTS))
}

/// Unload a model
///
/// The reply comes when its requests have ended and its memory is free. The next request loads it again.
#[utoipa::path(
    post, path = "/models/unload", tag = "server", security(("key" = []), ("x-api-key" = [])),
    request_body = ModelLoadRequest,
    responses((status = 200, description = "The model is unloaded", body = ModelLoadReply), OpenAiErrors)
)]
pub async fn unload(
    State(app): State<SharedApp>,
    JsonBody(request, _): JsonBody<ModelLoadRequest>,
) -> Result<Json<ModelLoadReply>, ApiError> {
    if app.models().library().is_none() {
        return Err(not_managed());
    }
    let slot = app.slot(Some(&request.model)).await?;
    app.models().unload(&slot).await;
    Ok(Json(ModelLoadReply { success: true }))
}

/// A model to load or to unload
#[derive(Debug, Deserialize, ToSchema)]
pub struct ModelLoadRequest {
    pub model: String,
    /// Tell how far loading is
    pub stream: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub struct ModelLoadReply {
    success: bool,
}

/// How far a model is
#[derive(Serialize, ToSchema)]
pub struct ModelState {
    /// `unloaded`, `loading`, `ready`, `rebuilding`, `failed` or `draining`
    #[schema(value_type = String)]
    state: &'static str,
    /// Why the model failed
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    progress: Option<ProgressBody>,
}

impl ModelState {
    fn of(slot: &ModelSlot) -> Self {
        let stage = slot.stage();
        let (reason, progress) = match &stage {
            LoadStage::Failed(why) => (Some(why.clone()), None),
            LoadStage::Loading(progress) => (None, Some(ProgressBody::from(progress))),
            _ => (None, None),
        };
        Self { state: stage.name(), reason, progress }
    }
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
    /// Size of the model's files in bytes; 0 while it is not known
    size: u64,
    #[serde(flatten)]
    state: ModelState,
}

impl ModelObject {
    fn new(app: &App, model: LibraryModel) -> Self {
        let slot = app.models().slot(&model.name);
        let max_model_len = slot.as_ref().and_then(|slot| slot.stage().model().ok()).map(|model| model.context);
        let unloaded = || ModelState { state: LoadStage::Unloaded.name(), reason: None, progress: None };
        Self {
            id: model.name,
            object: "model",
            created: app.created(),
            owned_by: "consort",
            max_model_len,
            size: model.bytes,
            state: slot.map_or_else(unloaded, |slot| ModelState::of(&slot)),
        }
    }
}
