//! Server-sent events: the framing of streams, with comments that keep idle connections open.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use tokio::time::{Instant, Sleep, sleep};
use utoipa::ToSchema;

use crate::stream::StreamEvent;

// Only the schema is used: `/openapi.json` describes streams with it.
#[derive(ToSchema)]
#[expect(dead_code)]
pub struct ServerSentEvent {
    /// Name of the event, if the API has names
    #[schema(required = false)]
    event: String,
    /// JSON, or `[DONE]`
    data: String,
}

/// A response that sends events as they arrive, and a comment after each `keep_alive` without an event.
pub fn respond(events: impl Stream<Item = StreamEvent> + Send + 'static, keep_alive: Duration) -> Response {
    let events = KeepAlive { events: Box::pin(events), keep_alive, timer: Box::pin(sleep(keep_alive)) };
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Keeps nginx from buffering events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// `event: name` where there is a name, `data: …`, and an empty line. The data has no line breaks.
fn frame(StreamEvent { name, data }: StreamEvent) -> Bytes {
    let mut bytes = Vec::with_capacity(data.len() + 64);
    if let Some(name) = name {
        bytes.extend_from_slice(format!("event: {name}\n").as_bytes());
    }
    bytes.extend_from_slice(b"data: ");
    bytes.extend_from_slice(&data);
    bytes.extend_from_slice(b"\n\n");
    bytes.into()
}

/// Frames events, and sends a comment when the stream is idle.
struct KeepAlive<S> {
    events: Pin<Box<S>>,
    keep_alive: Duration,
    timer: Pin<Box<Sleep>>,
}

impl<S: Stream<Item = StreamEvent>> Stream for KeepAlive<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = match self.events.as_mut().poll_next(context) {
            Poll::Ready(event) => event.map(|event| Ok(frame(event))),
            Poll::Pending => {
                std::task::ready!(self.timer.as_mut().poll(context));
                Some(Ok(Bytes::from_static(b": still here\n\n")))
            }
        };
        let until = Instant::now() + self.keep_alive;
        self.timer.as_mut().reset(until);
        Poll::Ready(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{StreamExt, stream};
    use serde_json::json;

    #[test]
    fn an_event_is_one_line_of_data_and_an_empty_line() {
        assert_eq!(frame(StreamEvent::json(&json!({"a": "x\ny"}))), b"data: {\"a\":\"x\\ny\"}\n\n"[..]);
        assert_eq!(frame(StreamEvent::named("ping", &json!({}))), b"event: ping\ndata: {}\n\n"[..]);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_with_comments() {
        let events = stream::once(async {
            tokio::time::sleep(Duration::from_secs(25)).await;
            StreamEvent::literal("[DONE]")
        });
        let body = respond(events, Duration::from_secs(10)).into_body();
        let sent: Vec<_> = body.into_data_stream().map(|bytes| bytes.unwrap()).collect().await;
        assert_eq!(sent, [&b": still here\n\n"[..], b": still here\n\n", b"data: [DONE]\n\n"]);
    }
}
