//! Encodes a generation as a message: as a stream of events or as one body.
//!
//! One content block is open at a time; a delta of another kind closes it.

use serde_json::Map;
use text::Delta;

use super::request::{MessagesRequest, MessagesThinking, MessagesThinkingDisplay};
use super::response::{
    MessagesBlockDelta, MessagesDelta, MessagesEvent, MessagesReply, MessagesReplyBlock, MessagesReplyKind,
    MessagesReplyRole, MessagesStopReason, MessagesUsage,
};
use crate::error::ApiError;
use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, GenerationEvent, OutputBlock, Usage};
use crate::ids::new_id;
use crate::stream::{StreamEncoder, StreamEvent};

/// Clients must send a signature back with each thinking block. The server does not sign or check them.
const SIGNATURE: &str = "unsigned";

pub struct MessagesEncoder {
    id: String,
    model: String,
    shows_thinking: bool,
    /// The block that is being streamed, and its index.
    open: Option<BlockKind>,
    index: usize,
    new_call_id: fn() -> String,
}

impl MessagesEncoder {
    pub fn new(request: &MessagesRequest) -> Self {
        let omitted = Some(MessagesThinkingDisplay::Omitted);
        let hides = match request.thinking {
            Some(MessagesThinking::Enabled { display } | MessagesThinking::Adaptive { display }) => display == omitted,
            _ => false,
        };
        Self {
            id: new_id("msg_"),
            model: request.model.clone(),
            shows_thinking: !hides,
            open: None,
            index: 0,
            new_call_id: || new_id("toolu_"),
        }
    }

    fn delta(&mut self, delta: Delta, out: &mut Vec<StreamEvent>) {
        if self.open.as_ref().is_none_or(|kind| !kind.accepts(&delta)) {
            self.stop_block(out);
            let kind = BlockKind::of(&delta);
            let content_block = match kind.clone() {
                BlockKind::Text => MessagesReplyBlock::Text { text: String::new() },
                BlockKind::Reasoning => {
                    MessagesReplyBlock::Thinking { thinking: String::new(), signature: String::new() }
                }
                BlockKind::ToolCall { name } => self.tool_use(name, ""),
            };
            send(MessagesEvent::ContentBlockStart { index: self.index, content_block }, out);
            self.open = Some(kind);
        }
        let delta = match delta {
            Delta::Text(text) => MessagesBlockDelta::TextDelta { text },
            Delta::Reasoning(thinking) if self.shows_thinking => MessagesBlockDelta::ThinkingDelta { thinking },
            Delta::Reasoning(_) | Delta::ToolCall { .. } => return,
            Delta::Arguments { json, .. } => MessagesBlockDelta::InputJsonDelta { partial_json: json },
        };
        send(MessagesEvent::ContentBlockDelta { index: self.index, delta }, out);
    }

    fn stop_block(&mut self, out: &mut Vec<StreamEvent>) {
        let Some(kind) = self.open.take() else { return };
        let index = self.index;
        if kind == BlockKind::Reasoning {
            let delta = MessagesBlockDelta::SignatureDelta { signature: SIGNATURE.to_owned() };
            send(MessagesEvent::ContentBlockDelta { index, delta }, out);
        }
        send(MessagesEvent::ContentBlockStop { index }, out);
        self.index += 1;
    }

    fn block(&self, OutputBlock { kind, text, .. }: OutputBlock) -> MessagesReplyBlock {
        match kind {
            BlockKind::Text => MessagesReplyBlock::Text { text },
            BlockKind::Reasoning => {
                let thinking = if self.shows_thinking { text } else { String::new() };
                MessagesReplyBlock::Thinking { thinking, signature: SIGNATURE.to_owned() }
            }
            BlockKind::ToolCall { name } => self.tool_use(name, &text),
        }
    }

    /// Arguments of a call that was cut off are not valid JSON. Then the input is empty, and the stop reason tells why.
    fn tool_use(&self, name: String, arguments: &str) -> MessagesReplyBlock {
        let input = serde_json::from_str(arguments).unwrap_or_else(|_| Map::new());
        MessagesReplyBlock::ToolUse { id: (self.new_call_id)(), name, input }
    }

    fn message(&self, content: Vec<MessagesReplyBlock>, end: Option<MessagesDelta>, usage: Usage) -> MessagesReply {
        let (stop_reason, stop_sequence) = end.map_or((None, None), |end| (Some(end.stop_reason), end.stop_sequence));
        MessagesReply {
            id: self.id.clone(),
            kind: MessagesReplyKind::Message,
            role: MessagesReplyRole::Assistant,
            model: self.model.clone(),
            content,
            stop_reason,
            stop_sequence,
            usage: usage.into(),
        }
    }
}

impl StreamEncoder for MessagesEncoder {
    type Body = MessagesReply;

    /// Sent before the prompt is computed: clients give up after some minutes without an event. How many of its tokens were
    /// cached is not known yet; the usage in `message_delta` says it.
    fn start(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        send(MessagesEvent::MessageStart { message: self.message(Vec::new(), None, usage) }, out);
        send(MessagesEvent::Ping, out);
    }

    fn idle(&mut self, out: &mut Vec<StreamEvent>) {
        send(MessagesEvent::Ping, out);
    }

    fn event(&mut self, _choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>) {
        match event {
            GenerationEvent::Prefilled { .. } => {}
            GenerationEvent::Delta { deltas, .. } => deltas.into_iter().for_each(|delta| self.delta(delta, out)),
            GenerationEvent::Finished(finish) => {
                self.stop_block(out);
                send(MessagesEvent::MessageDelta { delta: finish.into(), usage: usage.into() }, out);
                send(MessagesEvent::MessageStop, out);
            }
        }
    }

    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::named("error", &error.messages_body()));
    }

    fn into_body(self, mut outputs: Vec<ChoiceOutput>, usage: Usage) -> MessagesReply {
        let ChoiceOutput { blocks, finish, .. } = outputs.pop().unwrap_or_default();
        let content = blocks.into_iter().map(|block| self.block(block)).collect();
        self.message(content, Some(finish.into()), usage)
    }
}

fn send(event: MessagesEvent, out: &mut Vec<StreamEvent>) {
    out.push(StreamEvent::named(event.name(), &event));
}

impl From<ChoiceFinish> for MessagesDelta {
    fn from(finish: ChoiceFinish) -> Self {
        let (stop_reason, stop_sequence) = match finish {
            ChoiceFinish::Stop => (MessagesStopReason::EndTurn, None),
            ChoiceFinish::StopString(text) => (MessagesStopReason::StopSequence, Some(text)),
            ChoiceFinish::Length => (MessagesStopReason::MaxTokens, None),
            ChoiceFinish::ToolCalls => (MessagesStopReason::ToolUse, None),
        };
        Self { stop_reason, stop_sequence }
    }
}

impl From<Usage> for MessagesUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached_tokens,
            output_tokens: usage.completion_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Checks the events between the start and the end of a message, and the content of the same message in one body.
    fn check(shows_thinking: bool, deltas: Vec<Delta>, events: Value, content: Value) {
        let encoder = || MessagesEncoder {
            id: "msg_1".to_owned(),
            model: "m".to_owned(),
            shows_thinking,
            open: None,
            index: 0,
            new_call_id: || "toolu_1".to_owned(),
        };
        let (mut streaming, mut output, mut sent) = (encoder(), ChoiceOutput::default(), Vec::new());
        for delta in deltas {
            let event = GenerationEvent::Delta { deltas: vec![delta], tokens: Vec::new() };
            output.push(event.clone());
            streaming.event(0, event, Usage::default(), &mut sent);
        }
        streaming.event(0, GenerationEvent::Finished(ChoiceFinish::Stop), Usage::default(), &mut sent);
        let mut sent: Vec<Value> = sent
            .iter()
            .map(|StreamEvent { name, data }| {
                let data: Value = serde_json::from_slice(data).unwrap();
                assert_eq!(data["type"].as_str(), *name);
                data
            })
            .collect();
        let end = sent.split_off(sent.len() - 2);
        assert_eq!([&end[0]["type"], &end[1]["type"]], ["message_delta", "message_stop"]);
        assert_eq!(Value::Array(sent), events);
        let body = serde_json::to_value(encoder().into_body(vec![output], Usage::default())).unwrap();
        assert_eq!(body["content"], content);
    }

    #[test]
    fn an_empty_answer_has_no_block_and_no_event() {
        check(true, vec![], json!([]), json!([]));
    }

    #[test]
    fn thoughts_text_and_calls_become_blocks_one_after_the_other() {
        check(
            true,
            vec![
                Delta::Reasoning("hm".into()),
                Delta::Reasoning("m".into()),
                Delta::Text("I look".into()),
                Delta::ToolCall { index: 0, name: "find".into() },
                Delta::Arguments { index: 0, json: "{\"a\":".into() },
                Delta::Arguments { index: 0, json: "1}".into() },
                Delta::ToolCall { index: 1, name: "stop".into() },
                Delta::Arguments { index: 1, json: "{}".into() },
            ],
            json!([
                {"type": "content_block_start", "index": 0,
                    "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "m"}},
                {"type": "content_block_delta", "index": 0,
                    "delta": {"type": "signature_delta", "signature": SIGNATURE}},
                {"type": "content_block_stop", "index": 0},
                {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I look"}},
                {"type": "content_block_stop", "index": 1},
                {"type": "content_block_start", "index": 2,
                    "content_block": {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}},
                {"type": "content_block_delta", "index": 2,
                    "delta": {"type": "input_json_delta", "partial_json": "{\"a\":"}},
                {"type": "content_block_delta", "index": 2,
                    "delta": {"type": "input_json_delta", "partial_json": "1}"}},
                {"type": "content_block_stop", "index": 2},
                {"type": "content_block_start", "index": 3,
                    "content_block": {"type": "tool_use", "id": "toolu_1", "name": "stop", "input": {}}},
                {"type": "content_block_delta", "index": 3,
                    "delta": {"type": "input_json_delta", "partial_json": "{}"}},
                {"type": "content_block_stop", "index": 3},
            ]),
            json!([
                {"type": "thinking", "thinking": "hmm", "signature": SIGNATURE},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"a": 1}},
                {"type": "tool_use", "id": "toolu_1", "name": "stop", "input": {}},
            ]),
        );
    }

    #[test]
    fn thoughts_that_are_not_to_be_shown_leave_an_empty_block() {
        check(
            false,
            vec![Delta::Reasoning("secret".into()), Delta::Reasoning("!".into())],
            json!([
                {"type": "content_block_start", "index": 0,
                    "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
                {"type": "content_block_delta", "index": 0,
                    "delta": {"type": "signature_delta", "signature": SIGNATURE}},
                {"type": "content_block_stop", "index": 0},
            ]),
            json!([{"type": "thinking", "thinking": "", "signature": SIGNATURE}]),
        );
    }

    #[test]
    fn arguments_cut_short_are_streamed_and_leave_no_input() {
        check(
            true,
            vec![
                Delta::ToolCall { index: 0, name: "find".into() },
                Delta::Arguments { index: 0, json: "{\"a\": [1, ".into() },
            ],
            json!([
                {"type": "content_block_start", "index": 0,
                    "content_block": {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}},
                {"type": "content_block_delta", "index": 0,
                    "delta": {"type": "input_json_delta", "partial_json": "{\"a\": [1, "}},
                {"type": "content_block_stop", "index": 0},
            ]),
            json!([{"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}]),
        );
    }
}
