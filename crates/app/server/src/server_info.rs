//! `/version`, and llama.cpp's `/props`.

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use text::SpecialTokens;
use types::TokenId;
use utoipa::{OpenApi, ToSchema};

use crate::app::SharedApp;
use crate::error::{ApiError, OpenAiErrorBody};
use crate::generation::SamplingOverrides;

const VERSION: &str = env!("CARGO_PKG_VERSION");

pub fn router() -> Router<SharedApp> {
    Router::new().route("/version", get(version)).route("/props", get(props))
}

#[derive(OpenApi)]
#[openapi(paths(version, props))]
pub struct ServerInfoPaths;

#[derive(Serialize, ToSchema)]
pub struct ServerVersion {
    #[schema(value_type = String)]
    version: &'static str,
}

/// Get the version of this server
#[utoipa::path(
    get, path = "/version", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The version", body = ServerVersion),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
    )
)]
async fn version() -> Json<ServerVersion> {
    Json(ServerVersion { version: VERSION })
}

/// Properties of the server, with llama.cpp's names
#[derive(Serialize, ToSchema)]
pub struct ServerProps {
    default_generation_settings: DefaultSettings,
    /// Requests that run at once; more are queued
    total_slots: usize,
    model_alias: String,
    /// The model's name, not a path
    model_path: String,
    /// The chat template, in Jinja; empty if the model has none
    chat_template: String,
    bos_token: String,
    eos_token: String,
    modalities: Modalities,
    build_info: String,
}

/// The settings of requests that give none
#[derive(Serialize, ToSchema)]
pub struct DefaultSettings {
    /// Maximum tokens of prompt and output together
    n_ctx: usize,
    params: DefaultParams,
}

#[derive(Serialize, ToSchema)]
pub struct DefaultParams {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    repeat_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    /// Always -1: as many tokens as fit the context
    n_predict: i64,
}

/// Input other than text
#[derive(Serialize, ToSchema)]
pub struct Modalities {
    vision: bool,
    audio: bool,
}

/// Get the properties of the server, in llama.cpp's format
#[utoipa::path(
    get, path = "/props", tag = "server", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The properties", body = ServerProps),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 503, description = "No model is loaded", body = OpenAiErrorBody),
    )
)]
async fn props(State(app): State<SharedApp>) -> Result<Json<ServerProps>, ApiError> {
    let model = app.model(None).await?;
    let sampling = SamplingOverrides::default().params(&model.defaults.sampling(), None, 0);
    let token = |ids: &[TokenId]| {
        ids.first().map_or_else(String::new, |&id| model.tokenizer.decode(&[id], SpecialTokens::Show))
    };
    let name = model.name().to_owned();
    Ok(Json(ServerProps {
        default_generation_settings: DefaultSettings {
            n_ctx: model.context,
            params: DefaultParams {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                repeat_penalty: sampling.repetition_penalty,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                n_predict: -1,
            },
        },
        total_slots: model.service.capacity().sequences_max,
        model_alias: name.clone(),
        model_path: name,
        chat_template: model.template.as_ref().map_or_else(String::new, |template| template.source().to_owned()),
        bos_token: token(model.tokenizer.prefix_ids()),
        eos_token: token(model.tokenizer.eos_ids()),
        modalities: Modalities { vision: false, audio: false },
        build_info: format!("consort {VERSION}"),
    }))
}
