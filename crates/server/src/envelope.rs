//! Errors as bodies: the one place where a status becomes JSON, whichever layer gave it.

use axum::Json;
use axum::extract::Request;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::error::{ApiError, ErrorKind};

/// Writes the body of every error in the form of the API that was called. Errors of the router itself (no such path, no
/// such method) have no body either, and get one here.
pub async fn dress(request: Request, next: Next) -> Response {
    let anthropic = request.uri().path().starts_with("/v1/messages");
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ApiError>();
    let error = error.or_else(|| match response.status() {
        StatusCode::METHOD_NOT_ALLOWED => {
            Some(ApiError::new(ErrorKind::MethodNotAllowed, format!("{path} does not take {method}")))
        }
        StatusCode::NOT_FOUND if !response.headers().contains_key(CONTENT_TYPE) => {
            Some(ApiError::new(ErrorKind::NotFound, format!("there is nothing at {path}")).code("unknown_url"))
        }
        _ => None,
    });
    let Some(error) = error else { return response };
    let mut dressed = match anthropic {
        true => (error.status(), Json(error.anthropic())).into_response(),
        false => (error.status(), Json(error.openai())).into_response(),
    };
    let headers = dressed.headers_mut();
    // What the router says about the method (`Allow`) stays.
    for (name, value) in response.headers() {
        if !headers.contains_key(name) && name != axum::http::header::CONTENT_LENGTH {
            headers.insert(name, value.clone());
        }
    }
    if let Some(wait) = error.retry_after {
        let seconds = wait.as_secs_f64().ceil().max(1.0) as u64;
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.kind == ErrorKind::Authentication {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    dressed
}
