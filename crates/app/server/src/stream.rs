//! `StreamEncoder`: encodes a generation in the format of one API, as events or as one body.
//!
//! An encoder is a state machine without I/O: it converts the events of a generation into those of its API. [`events`]
//! drives it. Framing is separate: see [`sse`].

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, stream};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::error::ApiError;
use crate::generation::{ChoiceOutput, Generation, GenerationEvent, Usage};
use crate::sse;

/// Writes generations in the format of one API. Each method appends events to `out`.
pub trait StreamEncoder: Send + 'static {
    /// The response of a generation that is not streamed.
    type Body: Serialize;

    /// The engine has accepted the request; nothing is computed yet. `usage` counts the tokens of the prompt.
    fn start(&mut self, _usage: Usage, _out: &mut Vec<StreamEvent>) {}

    /// The next event of the generation. `usage` counts the tokens up to this event.
    fn event(&mut self, choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>);

    /// Nothing was sent for a while. By default a comment is sent: it keeps proxies from closing the connection. Clients that
    /// wait for events, and ignore comments, need an event.
    fn idle(&mut self, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::comment());
    }

    /// All choices have finished.
    fn end(&mut self, _usage: Usage, _out: &mut Vec<StreamEvent>) {}

    /// The generation was cancelled by a request of the client, and ends before its choices have finished.
    fn cancelled(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.end(usage, out);
    }

    /// The generation failed. The client must receive an error, and nothing that indicates success.
    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>);

    /// The whole response, from all choices. It has the same content as the events of a stream.
    fn into_body(self, outputs: Vec<ChoiceOutput>, usage: Usage) -> Self::Body;
}

/// One event of a stream, without its framing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamEvent {
    /// `None` if the API does not name its events.
    pub name: Option<&'static str>,
    /// JSON on one line, or a literal such as `[DONE]`. Empty for a comment.
    pub data: Vec<u8>,
}

impl StreamEvent {
    pub fn json(value: &impl Serialize) -> Self {
        let data = serde_json::to_vec(value).expect("wire types have string keys");
        Self { name: None, data }
    }

    pub fn named(name: &'static str, value: &impl Serialize) -> Self {
        Self { name: Some(name), ..Self::json(value) }
    }

    pub fn literal(text: &str) -> Self {
        Self { name: None, data: text.into() }
    }

    /// Tells that the connection is alive, and nothing else.
    pub fn comment() -> Self {
        Self { name: None, data: Vec::new() }
    }
}

/// Responds with events as they arrive, or with one body at the end of the generation. After each `keep_alive` without an
/// event the encoder sends one.
pub async fn respond(
    generation: Generation,
    encoder: impl StreamEncoder,
    streams: bool,
    keep_alive: Duration,
) -> Result<Response, ApiError> {
    if streams {
        return Ok(sse::respond(events(generation, encoder, keep_alive), sse::SERVER_SENT_EVENTS));
    }
    let (outputs, usage) = generation.collect().await?;
    Ok(Json(encoder.into_body(outputs, usage)).into_response())
}

/// The events of a generation. Dropping the stream, as happens when the client disconnects, cancels the generation.
pub fn events<E: StreamEncoder>(
    generation: Generation,
    encoder: E,
    keep_alive: Duration,
) -> impl Stream<Item = StreamEvent> + Send {
    events_until(generation, encoder, keep_alive, None)
}

/// The same; it also ends when `cancelled` is notified.
pub fn events_until<E: StreamEncoder>(
    generation: Generation,
    mut encoder: E,
    keep_alive: Duration,
    cancelled: Option<Arc<Notify>>,
) -> impl Stream<Item = StreamEvent> + Send {
    let mut first = Vec::new();
    encoder.start(generation.usage(), &mut first);
    let (ready, idle_at) = (VecDeque::from(first), Instant::now() + keep_alive);
    let source = EventSource { generation: Some(generation), encoder, ready, keep_alive, idle_at, cancelled };
    stream::unfold(source, |mut source| async move { source.next().await.map(|event| (event, source)) })
}

/// A generation and its encoder.
struct EventSource<E> {
    /// `None` after its end.
    generation: Option<Generation>,
    encoder: E,
    ready: VecDeque<StreamEvent>,
    keep_alive: Duration,
    /// When the encoder is asked for an event. Tokens that give no event do not postpone it.
    idle_at: Instant,
    cancelled: Option<Arc<Notify>>,
}

impl<E: StreamEncoder> EventSource<E> {
    async fn next(&mut self) -> Option<StreamEvent> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.idle_at = Instant::now() + self.keep_alive;
                return Some(event);
            }
            let running = self.generation.as_mut()?;
            let mut out = Vec::new();
            let next = tokio::select! {
                biased;
                () = notified(self.cancelled.as_deref()) => {
                    self.encoder.cancelled(running.usage(), &mut out);
                    self.generation = None;
                    self.ready.extend(out);
                    continue;
                }
                next = timeout_at(self.idle_at, running.next()) => next,
            };
            match next {
                Err(_) => self.encoder.idle(&mut out),
                Ok(Some(Ok((choice, event)))) => self.encoder.event(choice, event, running.usage(), &mut out),
                Ok(Some(Err(error))) => {
                    tracing::warn!(%error, "a generation failed in mid-stream");
                    self.encoder.error(error, &mut out);
                    self.generation = None;
                }
                Ok(None) => {
                    self.encoder.end(running.usage(), &mut out);
                    self.generation = None;
                }
            }
            self.ready.extend(out);
        }
    }
}

/// Waits for the notification; for ever without one.
async fn notified(notify: Option<&Notify>) {
    match notify {
        Some(notify) => notify.notified().await,
        None => pending().await,
    }
}
