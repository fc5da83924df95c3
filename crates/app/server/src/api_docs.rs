//! `/docs`: the OpenAPI document as a page. The server renders it, so it needs neither scripts nor other hosts.

mod html;

use std::sync::LazyLock;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::openapi;

const POLICY: &str = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";

pub fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new().route("/docs", get(page)).route("/docs/style.css", get(style))
}

async fn page() -> Response {
    static PAGE: LazyLock<String> = LazyLock::new(|| {
        let document = serde_json::to_value(openapi::build()).expect("the document is JSON");
        html::render(&document)
    });
    serve("text/html; charset=utf-8", &PAGE)
}

async fn style() -> Response {
    serve("text/css; charset=utf-8", include_str!("../docs/style.css"))
}

fn serve(content_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    let headers = headers.map(|(name, value): (HeaderName, _)| (name, HeaderValue::from_static(value)));
    (headers, text).into_response()
}
