//! `StreamEncoder`: encodes a generation in the format of one API, as events or as one body.
//!
//! An encoder is a state machine without I/O: it converts the events of a generation into those of its API. [`events`]
//! drives it. Framing is separate: see [`sse`].

use std::collections::VecDeque;
use std::time::Duration;

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, stream};
use serde::Serialize;

use crate::error::ApiError;
use crate::generation::{ChoiceOutput, Generation, GenerationEvent, Usage};
use crate::sse;

/// Writes generations in the format of one API. Each method appends events to `out`.
pub trait StreamEncoder: Send + 'static {
    /// The response of a generation that is not streamed.
    type Body: Serialize;

    /// The engine has accepted the request; nothing is computed yet.
    fn start(&mut self, _out: &mut Vec<StreamEvent>) {}

    /// The next event of the generation. `usage` counts the tokens up to this event.
    fn event(&mut self, choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>);

    /// All choices have finished.
    fn end(&mut self, _usage: Usage, _out: &mut Vec<StreamEvent>) {}

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
    /// JSON on one line, or a literal such as `[DONE]`.
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
}

/// Responds with events as they arrive, or with one body at the end of the generation.
pub async fn respond(
    generation: Generation,
    encoder: impl StreamEncoder,
    streams: bool,
    keep_alive: Duration,
) -> Result<Response, ApiError> {
    if streams {
        return Ok(sse::respond(events(generation, encoder), keep_alive));
    }
    let (outputs, usage) = generation.collect().await?;
    Ok(Json(encoder.into_body(outputs, usage)).into_response())
}

/// The events of a generation. Dropping the stream, as happens when the client disconnects, cancels the generation.
fn events<E: StreamEncoder>(generation: Generation, mut encoder: E) -> impl Stream<Item = StreamEvent> + Send {
    let mut first = Vec::new();
    encoder.start(&mut first);
    let state = (Some(generation), encoder, VecDeque::from(first));
    stream::unfold(state, |(mut generation, mut encoder, mut ready)| async move {
        loop {
            if let Some(event) = ready.pop_front() {
                return Some((event, (generation, encoder, ready)));
            }
            let running = generation.as_mut()?;
            let mut out = Vec::new();
            match running.next().await {
                Some(Ok((choice, event))) => encoder.event(choice, event, running.usage(), &mut out),
                Some(Err(error)) => {
                    tracing::warn!(%error, "a generation failed in mid-stream");
                    encoder.error(error, &mut out);
                    generation = None;
                }
                None => {
                    encoder.end(running.usage(), &mut out);
                    generation = None;
                }
            }
            ready.extend(out);
        }
    })
}
