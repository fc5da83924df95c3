//! Server-sent events: an answer as a stream of events, with comments that keep proxies awake.
//!
//! What the events of an API look like is its [`EventWriter`]'s business: a state machine without I/O, which is told the
//! parts of an answer and gives events.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, stream};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};
use utoipa::openapi::{Object, RefOr, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::answer::{Answer, Part, Usage};
use crate::error::ApiError;

/// Writes an answer in the events of one API.
pub trait EventWriter: Send + 'static {
    /// Before the first part.
    fn begin(&mut self) -> Vec<Event>;

    fn part(&mut self, choice: usize, part: Part) -> Vec<Event>;

    /// After the last part, when all went well.
    fn end(&mut self, usage: Usage) -> Vec<Event>;

    /// After the last part, when something went wrong: an error that every client sees, and no sign of success.
    fn fail(&mut self, error: &ApiError) -> Vec<Event>;
}

/// The events of an answer. Dropping the stream cancels the answer.
pub fn events(answer: Answer, mut writer: impl EventWriter) -> impl Stream<Item = Event> + Send {
    let ready = VecDeque::from(writer.begin());
    stream::unfold((Some(answer), writer, ready), |(mut answer, mut writer, mut ready)| async move {
        loop {
            if let Some(event) = ready.pop_front() {
                return Some((event, (answer, writer, ready)));
            }
            let running = answer.as_mut()?;
            match running.next().await {
                Some(Ok((choice, part))) => ready.extend(writer.part(choice, part)),
                Some(Err(error)) => {
                    tracing::warn!(%error, "an answer broke off");
                    ready.extend(writer.fail(&error));
                    answer = None;
                }
                None => {
                    ready.extend(writer.end(running.usage()));
                    answer = None;
                }
            }
        }
    })
}

/// One event, written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event(Bytes);

impl PartialSchema for Event {
    fn schema() -> RefOr<Schema> {
        let name = Object::builder().schema_type(Type::String).description(Some("Its name, where the API has names"));
        let data = Object::builder().schema_type(Type::String).description(Some("JSON, or `[DONE]`"));
        Object::builder().property("event", name).property("data", data).required("data").into()
    }
}

impl ToSchema for Event {
    fn name() -> Cow<'static, str> {
        "ServerSentEvent".into()
    }
}

impl Event {
    /// `data: {…}`
    pub fn data(value: &impl Serialize) -> Self {
        Self::written("", value)
    }

    /// `event: name`, then the data.
    pub fn named(name: &str, value: &impl Serialize) -> Self {
        Self::written(&format!("event: {name}\n"), value)
    }

    /// `data: [DONE]`, with which OpenAI's streams end when all went well.
    pub fn done() -> Self {
        Self(Bytes::from_static(b"data: [DONE]\n\n"))
    }

    fn written(head: &str, value: &impl Serialize) -> Self {
        let mut text = Vec::with_capacity(256);
        text.extend_from_slice(head.as_bytes());
        text.extend_from_slice(b"data: ");
        // JSON has no line breaks, so one line of data holds it.
        serde_json::to_writer(&mut text, value).expect("our own types have string keys and write to memory");
        text.extend_from_slice(b"\n\n");
        Self(text.into())
    }

    #[cfg(test)]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A response that sends events as they come, and a comment whenever none came for `keep_alive`.
pub fn respond(events: impl Stream<Item = Event> + Send + 'static, keep_alive: Duration) -> Response {
    let events = KeptAlive { events: Box::pin(events), keep_alive, silence: Box::pin(sleep(keep_alive)) };
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would otherwise collect events.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

struct KeptAlive<S> {
    events: Pin<Box<S>>,
    keep_alive: Duration,
    silence: Pin<Box<Sleep>>,
}

impl<S: Stream<Item = Event>> Stream for KeptAlive<S> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = match self.events.as_mut().poll_next(context) {
            Poll::Ready(event) => event.map(|event| Ok(event.0)),
            Poll::Pending => {
                std::task::ready!(self.silence.as_mut().poll(context));
                Some(Ok(Bytes::from_static(b": still here\n\n")))
            }
        };
        let until = Instant::now() + self.keep_alive;
        self.silence.as_mut().reset(until);
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
        assert_eq!(Event::data(&json!({"a": "x\ny"})).as_bytes(), b"data: {\"a\":\"x\\ny\"}\n\n");
        assert_eq!(Event::named("ping", &json!({})).as_bytes(), b"event: ping\ndata: {}\n\n");
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_filled_with_comments() {
        let events = stream::once(async {
            tokio::time::sleep(Duration::from_secs(25)).await;
            Event::done()
        });
        let body = respond(events, Duration::from_secs(10)).into_body();
        let sent: Vec<_> = body.into_data_stream().map(|bytes| bytes.unwrap()).collect().await;
        assert_eq!(sent, [&b": still here\n\n"[..], b": still here\n\n", b"data: [DONE]\n\n"]);
    }
}
