//! Where all APIs are mounted, and what every request passes on its way to them.

use std::sync::Arc;

use axum::Router;
use axum::http::HeaderValue;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{Any, CorsLayer};

use crate::app::App;
use crate::error::ApiError;
use crate::{anthropic, auth, envelope, observe, openai, openapi, page, responses};

/// Everything that is served, ready to be put behind a listener.
pub fn router(app: &Arc<App>) -> Router {
    let guarded = Router::new()
        .merge(openai::router())
        .merge(anthropic::router())
        .merge(responses::router())
        .merge(observe::guarded())
        .route_layer(from_fn_with_state(Arc::clone(app), auth::admit));
    let router = Router::new()
        .merge(guarded)
        .merge(observe::open())
        .merge(openapi::router())
        .merge(page::router())
        .with_state(Arc::clone(app))
        .layer(from_fn(observe::trace))
        .layer(CatchPanicLayer::custom(|_| ApiError::internal("the server made a mistake").into_response()))
        .layer(from_fn(envelope::dress));
    let origins = &app.config().origins;
    if origins.is_empty() { router } else { router.layer(cors(origins)) }
}

/// Lets pages of these origins ask.
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let layer = CorsLayer::new().allow_methods(Any).allow_headers(Any).expose_headers(Any);
    let any = origins.iter().any(|origin| origin == "*");
    if any { layer.allow_origin(Any) } else { layer.allow_origin(origins.to_vec()) }
}
