//! `ConversationBuilder`: builds chat messages from the finer blocks and items of some APIs.
//!
//! Consecutive items of one role become one message: many templates require that roles alternate.

use std::collections::HashMap;

use serde_json::{Map, Value, json};
use text::{Content, Message};

#[derive(Debug, Default)]
pub struct ConversationBuilder {
    messages: Vec<MessageBuilder>,
    /// The names of the tools that were called, by the ids of the calls.
    called: HashMap<String, String>,
}

#[derive(Debug)]
struct MessageBuilder {
    role: &'static str,
    texts: Vec<String>,
    extra: Map<String, Value>,
}

impl ConversationBuilder {
    pub fn system(&mut self, text: impl Into<String>) {
        self.message("system").texts.push(text.into());
    }

    pub fn user(&mut self, text: impl Into<String>) {
        self.message("user").texts.push(text.into());
    }

    pub fn assistant(&mut self, text: impl Into<String>) {
        // Templates render the text of a message before its tool calls.
        let calls = |message: &MessageBuilder| message.role == "assistant" && message.extra.contains_key("tool_calls");
        if self.messages.last().is_some_and(calls) {
            self.begin("assistant");
        }
        self.message("assistant").texts.push(text.into());
    }

    pub fn reasoning(&mut self, text: &str) {
        let entry = self.message("assistant").extra.entry("reasoning_content").or_insert_with(|| json!(""));
        if let Value::String(reasoning) = entry {
            reasoning.push_str(text);
        }
    }

    /// `arguments` is an object, or its JSON as a string.
    pub fn tool_call(&mut self, id: &str, name: &str, arguments: Value) {
        self.called.insert(id.to_owned(), name.to_owned());
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let entry = self.message("assistant").extra.entry("tool_calls").or_insert_with(|| json!([]));
        if let Value::Array(calls) = entry {
            calls.push(call);
        }
    }

    pub fn tool_result(&mut self, id: &str, text: impl Into<String>) {
        let name = self.called.get(id).cloned();
        let message = self.begin("tool");
        message.texts.push(text.into());
        message.extra.insert("tool_call_id".to_owned(), json!(id));
        // Some templates name the tool beside its result; only the call has the name.
        if let Some(name) = name {
            message.extra.insert("name".to_owned(), json!(name));
        }
    }

    /// True when the last message is the assistant's, so that the output continues it.
    pub fn ends_with_assistant(&self) -> bool {
        self.messages.last().is_some_and(|message| message.role == "assistant")
    }

    pub fn into_messages(self) -> Vec<Message> {
        self.messages.into_iter().map(MessageBuilder::into_message).collect()
    }

    fn begin(&mut self, role: &'static str) -> &mut MessageBuilder {
        self.messages.push(MessageBuilder { role, texts: Vec::new(), extra: Map::new() });
        self.messages.last_mut().expect("one was pushed just now")
    }

    /// The last message if it has this role, else a new one.
    fn message(&mut self, role: &'static str) -> &mut MessageBuilder {
        if self.messages.last().is_none_or(|message| message.role != role) {
            return self.begin(role);
        }
        self.messages.last_mut().expect("the last one has this role")
    }
}

impl MessageBuilder {
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

    fn check(conversation: ConversationBuilder, expected: Value) {
        assert_eq!(serde_json::to_value(conversation.into_messages()).unwrap(), expected);
    }

    #[test]
    fn consecutive_items_of_one_role_are_one_message() {
        let mut conversation = ConversationBuilder::default();
        conversation.system("be kind");
        conversation.system("be brief");
        conversation.user("hello");
        conversation.reasoning("a greeting");
        conversation.assistant("hi");
        check(
            conversation,
            json!([
                {"role": "system", "content": [{"type": "text", "text": "be kind"}, {"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi", "reasoning_content": "a greeting"},
            ]),
        );
    }

    #[test]
    fn parallel_calls_share_a_message_and_each_result_has_its_own() {
        let mut conversation = ConversationBuilder::default();
        conversation.assistant("I look");
        conversation.tool_call("a", "find", json!({"x": 1}));
        conversation.tool_call("b", "stop", json!("{}"));
        conversation.tool_result("b", "stopped");
        conversation.tool_result("c", "nobody asked");
        conversation.assistant("done");
        assert!(conversation.ends_with_assistant());
        check(
            conversation,
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

    /// Fails by its time: a search per result takes minutes.
    #[test]
    fn many_results_are_named_in_linear_time() {
        let mut conversation = ConversationBuilder::default();
        (0..100_000).for_each(|_| conversation.tool_call("a", "find", json!({})));
        (0..100_000).for_each(|_| conversation.tool_result("b", "x"));
        assert_eq!(conversation.into_messages().len(), 100_001);
    }

    #[test]
    fn text_after_a_call_begins_a_new_message() {
        let mut conversation = ConversationBuilder::default();
        conversation.tool_call("a", "find", json!({}));
        conversation.assistant("well");
        assert_eq!(conversation.into_messages().len(), 2);
    }
}
