//! Encodes a generation as a response: as a stream of events or as one body.
//!
//! One output item is open at a time; a delta of another kind closes it.

use std::mem::take;

use text::Delta;

use super::request::{ResponsesRequest, ResponsesToolChoice, ResponsesToolMode, ResponsesTruncation};
use super::response::{
    ResponsesEvent, ResponsesEventKind, ResponsesFailure, ResponsesIncompleteDetails, ResponsesIncompleteReason,
    ResponsesInputDetails, ResponsesItem, ResponsesLogprob, ResponsesOutputDetails, ResponsesPart, ResponsesReply,
    ResponsesReplyObject, ResponsesReplyRole, ResponsesStatus, ResponsesUsage,
};
use crate::error::ApiError;
use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, GenerationEvent, OutputBlock, ScoredToken, Usage};
use crate::ids::{new_id, unix_now};
use crate::stream::{StreamEncoder, StreamEvent};

/// Each item has at most one part.
const CONTENT_INDEX: usize = 0;

/// Converts a token's log probabilities; `None` if they were not requested.
type EncodeLogprob = Box<dyn Fn(&ScoredToken) -> Option<ResponsesLogprob> + Send>;

pub struct ResponsesEncoder {
    /// `output` contains the closed items.
    response: ResponsesReply,
    open: Option<OpenItem>,
    /// Log probabilities of tokens whose text is not final yet.
    pending_logprobs: Vec<ResponsesLogprob>,
    /// Number of events sent so far.
    sequence_number: u64,
    encode_logprob: EncodeLogprob,
    /// Creates an id with a prefix.
    new_id: fn(&str) -> String,
}

/// The item that is being streamed.
struct OpenItem {
    kind: BlockKind,
    id: String,
    /// Empty unless the item is a tool call.
    call_id: String,
    text: String,
    logprobs: Vec<ResponsesLogprob>,
}

impl ResponsesEncoder {
    pub fn new(
        request: ResponsesRequest,
        encode_logprob: impl Fn(&ScoredToken) -> Option<ResponsesLogprob> + Send + 'static,
    ) -> Self {
        Self {
            response: in_progress(request),
            open: None,
            pending_logprobs: Vec::new(),
            sequence_number: 0,
            encode_logprob: Box::new(encode_logprob),
            new_id,
        }
    }

    fn send(&mut self, kind: ResponsesEventKind, out: &mut Vec<StreamEvent>) {
        let event = ResponsesEvent { kind, sequence_number: self.sequence_number };
        self.sequence_number += 1;
        out.push(StreamEvent::named(event.kind.name(), &event));
    }

    fn delta(&mut self, delta: Delta, out: &mut Vec<StreamEvent>) {
        if self.open.as_ref().is_none_or(|open| !open.kind.accepts(&delta)) {
            self.close_item(ResponsesStatus::Completed, out);
            self.open_item(BlockKind::of(&delta), out);
        }
        let logprobs = take(&mut self.pending_logprobs);
        let (output_index, content_index) = (self.response.output.len(), CONTENT_INDEX);
        let Some(open) = &mut self.open else { return };
        let item_id = open.id.clone();
        let kind = match delta {
            Delta::Text(delta) => {
                open.text += &delta;
                open.logprobs.extend_from_slice(&logprobs);
                ResponsesEventKind::TextDelta { item_id, output_index, content_index, delta, logprobs }
            }
            Delta::Reasoning(delta) => {
                open.text += &delta;
                ResponsesEventKind::ReasoningDelta { item_id, output_index, content_index, delta }
            }
            Delta::Arguments { json: delta, .. } => {
                open.text += &delta;
                ResponsesEventKind::ArgumentsDelta { item_id, output_index, delta }
            }
            Delta::ToolCall { .. } => return,
        };
        self.send(kind, out);
    }

    fn open_item(&mut self, kind: BlockKind, out: &mut Vec<StreamEvent>) {
        let (prefix, call_id) = match kind {
            BlockKind::Text => ("msg_", String::new()),
            BlockKind::Reasoning => ("rs_", String::new()),
            BlockKind::ToolCall { .. } => ("fc_", (self.new_id)("call_")),
        };
        let open = OpenItem { kind, id: (self.new_id)(prefix), call_id, text: String::new(), logprobs: Vec::new() };
        let (output_index, content_index) = (self.response.output.len(), CONTENT_INDEX);
        let item = open.item(None, ResponsesStatus::InProgress);
        self.send(ResponsesEventKind::ItemAdded { output_index, item }, out);
        if let Some(part) = open.part() {
            let item_id = open.id.clone();
            self.send(ResponsesEventKind::PartAdded { item_id, output_index, content_index, part }, out);
        }
        self.open = Some(open);
    }

    fn close_item(&mut self, status: ResponsesStatus, out: &mut Vec<StreamEvent>) {
        let Some(open) = self.open.take() else { return };
        let (output_index, content_index) = (self.response.output.len(), CONTENT_INDEX);
        let (item_id, text, logprobs) = (open.id.clone(), open.text.clone(), open.logprobs.clone());
        let done = match &open.kind {
            BlockKind::Text => ResponsesEventKind::TextDone { item_id, output_index, content_index, text, logprobs },
            BlockKind::Reasoning => ResponsesEventKind::ReasoningDone { item_id, output_index, content_index, text },
            BlockKind::ToolCall { name } => {
                ResponsesEventKind::ArgumentsDone { item_id, output_index, name: name.clone(), arguments: text }
            }
        };
        self.send(done, out);
        if let Some(part) = open.part() {
            let item_id = open.id.clone();
            self.send(ResponsesEventKind::PartDone { item_id, output_index, content_index, part }, out);
        }
        let item = open.item(open.part(), status);
        self.send(ResponsesEventKind::ItemDone { output_index, item: item.clone() }, out);
        self.response.output.push(item);
    }

    /// Closes the open item and sends the last event, which contains the whole response.
    fn close(&mut self, status: ResponsesStatus, usage: Option<Usage>, out: &mut Vec<StreamEvent>) {
        let completed = status == ResponsesStatus::Completed;
        self.close_item(if completed { ResponsesStatus::Completed } else { ResponsesStatus::Incomplete }, out);
        self.response.status = status;
        self.response.completed_at = completed.then(unix_now);
        self.response.usage = usage.map(ResponsesUsage::from);
        let response = Box::new(self.response.clone());
        let kind = match status {
            ResponsesStatus::Completed => ResponsesEventKind::Completed { response },
            ResponsesStatus::Incomplete => ResponsesEventKind::Incomplete { response },
            ResponsesStatus::Failed | ResponsesStatus::InProgress => ResponsesEventKind::Failed { response },
        };
        self.send(kind, out);
    }
}

impl StreamEncoder for ResponsesEncoder {
    type Body = ResponsesReply;

    fn start(&mut self, out: &mut Vec<StreamEvent>) {
        let response = Box::new(self.response.clone());
        self.send(ResponsesEventKind::Created { response: response.clone() }, out);
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

impl OpenItem {
    /// The content of the item so far; `None` for a tool call.
    fn part(&self) -> Option<ResponsesPart> {
        let (text, logprobs) = (self.text.clone(), self.logprobs.clone());
        match self.kind {
            BlockKind::Text => Some(ResponsesPart::OutputText { text, annotations: Vec::new(), logprobs }),
            BlockKind::Reasoning => Some(ResponsesPart::ReasoningText { text }),
            BlockKind::ToolCall { .. } => None,
        }
    }

    fn item(&self, part: Option<ResponsesPart>, status: ResponsesStatus) -> ResponsesItem {
        let (id, content) = (self.id.clone(), part.into_iter().collect());
        match &self.kind {
            BlockKind::Text => ResponsesItem::Message { id, status, role: ResponsesReplyRole::Assistant, content },
            BlockKind::Reasoning => ResponsesItem::Reasoning { id, summary: Vec::new(), content, status },
            BlockKind::ToolCall { name } => {
                let (call_id, name, arguments) = (self.call_id.clone(), name.clone(), self.text.clone());
                ResponsesItem::FunctionCall { id, call_id, name, arguments, status }
            }
        }
    }
}

/// The response before generation starts, with the settings of its request.
fn in_progress(request: ResponsesRequest) -> ResponsesReply {
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
        metadata: request.metadata.unwrap_or_default(),
        parallel_tool_calls: request.parallel_tool_calls.unwrap_or(true),
        previous_response_id: None,
        reasoning: request.reasoning.unwrap_or_default(),
        background: false,
        store: false,
        temperature: request.temperature,
        text: request.text.unwrap_or_default(),
        tool_choice: request.tool_choice.unwrap_or(ResponsesToolChoice::Mode(ResponsesToolMode::Auto)),
        tools: request.tools.unwrap_or_default(),
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
mod tests {
    use super::*;
    use engine::Logprobs;
    use serde_json::{Value, json};
    use types::TokenId;

    const USAGE: Usage = Usage { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 3, reasoning_tokens: 1 };

    /// An encoder whose ids all end in 1, and whose tokens are characters.
    fn encoder() -> ResponsesEncoder {
        let request = json!({"model": "m", "input": "hi", "store": true, "temperature": 0.5});
        let encode_logprob = |token: &ScoredToken| {
            let bytes = vec![token.id.0 as u8];
            let token = char::from(bytes[0]).to_string();
            Some(ResponsesLogprob { token, bytes, logprob: -0.5, top_logprobs: Vec::new() })
        };
        let encoder = ResponsesEncoder::new(serde_json::from_value(request).unwrap(), encode_logprob);
        ResponsesEncoder { new_id: |prefix| format!("{prefix}1"), ..encoder }
    }

    fn delta(delta: Delta, tokens: &str) -> GenerationEvent {
        let token =
            |byte: u8| ScoredToken { id: TokenId(byte.into()), logprobs: Some(Logprobs { chosen: -0.5, top: vec![] }) };
        GenerationEvent::Delta { deltas: vec![delta], tokens: tokens.bytes().map(token).collect() }
    }

    fn text(text: &str) -> GenerationEvent {
        delta(Delta::Text(text.to_owned()), "")
    }

    fn finished(finish: ChoiceFinish) -> Result<GenerationEvent, ApiError> {
        Ok(GenerationEvent::Finished(finish))
    }

    /// Encodes generation events and an end. The last event must contain the same response as the single body.
    fn encode(events: Vec<GenerationEvent>, end: Result<GenerationEvent, ApiError>) -> Vec<Value> {
        let (mut streaming, mut output, mut sent) = (encoder(), ChoiceOutput::default(), Vec::new());
        streaming.start(&mut sent);
        for event in events {
            output.push(event.clone());
            streaming.event(0, event, USAGE, &mut sent);
        }
        let finished = end.is_ok();
        match end {
            Ok(end) => {
                output.push(end.clone());
                streaming.event(0, end, USAGE, &mut sent);
            }
            Err(error) => streaming.error(error, &mut sent),
        }
        let json = |(number, StreamEvent { name, data }): (usize, StreamEvent)| {
            let mut data: Value = serde_json::from_slice(&data).unwrap();
            assert_eq!(data["type"].as_str(), name);
            assert_eq!(data.as_object_mut().unwrap().remove("sequence_number"), Some(json!(number)));
            data
        };
        let sent: Vec<_> = sent.into_iter().enumerate().map(json).collect();
        if finished {
            let mut whole = serde_json::to_value(encoder().into_body(vec![output], USAGE)).unwrap();
            let last = &sent.last().unwrap()["response"];
            for varies in ["id", "created_at", "completed_at"] {
                whole[varies] = last[varies].clone();
            }
            assert_eq!(whole, *last);
        }
        sent
    }

    /// The events between the first two and the last, and the output of the last.
    fn items(events: Vec<GenerationEvent>, finish: ChoiceFinish) -> (Vec<Value>, Value) {
        let mut sent = encode(events, finished(finish));
        let mut last = sent.pop().unwrap();
        (sent.split_off(2), last["response"]["output"].take())
    }

    fn names(events: &[Value]) -> Vec<&str> {
        events.iter().map(|event| event["type"].as_str().unwrap().trim_start_matches("response.")).collect()
    }

    #[test]
    fn an_empty_answer_has_no_item_and_no_event() {
        assert_eq!(items(vec![], ChoiceFinish::Stop), (vec![], json!([])));
    }

    #[test]
    fn a_text_is_announced_grows_and_is_closed_with_its_part() {
        let (events, items) = items(vec![text("he"), text("llo")], ChoiceFinish::Stop);
        let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
        let item = |status: &str, content: Value| json!({"type": "message", "id": "msg_1", "status": status, "role": "assistant", "content": content});
        let at = |more: Value| {
            let mut event = json!({"item_id": "msg_1", "output_index": 0, "content_index": 0});
            event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            event
        };
        let expected = vec![
            json!({"type": "response.output_item.added", "output_index": 0, "item": item("in_progress", json!([]))}),
            at(json!({"type": "response.content_part.added", "part": part("")})),
            at(json!({"type": "response.output_text.delta", "delta": "he", "logprobs": []})),
            at(json!({"type": "response.output_text.delta", "delta": "llo", "logprobs": []})),
            at(json!({"type": "response.output_text.done", "text": "hello", "logprobs": []})),
            at(json!({"type": "response.content_part.done", "part": part("hello")})),
            json!({"type": "response.output_item.done", "output_index": 0,
                "item": item("completed", json!([part("hello")]))}),
        ];
        assert_eq!(events, expected);
        assert_eq!(items, json!([item("completed", json!([part("hello")]))]));
    }

    #[test]
    fn reasoning_text_and_calls_are_items_one_after_the_other() {
        let deltas = [
            Delta::Reasoning("hm".into()),
            Delta::Text("well".into()),
            Delta::ToolCall { index: 0, name: "find".into() },
            Delta::Arguments { index: 0, json: "{".into() },
            Delta::Arguments { index: 0, json: "}".into() },
            Delta::ToolCall { index: 1, name: "stop".into() },
            Delta::Arguments { index: 1, json: "{\"a".into() },
        ];
        let (events, items) = items(deltas.map(|one| delta(one, "")).into(), ChoiceFinish::Length);
        let reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"];
        let text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"];
        let done = ["content_part.done", "output_item.done"];
        let (delta, end) = ("function_call_arguments.delta", ["function_call_arguments.done", "output_item.done"]);
        let first_call = ["output_item.added", delta, delta];
        let second_call = ["output_item.added", delta];
        let expected = [&reasoning[..], &done, &text, &done, &first_call, &end, &second_call, &end].concat();
        assert_eq!(names(&events), expected);
        let call = |name: &str, arguments: &str, status: &str| {
            json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": arguments,
                "status": status})
        };
        assert_eq!(
            items,
            json!([
                {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
                    "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                    "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}]},
                call("find", "{}", "completed"),
                call("stop", "{\"a", "incomplete"),
            ])
        );
    }

    #[test]
    fn log_probabilities_go_with_the_text_and_never_with_reasoning() {
        let (events, items) = items(
            vec![
                delta(Delta::Reasoning("x".into()), "x"),
                delta(Delta::Text("ab".into()), "ab"),
                delta(Delta::Text("c".into()), "c"),
            ],
            ChoiceFinish::Stop,
        );
        let tokens = |logprobs: &Value| {
            let tokens = logprobs.as_array().unwrap().iter().map(|one| one["token"].as_str().unwrap().to_owned());
            tokens.collect::<Vec<_>>()
        };
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        assert_eq!(deltas.map(|event| tokens(&event["logprobs"])).collect::<Vec<_>>(), [vec!["a", "b"], vec!["c"]]);
        assert_eq!(tokens(&items[1]["content"][0]["logprobs"]), ["a", "b", "c"]);
    }

    #[test]
    fn a_response_begins_at_once_and_ends_with_its_whole_output() {
        let events =
            encode(vec![GenerationEvent::Prefilled { prompt: vec![] }, text("hello")], finished(ChoiceFinish::Stop));
        assert_eq!(events[0]["type"], "response.created");
        assert_eq!(events[1]["type"], "response.in_progress");
        assert_eq!(events[1]["response"]["status"], "in_progress");
        let last = &events.last().unwrap();
        assert_eq!(last["type"], "response.completed");
        let response = &last["response"];
        assert_eq!(response["id"], events[0]["response"]["id"]);
        assert_eq!(response["status"], "completed");
        assert_eq!(response["store"], false);
        assert_eq!(response["temperature"], 0.5);
        assert_eq!(response["output"][0]["content"][0]["text"], "hello");
        assert_eq!(
            response["usage"],
            json!({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
                "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 8})
        );
    }

    #[test]
    fn too_few_tokens_leave_a_response_incomplete() {
        let events = encode(vec![text("hel")], finished(ChoiceFinish::Length));
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.incomplete");
        assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
        assert_eq!(last["response"]["output"][0]["status"], "incomplete");
    }

    #[test]
    fn a_failure_has_its_code_and_keeps_the_output_so_far() {
        let check = |error: ApiError, code: &str| {
            let message = error.message.clone();
            let events = encode(vec![text("hel")], Err(error));
            let last = events.last().unwrap();
            assert_eq!(last["type"], "response.failed");
            assert_eq!(last["response"]["error"], json!({"code": code, "message": message}));
            assert_eq!(last["response"]["output"][0]["content"][0]["text"], "hel");
        };
        check(ApiError::internal("the device is gone"), "server_error");
        check(ApiError::rank_lost("rank 1 is gone"), "rank_lost");
        check(ApiError::shutting_down(), "shutting_down");
    }
}
