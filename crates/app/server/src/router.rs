//! The routes of all APIs, and their middleware.

use std::sync::Arc;

use axum::Router;
use axum::http::HeaderValue;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{Any, CorsLayer};

use crate::app::{App, SharedApp};
use crate::error::ApiError;
use crate::{
    api_docs, auth, cluster, compression, error_body, host_check, kept_answers, messages, monitoring, ollama, openai,
    openapi, page, responses, server_info,
};

/// The service that a [`crate::Listener`] serves.
pub fn router(app: &Arc<App>) -> Router {
    let protected = Router::new()
        .merge(openai::router())
        .merge(messages::router())
        .merge(responses::router())
        .merge(kept_answers::router())
        .merge(ollama::router())
        .merge(server_info::router())
        .merge(cluster::router())
        .merge(monitoring::protected_router())
        .route_layer(from_fn_with_state(Arc::clone(app), auth::authenticate));
    let router = Router::new()
        .merge(protected)
        .merge(monitoring::public_router())
        .merge(openapi::router())
        .merge(api_docs::router())
        .merge(page::router());
    let router = with_common_layers(router, app).layer(compression::layer());
    let origins = &app.config().origins;
    if origins.is_empty() { router } else { router.layer(cors(origins)) }
}

/// The service of the admin port: `/health`, `/ready`, `/metrics` and `/status`. Where no key is required, the `Host` is
/// checked instead.
pub fn admin_router(app: &Arc<App>, require_key: bool) -> Router {
    let protected = monitoring::protected_router();
    let protected = match require_key {
        true => protected.route_layer(from_fn_with_state(Arc::clone(app), auth::authenticate)),
        false => protected.route_layer(from_fn_with_state(Arc::clone(app), host_check::require)),
    };
    with_common_layers(protected.merge(monitoring::public_router()), app)
}

/// Tracing, and the bodies of errors.
fn with_common_layers(router: Router<SharedApp>, app: &Arc<App>) -> Router {
    router
        .with_state(Arc::clone(app))
        .layer(from_fn_with_state(Arc::clone(app), monitoring::trace))
        .layer(CatchPanicLayer::custom(|_| ApiError::internal("the server made a mistake").into_response()))
        .layer(from_fn(error_body::write))
}

/// Allows pages of these origins to call the server.
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let layer = CorsLayer::new().allow_methods(Any).allow_headers(Any).expose_headers(Any);
    let any = origins.iter().any(|origin| origin == "*");
    if any { layer.allow_origin(Any) } else { layer.allow_origin(origins.to_vec()) }
}
