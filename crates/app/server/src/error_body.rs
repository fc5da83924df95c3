//! The bodies of error responses. Only this file writes them, for handlers, middleware and the router.

use axum::Json;
use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, ApiErrorKind};
use crate::excerpt::excerpt;

/// Middleware that writes the body of each error in the format of the API that was called, including errors of the router
/// itself (no such path, no such method).
pub async fn write(request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), excerpt(request.uri().path()).into_owned());
    let is_messages = path.starts_with("/v1/messages")
        || (path.starts_with("/v1/models") && crate::messages::is_messages_client(request.headers()));
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ApiError>();
    let error = error.or_else(|| match response.status() {
        StatusCode::METHOD_NOT_ALLOWED => {
            Some(ApiError::new(ApiErrorKind::MethodNotAllowed, format!("{path} does not take {method}")))
        }
        StatusCode::NOT_FOUND if !response.headers().contains_key(CONTENT_TYPE) => {
            Some(ApiError::new(ApiErrorKind::NotFound, format!("there is nothing at {path}")).code("unknown_url"))
        }
        _ => None,
    });
    let Some(error) = error else { return response };
    let mut written = if is_messages {
        (error.status(), Json(error.messages_body())).into_response()
    } else if path.starts_with("/api/") {
        (error.status(), Json(error.ollama_body())).into_response()
    } else {
        (error.status(), Json(error.openai_body())).into_response()
    };
    let headers = written.headers_mut();
    // Keeps the headers of the original response, such as `Allow`.
    for (name, value) in response.headers() {
        if !headers.contains_key(name) && name != axum::http::header::CONTENT_LENGTH {
            headers.insert(name, value.clone());
        }
    }
    if let Some(wait) = error.retry_after {
        let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.kind == ApiErrorKind::Authentication {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    written
}
