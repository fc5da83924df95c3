//! The routes of all APIs, and their middleware.

use std::sync::Arc;

use axum::Router;
use axum::http::HeaderValue;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::IntoResponse;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

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
    router.layer(cors(&app.config().origins))
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

/// Allows pages of this machine, as Ollama does, and of these origins to call the server.
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let layer = CorsLayer::new().allow_methods(Any).allow_headers(Any).expose_headers(Any);
    if origins.iter().any(|origin| origin == "*") {
        return layer.allow_origin(Any);
    }
    let origins = origins.to_vec();
    layer.allow_origin(AllowOrigin::predicate(move |origin, _| is_of_this_machine(origin) || origins.contains(origin)))
}

/// Whether an origin is a server on this machine, or an application on it that is made of pages.
fn is_of_this_machine(origin: &HeaderValue) -> bool {
    const APPLICATIONS: [&str; 5] = ["app", "file", "tauri", "vscode-webview", "vscode-file"];
    const HOSTS: [&str; 4] = ["localhost", "127.0.0.1", "0.0.0.0", "[::1]"];
    let Some((scheme, rest)) = origin.to_str().ok().and_then(|origin| origin.split_once("://")) else { return false };
    let is_port =
        |port: &str| port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok());
    let is_local = || HOSTS.iter().any(|host| rest.strip_prefix(host).is_some_and(is_port));
    APPLICATIONS.contains(&scheme) || (["http", "https"].contains(&scheme) && is_local())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_this_machine_are_known_by_their_origin() {
        let is_own = |origin: &'static str| is_of_this_machine(&HeaderValue::from_static(origin));
        for origin in [
            "http://localhost",
            "http://localhost:3000",
            "https://127.0.0.1:1",
            "http://[::1]:5173",
            "app://obsidian.md",
        ] {
            assert!(is_own(origin), "{origin}");
        }
        for origin in [
            "null",
            "https://a.example",
            "http://localhost.a.example",
            "http://localhost:x",
            "http://127.0.0.1.a.example",
        ] {
            assert!(!is_own(origin), "{origin}");
        }
    }
}
