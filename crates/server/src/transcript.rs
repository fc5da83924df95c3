//! A conversation put together item by item, from APIs whose items are finer than the messages of a chat template.
//!
//! What one side says in a row is one message: many templates insist that the sides alternate.

use serde_json::{Map, Value, json};
use text::{Content, Message};

#[derive(Debug, Default)]
pub struct Transcript {
    turns: Vec<Turn>,
}

#[derive(Debug)]
struct Turn {
    role: &'static str,
    texts: Vec<String>,
    extra: Map<String, Value>,
}

impl Transcript {
    pub fn system(&mut self, text: impl Into<String>) {
        self.turn("system").texts.push(text.into());
    }

    pub fn user(&mut self, text: impl Into<String>) {
        self.turn("user").texts.push(text.into());
    }

    pub fn assistant(&mut self, text: impl Into<String>) {
        // A template shows the text of a turn before its calls.
        let calls = |turn: &Turn| turn.role == "assistant" && turn.extra.contains_key("tool_calls");
        if self.turns.last().is_some_and(calls) {
            self.begin("assistant");
        }
        self.turn("assistant").texts.push(text.into());
    }

    pub fn reasoning(&mut self, text: &str) {
        let entry = self.turn("assistant").extra.entry("reasoning_content").or_insert_with(|| json!(""));
        if let Value::String(reasoning) = entry {
            reasoning.push_str(text);
        }
    }

    /// `arguments` is an object, or its JSON as a string.
    pub fn tool_call(&mut self, id: &str, name: &str, arguments: Value) {
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let entry = self.turn("assistant").extra.entry("tool_calls").or_insert_with(|| json!([]));
        if let Value::Array(calls) = entry {
            calls.push(call);
        }
    }

    pub fn tool_result(&mut self, id: &str, text: impl Into<String>) {
        let name = self.called(id);
        let turn = self.begin("tool");
        turn.texts.push(text.into());
        turn.extra.insert("tool_call_id".to_owned(), json!(id));
        // Some templates name the tool beside its result; only the call knows the name.
        if let Some(name) = name {
            turn.extra.insert("name".to_owned(), name);
        }
    }

    /// True when the assistant spoke last, so that an answer goes on from there.
    pub fn ends_with_assistant(&self) -> bool {
        self.turns.last().is_some_and(|turn| turn.role == "assistant")
    }

    pub fn into_messages(self) -> Vec<Message> {
        self.turns.into_iter().map(Turn::into_message).collect()
    }

    fn begin(&mut self, role: &'static str) -> &mut Turn {
        self.turns.push(Turn { role, texts: Vec::new(), extra: Map::new() });
        self.turns.last_mut().expect("one was pushed just now")
    }

    fn turn(&mut self, role: &'static str) -> &mut Turn {
        if self.turns.last().is_none_or(|turn| turn.role != role) {
            return self.begin(role);
        }
        self.turns.last_mut().expect("the last one has this role")
    }

    fn called(&self, id: &str) -> Option<Value> {
        let turns = self.turns.iter().rev();
        let mut calls = turns.filter_map(|turn| turn.extra.get("tool_calls")?.as_array()).flatten();
        calls.find(|call| call["id"] == id).map(|call| call["function"]["name"].clone())
    }
}

impl Turn {
    fn into_message(self) -> Message {
        let mut texts = self.texts;
        let content = match texts.len() {
            0 => Content::Text(String::new()),
            1 => Content::Text(texts.remove(0)),
            _ => Content::Parts(texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect()),
        };
        Message { role: self.role.to_owned(), content, extra: self.extra }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(transcript: Transcript, expected: Value) {
        assert_eq!(serde_json::to_value(transcript.into_messages()).unwrap(), expected);
    }

    #[test]
    fn what_one_side_says_in_a_row_is_one_message() {
        let mut transcript = Transcript::default();
        transcript.system("be kind");
        transcript.system("be brief");
        transcript.user("hello");
        transcript.reasoning("a greeting");
        transcript.assistant("hi");
        check(
            transcript,
            json!([
                {"role": "system", "content": [{"type": "text", "text": "be kind"}, {"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi", "reasoning_content": "a greeting"},
            ]),
        );
    }

    #[test]
    fn parallel_calls_share_a_message_and_each_result_has_its_own() {
        let mut transcript = Transcript::default();
        transcript.assistant("I look");
        transcript.tool_call("a", "find", json!({"x": 1}));
        transcript.tool_call("b", "stop", json!("{}"));
        transcript.tool_result("b", "stopped");
        transcript.tool_result("c", "nobody asked");
        transcript.assistant("done");
        assert!(transcript.ends_with_assistant());
        check(
            transcript,
            json!([
                {"role": "assistant", "content": "I look", "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "find", "arguments": {"x": 1}}},
                    {"id": "b", "type": "function", "function": {"name": "stop", "arguments": "{}"}},
                ]},
                {"role": "tool", "content": "stopped", "tool_call_id": "b", "name": "stop"},
                {"role": "tool", "content": "nobody asked", "tool_call_id": "c"},
                {"role": "assistant", "content": "done"},
            ]),
        );
    }

    #[test]
    fn text_after_a_call_begins_a_new_message() {
        let mut transcript = Transcript::default();
        transcript.tool_call("a", "find", json!({}));
        transcript.assistant("well");
        assert_eq!(transcript.into_messages().len(), 2);
    }
}
