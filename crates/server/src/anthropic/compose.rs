//! From the deltas of an answer to content blocks, and to the events that announce them.
//!
//! One block is open at a time; a delta of another kind closes it. A whole message is made from the very blocks whose
//! events a stream sends, so the two forms of an answer cannot differ.

use serde_json::{Map, Value};
use text::Delta;

use super::reply::{Block, BlockDelta, Event};

/// Clients must send a signature back with each thought. We sign nothing and check nothing.
pub const SIGNATURE: &str = "unsigned";

#[derive(Debug)]
pub struct Composer {
    blocks: Vec<OpenBlock>,
    open: bool,
    shows_thinking: bool,
    new_call_id: fn() -> String,
}

#[derive(Debug)]
enum OpenBlock {
    Text(String),
    Thinking(String),
    ToolUse { id: String, name: String, json: String },
}

impl Composer {
    /// `new_call_id` names each tool call.
    pub fn new(shows_thinking: bool, new_call_id: fn() -> String) -> Self {
        Self { blocks: Vec::new(), open: false, shows_thinking, new_call_id }
    }

    /// Takes the next delta; `send` gets its events.
    pub fn push(&mut self, delta: Delta, mut send: impl FnMut(Event)) {
        match delta {
            Delta::Text(text) => {
                if !matches!(self.current(), Some(OpenBlock::Text(_))) {
                    self.begin(OpenBlock::Text(String::new()), &mut send);
                }
                self.extend(&text, |text| BlockDelta::TextDelta { text }, &mut send);
            }
            Delta::Reasoning(thinking) => {
                if !matches!(self.current(), Some(OpenBlock::Thinking(_))) {
                    self.begin(OpenBlock::Thinking(String::new()), &mut send);
                }
                if self.shows_thinking {
                    self.extend(&thinking, |thinking| BlockDelta::ThinkingDelta { thinking }, &mut send);
                }
            }
            Delta::ToolCall { name, .. } => {
                let id = (self.new_call_id)();
                self.begin(OpenBlock::ToolUse { id, name, json: String::new() }, &mut send);
            }
            Delta::Arguments { json, .. } => {
                self.extend(&json, |partial_json| BlockDelta::InputJsonDelta { partial_json }, &mut send);
            }
        }
    }

    /// Closes what is open.
    pub fn finish(&mut self, mut send: impl FnMut(Event)) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let index = self.blocks.len() - 1;
        if let Some(OpenBlock::Thinking(_)) = self.blocks.last() {
            let delta = BlockDelta::SignatureDelta { signature: SIGNATURE.to_owned() };
            send(Event::ContentBlockDelta { index, delta });
        }
        send(Event::ContentBlockStop { index });
    }

    pub fn into_blocks(self) -> Vec<Block> {
        self.blocks.into_iter().map(OpenBlock::into_block).collect()
    }

    fn current(&self) -> Option<&OpenBlock> {
        self.blocks.last().filter(|_| self.open)
    }

    fn begin(&mut self, block: OpenBlock, send: &mut impl FnMut(Event)) {
        self.finish(&mut *send);
        send(Event::ContentBlockStart { index: self.blocks.len(), content_block: block.announced() });
        self.blocks.push(block);
        self.open = true;
    }

    fn extend(&mut self, piece: &str, delta: impl FnOnce(String) -> BlockDelta, send: &mut impl FnMut(Event)) {
        // Arguments without a call cannot be: the parser names a call before it gives them.
        let Some(block) = self.blocks.last_mut().filter(|_| !piece.is_empty()) else { return };
        let (OpenBlock::Text(content) | OpenBlock::Thinking(content) | OpenBlock::ToolUse { json: content, .. }) =
            block;
        content.push_str(piece);
        send(Event::ContentBlockDelta { index: self.blocks.len() - 1, delta: delta(piece.to_owned()) });
    }
}

impl OpenBlock {
    /// The empty block that a start event shows.
    fn announced(&self) -> Block {
        match self {
            Self::Text(_) => Block::Text { text: String::new() },
            Self::Thinking(_) => Block::Thinking { thinking: String::new(), signature: String::new() },
            Self::ToolUse { id, name, .. } => Block::ToolUse { id: id.clone(), name: name.clone(), input: Map::new() },
        }
    }

    fn into_block(self) -> Block {
        match self {
            Self::Text(text) => Block::Text { text },
            Self::Thinking(thinking) => Block::Thinking { thinking, signature: SIGNATURE.to_owned() },
            Self::ToolUse { id, name, json } => Block::ToolUse { id, name, input: input_of(&json) },
        }
    }
}

/// An answer that was cut short leaves arguments that are no JSON: they are given as none, and the stop reason says why.
fn input_of(json: &str) -> Map<String, Value> {
    serde_json::from_str(json).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(shows_thinking: bool, deltas: Vec<Delta>, events: Value, blocks: Value) {
        let mut composer = Composer::new(shows_thinking, || "toolu_1".to_owned());
        let mut sent = Vec::new();
        for delta in deltas {
            composer.push(delta, |event| sent.push(event));
        }
        composer.finish(|event| sent.push(event));
        assert_eq!(serde_json::to_value(&sent).unwrap(), events);
        for event in &sent {
            assert_eq!(serde_json::to_value(event).unwrap()["type"], event.name());
        }
        assert_eq!(serde_json::to_value(composer.into_blocks()).unwrap(), blocks);
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
