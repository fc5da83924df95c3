//! Encodes a generation as a response: as a stream of events or as one body.
//!
//! One output item is open at a time; a delta of another kind closes it.

use std::mem::take;

use serde_json::json;
use text::Delta;

use super::open_item::OpenItem;
use super::request::{ResponsesRequest, ResponsesTextConfig, ResponsesTruncation};
use super::response::{
    JsonText, ResponsesEvent, ResponsesEventKind, ResponsesFailure, ResponsesIncompleteDetails,
    ResponsesIncompleteReason, ResponsesInputDetails, ResponsesLogprob, ResponsesOutputDetails, ResponsesReply,
    ResponsesReplyObject, ResponsesStatus, ResponsesUsage,
};
use super::store::StoreTicket;
use super::tool_types::{ResponsesToolChoice, ResponsesToolMode};
use super::tools::CallForms;
use crate::error::ApiError;
use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, GenerationEvent, OutputBlock, ScoredToken, Usage};
use crate::ids::{new_id, unix_now};
use crate::stream::{StreamEncoder, StreamEvent};

/// The maximum bytes of the settings that a response repeats, as JSON.
const SETTINGS_BYTES_MAX: usize = 1 << 20;

/// Converts a token's log probabilities; `None` if they were not requested.
type EncodeLogprob = Box<dyn Fn(&ScoredToken) -> Option<ResponsesLogprob> + Send>;

pub struct ResponsesEncoder {
    /// `output` contains the closed items.
    response: ResponsesReply,
    /// The response for [`StreamEncoder::idle`]: without output and settings, which may be long.
    idle: Box<ResponsesReply>,
    open: Option<OpenItem>,
    forms: CallForms,
    /// Log probabilities of tokens whose text is not final yet.
    pending_logprobs: Vec<ResponsesLogprob>,
    /// Number of events sent so far.
    sequence_number: u64,
    encode_logprob: EncodeLogprob,
    /// Stores the response at its end; `None` if it is not to be stored.
    ticket: Option<StoreTicket>,
    /// Creates an id with a prefix.
    new_id: fn(&str) -> String,
}

impl ResponsesEncoder {
    /// Fails if the settings that the response repeats are too long.
    pub fn new(
        request: ResponsesRequest,
        forms: CallForms,
        ticket: Option<StoreTicket>,
        encode_logprob: impl Fn(&ScoredToken) -> Option<ResponsesLogprob> + Send + 'static,
    ) -> Result<Self, ApiError> {
        let response = ResponsesReply { store: ticket.is_some(), ..in_progress(request) };
        check_settings(&response)?;
        let idle = ResponsesReply {
            instructions: None,
            metadata: JsonText::new(&json!({})),
            text: JsonText::new(&ResponsesTextConfig::default()),
            tool_choice: JsonText::new(&ResponsesToolMode::Auto),
            tools: JsonText::new(&json!([])),
            user: None,
            ..response.clone()
        };
        Ok(Self {
            response,
            idle: Box::new(idle),
            open: None,
            forms,
            pending_logprobs: Vec::new(),
            sequence_number: 0,
            encode_logprob: Box::new(encode_logprob),
            ticket,
            new_id,
        })
    }

    /// The id of the response.
    pub fn id(&self) -> &str {
        &self.response.id
    }

    fn send(&mut self, kind: ResponsesEventKind, out: &mut Vec<StreamEvent>) {
        let event = ResponsesEvent { kind, sequence_number: self.sequence_number };
        self.sequence_number += 1;
        out.push(StreamEvent::named(event.kind.name(), &event));
    }

    fn send_all(&mut self, kinds: impl IntoIterator<Item = ResponsesEventKind>, out: &mut Vec<StreamEvent>) {
        kinds.into_iter().for_each(|kind| self.send(kind, out));
    }

    fn delta(&mut self, delta: Delta, out: &mut Vec<StreamEvent>) {
        if self.open.as_ref().is_none_or(|open| !open.accepts(&delta)) {
            self.close_item(ResponsesStatus::Completed, out);
            let open = OpenItem::new(&delta, self.response.output.len(), &self.forms, self.new_id);
            self.send_all(open.added(), out);
            self.open = Some(open);
        }
        let logprobs = take(&mut self.pending_logprobs);
        let event = self.open.as_mut().and_then(|open| open.push(delta, logprobs));
        self.send_all(event, out);
    }

    fn close_item(&mut self, status: ResponsesStatus, out: &mut Vec<StreamEvent>) {
        let Some(open) = self.open.take() else { return };
        let (events, item) = open.close(status);
        self.send_all(events, out);
        self.response.output.push(item);
    }

    /// Closes the open item and sends the last event, which contains the whole response.
    fn close(&mut self, status: ResponsesStatus, usage: Option<Usage>, out: &mut Vec<StreamEvent>) {
        let completed = status == ResponsesStatus::Completed;
        self.close_item(if completed { ResponsesStatus::Completed } else { ResponsesStatus::Incomplete }, out);
        self.response.status = status;
        self.response.completed_at = completed.then(unix_now);
        self.response.usage = usage.map(ResponsesUsage::from);
        if let Some(ticket) = self.ticket.take().filter(|_| status != ResponsesStatus::Failed) {
            ticket.store(&self.response);
        }
        let response = Box::new(self.response.clone());
        let kind = match status {
            ResponsesStatus::Completed => ResponsesEventKind::Completed { response },
            ResponsesStatus::Incomplete | ResponsesStatus::Cancelled => ResponsesEventKind::Incomplete { response },
            ResponsesStatus::Failed | ResponsesStatus::InProgress => ResponsesEventKind::Failed { response },
        };
        self.send(kind, out);
    }
}

impl StreamEncoder for ResponsesEncoder {
    type Body = ResponsesReply;

    fn start(&mut self, _usage: Usage, out: &mut Vec<StreamEvent>) {
        let response = Box::new(self.response.clone());
        self.send(ResponsesEventKind::Created { response: response.clone() }, out);
        self.send(ResponsesEventKind::InProgress { response }, out);
    }

    /// The API has no ping. Codex does not count comments as activity, and clients ignore a repeated `response.in_progress`.
    fn idle(&mut self, out: &mut Vec<StreamEvent>) {
        let response = self.idle.clone();
        self.send(ResponsesEventKind::InProgress { response }, out);
    }

    fn event(&mut self, _choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>) {
        match event {
            GenerationEvent::Prefilled { .. } => {}
            GenerationEvent::Delta { deltas, tokens } => {
                self.pending_logprobs.extend(tokens.iter().filter_map(&self.encode_logprob));
                deltas.into_iter().for_each(|delta| self.delta(delta, out));
            }
            GenerationEvent::Finished(ChoiceFinish::Length) => {
                let reason = ResponsesIncompleteReason::MaxOutputTokens;
                self.response.incomplete_details = Some(ResponsesIncompleteDetails { reason });
                self.close(ResponsesStatus::Incomplete, Some(usage), out);
            }
            GenerationEvent::Finished(ChoiceFinish::Stop | ChoiceFinish::StopString(_) | ChoiceFinish::ToolCalls) => {
                self.close(ResponsesStatus::Completed, Some(usage), out);
            }
        }
    }

    fn cancelled(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.close(ResponsesStatus::Cancelled, Some(usage), out);
    }

    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>) {
        let code = error.code.unwrap_or("server_error");
        self.response.error = Some(ResponsesFailure { code, message: error.message });
        self.close(ResponsesStatus::Failed, None, out);
    }

    /// The response that the last event of a stream contains: each block is encoded as one delta, and the events are
    /// dropped.
    fn into_body(mut self, mut outputs: Vec<ChoiceOutput>, usage: Usage) -> ResponsesReply {
        let ChoiceOutput { blocks, tokens, finish, .. } = outputs.pop().unwrap_or_default();
        let mut dropped = Vec::new();
        for OutputBlock { kind, text, tokens: range } in blocks {
            let deltas = match kind {
                BlockKind::Text => vec![Delta::Text(text)],
                BlockKind::Reasoning => vec![Delta::Reasoning(text)],
                BlockKind::ToolCall { name } => {
                    vec![Delta::ToolCall { index: 0, name }, Delta::Arguments { index: 0, json: text }]
                }
            };
            let tokens = tokens[range].to_vec();
            self.event(0, GenerationEvent::Delta { deltas, tokens }, usage, &mut dropped);
        }
        self.event(0, GenerationEvent::Finished(finish), usage, &mut dropped);
        self.response
    }
}

/// Bounds what a response keeps of its request while it is generated. The prompt is bounded by the context.
fn check_settings(response: &ResponsesReply) -> Result<(), ApiError> {
    let ResponsesReply { metadata, text, tool_choice, tools, user, .. } = response;
    let texts = metadata.bytes() + text.bytes() + tool_choice.bytes() + tools.bytes();
    if texts + user.as_ref().map_or(0, String::len) > SETTINGS_BYTES_MAX {
        let message = format!(
            "`tools`, `tool_choice`, `text` and `user`, which the response repeats, have more than {SETTINGS_BYTES_MAX} bytes"
        );
        return Err(ApiError::invalid("tools", message));
    }
    Ok(())
}

/// The response before generation starts, with the settings of its request.
fn in_progress(request: ResponsesRequest) -> ResponsesReply {
    let tools: Vec<_> = request.tools.iter().flatten().filter(|tool| tool.is_offered()).collect();
    let tool_choice = request.tool_choice.unwrap_or(ResponsesToolChoice::Mode(ResponsesToolMode::Auto));
    ResponsesReply {
        id: new_id("resp_"),
        object: ResponsesReplyObject::Response,
        created_at: unix_now(),
        completed_at: None,
        status: ResponsesStatus::InProgress,
        error: None,
        incomplete_details: None,
        model: request.model,
        output: Vec::new(),
        usage: None,
        instructions: request.instructions,
        max_output_tokens: request.max_output_tokens,
        metadata: JsonText::new(&request.metadata.unwrap_or_default()),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        previous_response_id: request.previous_response_id,
        reasoning: request.reasoning.unwrap_or_default(),
        background: request.background == Some(true),
        store: false,
        temperature: request.temperature,
        text: JsonText::new(&request.text.unwrap_or_default()),
        tool_choice: JsonText::new(&tool_choice),
        tools: JsonText::new(&tools),
        top_logprobs: request.top_logprobs.unwrap_or(0),
        top_p: request.top_p,
        truncation: request.truncation.unwrap_or(ResponsesTruncation::Disabled),
        user: request.user,
    }
}

impl From<Usage> for ResponsesUsage {
    fn from(usage: Usage) -> Self {
        let cached_tokens = usage.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: ResponsesInputDetails { cached_tokens, cache_write_tokens: 0 },
            output_tokens: usage.completion_tokens,
            output_tokens_details: ResponsesOutputDetails { reasoning_tokens: usage.reasoning_tokens },
            total_tokens: usage.total_tokens(),
        }
    }
}

#[cfg(test)]
pub mod tests;
