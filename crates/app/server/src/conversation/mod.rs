//! `Conversation`: the one inner form of what was said, for all APIs, and how chat templates receive it.
//!
//! An API's adapter calls [`Conversation::begin`] for each of its messages and adds what the message contains; an API that
//! cuts messages into finer items begins one only where its items do. What the roles mean, which tool a result is of, and what
//! a message without content is, is decided here. [`Reasoning`] and [`Tools`] are the rest of what a template is told.

mod reasoning;
mod tool_calls;
mod tools;

use serde_json::{Map, Value, json};
use text::{Content, Message};

pub use reasoning::{Effort, Reasoning};
use tool_calls::ToolCalls;
pub use tools::{NAME_BYTES_MAX, ToolDefinition, Tools, no_name};

/// What the model is told of an image in a tool's result.
pub const UNSEEN_IMAGE: &str = "(an image, which this model cannot see)";

#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<ConversationMessage>,
    calls: ToolCalls,
    /// The next item begins a message, of the speaker with this name.
    next: Option<Option<String>>,
}

/// Who says something. A template may know fewer roles: `text` adapts messages to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Debug)]
struct ConversationMessage {
    role: Role,
    /// Of the speaker, or of the tool.
    name: Option<String>,
    texts: Vec<String>,
    reasoning: Option<String>,
    calls: Vec<Value>,
    /// The call that this is the result of.
    call_id: Option<String>,
}

impl Conversation {
    /// What follows is a message of its own, even if the same role spoke before. A message to which nothing is added is left
    /// out.
    pub fn begin(&mut self, speaker: Option<String>) {
        self.next = Some(speaker);
    }

    pub fn say(&mut self, role: Role, text: impl Into<String>) {
        if role == Role::Tool {
            return self.tool_result(None, None, text);
        }
        // Templates render the text of a message before its tool calls.
        if self.messages.last().is_some_and(|message| !message.calls.is_empty()) {
            self.next.get_or_insert_default();
        }
        self.message(role).texts.push(text.into());
    }

    /// What the assistant thought.
    pub fn reasoning(&mut self, text: &str) {
        self.message(Role::Assistant).reasoning.get_or_insert_default().push_str(text);
    }

    /// `arguments` is an object, or its JSON as a string, which may be incomplete if the call was cut off. A call without an id
    /// is given one.
    pub fn tool_call(&mut self, id: Option<String>, name: String, arguments: Value) {
        let id = self.calls.add(id, name.clone());
        let call = json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        self.message(Role::Assistant).calls.push(call);
    }

    /// The result of the call with this id, or else of the oldest call of this tool that has none. Its template may want the id,
    /// or the name of the tool, or both.
    pub fn tool_result(&mut self, call_id: Option<String>, tool: Option<String>, text: impl Into<String>) {
        let (call_id, name) = self.calls.answer(call_id, tool);
        self.next = Some(name);
        let message = self.message(Role::Tool);
        message.texts.push(text.into());
        message.call_id = call_id;
    }

    /// True if the output may continue the last message: it is the assistant's, and no tool has to answer first.
    pub fn is_open(&self) -> bool {
        self.messages.last().is_some_and(|message| message.role == Role::Assistant && message.calls.is_empty())
    }

    pub fn into_messages(self) -> Vec<Message> {
        self.messages.into_iter().map(ConversationMessage::into_message).collect()
    }

    /// The last message if it goes on and has this role, else a new one.
    fn message(&mut self, role: Role) -> &mut ConversationMessage {
        let next = self.next.take();
        if next.is_some() || self.messages.last().is_none_or(|message| message.role != role) {
            let name = next.flatten();
            let (texts, calls) = (Vec::new(), Vec::new());
            self.messages.push(ConversationMessage { role, name, texts, reasoning: None, calls, call_id: None });
        }
        self.messages.last_mut().expect("there is one with this role, or one was pushed just now")
    }
}

impl ConversationMessage {
    fn into_message(self) -> Message {
        let mut texts = self.texts;
        let content = match texts.len() {
            0 => Content::Text(String::new()),
            1 => Content::Text(texts.remove(0)),
            _ => Content::Parts(texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect()),
        };
        let mut extra = Map::new();
        let texts =
            [("name", self.name), ("tool_call_id", self.call_id), ("reasoning_content", self.reasoning)].into_iter();
        extra.extend(texts.filter_map(|(key, text)| Some((key.to_owned(), Value::from(text?)))));
        if !self.calls.is_empty() {
            extra.insert("tool_calls".to_owned(), self.calls.into());
        }
        Message { role: self.role.name().to_owned(), content, extra }
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(conversation: Conversation, expected: Value) {
        assert_eq!(serde_json::to_value(conversation.into_messages()).unwrap(), expected);
    }

    #[test]
    fn consecutive_items_of_one_role_are_one_message() {
        let mut conversation = Conversation::default();
        conversation.say(Role::System, "be kind");
        conversation.say(Role::System, "be brief");
        conversation.say(Role::User, "hello");
        conversation.reasoning("a greeting");
        conversation.say(Role::Assistant, "hi");
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
    fn a_message_that_begins_is_one_of_its_own_if_it_contains_anything() {
        let mut conversation = Conversation::default();
        conversation.begin(None);
        conversation.say(Role::User, "hello");
        conversation.begin(Some("Ann".to_owned()));
        conversation.say(Role::User, "hello");
        conversation.say(Role::User, "again");
        conversation.begin(Some("nobody".to_owned()));
        conversation.begin(None);
        conversation.say(Role::Assistant, "hi");
        check(
            conversation,
            json!([
                {"role": "user", "content": "hello"},
                {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "again"}]},
                {"role": "assistant", "content": "hi"},
            ]),
        );
    }

    #[test]
    fn parallel_calls_share_a_message_and_each_result_has_its_own() {
        let mut conversation = Conversation::default();
        let id = |id: &str| Some(id.to_owned());
        conversation.say(Role::Assistant, "I look");
        conversation.tool_call(id("a"), "find".to_owned(), json!({"x": 1}));
        conversation.tool_call(id("b"), "stop".to_owned(), json!("{}"));
        assert!(!conversation.is_open());
        conversation.tool_result(id("b"), None, "stopped");
        conversation.tool_result(id("c"), None, "nobody asked");
        conversation.say(Role::Assistant, "done");
        assert!(conversation.is_open());
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

    #[test]
    fn text_after_a_call_begins_a_new_message() {
        let mut conversation = Conversation::default();
        conversation.tool_call(None, "find".to_owned(), json!({}));
        conversation.say(Role::Assistant, "well");
        assert_eq!(conversation.into_messages().len(), 2);
    }
}
