//! `/openapi.json`: all endpoints with their bodies and errors, generated from the types of the handlers.

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::app::SharedApp;
use crate::cluster::ClusterPaths;
use crate::kept_answers::KeptAnswersPaths;
use crate::messages::MessagesPaths;
use crate::monitoring::MonitoringPaths;
use crate::ollama::OllamaPaths;
use crate::openai::OpenAiPaths;
use crate::responses::ResponsesPaths;
use crate::server_info::ServerInfoPaths;

pub fn router() -> Router<SharedApp> {
    Router::new().route("/openapi.json", get(document))
}

/// Merges the paths of all APIs into one document.
pub fn build() -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    let apis = [
        OpenAiPaths::openapi(),
        ResponsesPaths::openapi(),
        KeptAnswersPaths::openapi(),
        MessagesPaths::openapi(),
        OllamaPaths::openapi(),
        ServerInfoPaths::openapi(),
        ClusterPaths::openapi(),
        MonitoringPaths::openapi(),
    ];
    for api in apis {
        document.merge(api);
    }
    document
}

/// This document
#[utoipa::path(
    get, path = "/openapi.json", tag = "server",
    responses((status = 200, description = "OpenAPI", content_type = "application/json", body = Object))
)]
async fn document(State(app): State<SharedApp>) -> Json<utoipa::openapi::OpenApi> {
    let mut document = build();
    if app.keys().is_empty() {
        for item in document.paths.paths.values_mut() {
            for operation in [&mut item.get, &mut item.post, &mut item.delete].into_iter().flatten() {
                operation.security = None;
            }
        }
    } else {
        Keys.modify(&mut document);
    }
    Json(document)
}

#[derive(OpenApi)]
#[openapi(
    info(title = "consort", description = "One large language model on the machines you already have"),
    paths(document)
)]
struct Document;

struct Keys;

impl Modify for Keys {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("key", SecurityScheme::Http(bearer));
        let header = ApiKey::Header(ApiKeyValue::new("x-api-key"));
        components.add_security_scheme("x-api-key", SecurityScheme::ApiKey(header));
    }
}
