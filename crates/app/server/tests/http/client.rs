//! An HTTP client that calls the router directly, without a socket.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use server::App;
use tokio::time::timeout;
use tower::ServiceExt;

use testing::served_model;

/// A test that waits longer fails.
const DEADLINE: Duration = Duration::from_secs(100);

/// Waits until the condition holds.
pub async fn wait_until(condition: &str, mut holds: impl AsyncFnMut() -> bool) {
    let look = async {
        while !holds().await {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, look).await.unwrap_or_else(|_| panic!("still waiting until {condition}"));
}

pub struct Client {
    router: Router,
    headers: Vec<(&'static str, String)>,
}

pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub bytes: Bytes,
}

impl Client {
    /// A client of the shared model.
    pub fn new() -> Self {
        Self::of(&served_model::ready(served_model::config(), served_model::shared()))
    }

    pub fn of(app: &Arc<App>) -> Self {
        Self::with(server::router(app))
    }

    pub fn with(router: Router) -> Self {
        Self { router, headers: Vec::new() }
    }

    pub fn with_header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    pub async fn send(&self, method: Method, path: &str, body: impl Into<Body>) -> axum::response::Response {
        let mut request = Request::builder().method(method).uri(path);
        if !self.headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let response = self.router.clone().oneshot(request.body(body.into()).unwrap());
        timeout(DEADLINE, response).await.expect("a response begins in time").unwrap()
    }

    pub async fn call(&self, method: Method, path: &str, body: impl Into<Body>) -> Answer {
        let response = self.send(method, path, body).await;
        let (parts, body) = response.into_parts();
        let body = timeout(DEADLINE, body.collect()).await.expect("a response ends in time").unwrap();
        Answer { status: parts.status, headers: parts.headers, bytes: body.to_bytes() }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, Body::empty()).await
    }

    /// The body of a successful response.
    pub async fn post(&self, path: &str, body: Value) -> Value {
        let answer = self.call(Method::POST, path, body.to_string()).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.json()
    }

    /// The status and the inner object of an error.
    pub async fn error(&self, path: &str, body: &str) -> (u16, Value) {
        let answer = self.call(Method::POST, path, body.to_owned()).await;
        assert_ne!(answer.status, StatusCode::OK, "{}", answer.text());
        (answer.status.as_u16(), answer.json()["error"].clone())
    }

    /// The events of a stream, which must end with `[DONE]`.
    pub async fn stream(&self, path: &str, mut body: Value) -> Vec<Value> {
        body["stream"] = true.into();
        let answer = self.call(Method::POST, path, body.to_string()).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.headers["content-type"], "text/event-stream");
        let text = answer.text();
        let mut events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert_eq!(events.pop(), Some("data: [DONE]"), "{text}");
        let data = |event: &&str| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        events.iter().map(data).collect()
    }
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// The events of a stream with event names.
pub async fn named_events(client: &Client, path: &str, mut body: Value) -> Vec<(String, Value)> {
    body["stream"] = true.into();
    let answer = client.call(Method::POST, path, body.to_string()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    answer.text().split_terminator("\n\n").map(event).collect()
}
