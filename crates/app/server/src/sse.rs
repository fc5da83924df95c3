//! The framing of streams: server-sent events, or one JSON object per line.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt};
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

/// How events are written to a stream.
#[derive(Clone, Copy, Debug)]
pub struct Framing {
    content_type: &'static str,
    frame: fn(StreamEvent) -> Bytes,
}

pub const SERVER_SENT_EVENTS: Framing = Framing { content_type: "text/event-stream", frame: server_sent_event };

pub const JSON_LINES: Framing = Framing { content_type: "application/x-ndjson", frame: json_line };

/// A response that sends events as they arrive.
pub fn respond(events: impl Stream<Item = StreamEvent> + Send + 'static, framing: Framing) -> Response {
    respond_framed(events.map(framing.frame), framing)
}

/// The same for events that are framed already.
pub fn respond_framed(frames: impl Stream<Item = Bytes> + Send + 'static, framing: Framing) -> Response {
    let mut response = Body::from_stream(frames.map(Ok::<_, Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(framing.content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Keeps nginx from buffering events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// `event: name` where there is a name, `data: …`, and an empty line. The data has no line breaks. Without data it is a
/// comment.
fn server_sent_event(event: StreamEvent) -> Bytes {
    if event.data.is_empty() {
        return comment();
    }
    framed(&event, String::new())
}

/// A server-sent event with its number, from which a client can resume.
pub fn numbered(event: &StreamEvent, number: u64) -> Bytes {
    framed(event, format!("id: {number}\n"))
}

pub fn comment() -> Bytes {
    Bytes::from_static(b": still here\n\n")
}

fn framed(StreamEvent { name, data }: &StreamEvent, mut head: String) -> Bytes {
    if let Some(name) = name {
        head += &format!("event: {name}\n");
    }
    let mut bytes = Vec::with_capacity(head.len() + data.len() + 8);
    bytes.extend_from_slice(head.as_bytes());
    bytes.extend_from_slice(b"data: ");
    bytes.extend_from_slice(data);
    bytes.extend_from_slice(b"\n\n");
    bytes.into()
}

/// The data, which has no line breaks, and a line break. A comment is a space: before an object it is no part of it, and some
/// clients do not skip empty lines.
fn json_line(StreamEvent { mut data, .. }: StreamEvent) -> Bytes {
    if data.is_empty() {
        return Bytes::from_static(b" ");
    }
    data.push(b'\n');
    data.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_one_line_of_data_and_an_empty_line() {
        let frame = server_sent_event;
        assert_eq!(frame(StreamEvent::json(&json!({"a": "x\ny"}))), b"data: {\"a\":\"x\\ny\"}\n\n"[..]);
        assert_eq!(frame(StreamEvent::named("ping", &json!({}))), b"event: ping\ndata: {}\n\n"[..]);
        assert_eq!(frame(StreamEvent::comment()), b": still here\n\n"[..]);
        assert_eq!(json_line(StreamEvent::json(&json!({"a": "x\ny"}))), b"{\"a\":\"x\\ny\"}\n"[..]);
        assert_eq!(json_line(StreamEvent::comment()), b" "[..]);
    }
}
