//! Messages of a conversation, as chat templates receive them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// One message. Keys that are not interpreted here (`name`, `tool_calls`, `tool_call_id`, `reasoning_content`) are in
/// `extra` and are passed to the template unchanged.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    #[serde(default)]
    pub content: Content,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Text, or parts in OpenAI's format: `{"type": "text", "text": …}`, images and so on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<Value>),
}

impl Message {
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self { role: role.into(), content: Content::Text(text.into()), extra: Map::new() }
    }

    /// The text of the content; for parts, their text parts.
    pub fn text(&self) -> String {
        match &self.content {
            Content::None => String::new(),
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => {
                let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
                texts.join("\n")
            }
        }
    }

    /// Prepends a paragraph to the content.
    pub(crate) fn prepend(&mut self, paragraph: &str) {
        match &mut self.content {
            Content::Parts(parts) => parts.insert(0, json!({"type": "text", "text": format!("{paragraph}\n\n")})),
            _ => self.content = Content::Text(format!("{paragraph}\n\n{}", self.text())),
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), json!(self.role));
        message.insert("content".to_owned(), json!(self.content));
        message.extend(self.extra.clone());
        Value::Object(message)
    }

    /// Joins text parts with newlines. Content with a part of another kind is left unchanged.
    pub(crate) fn with_text_content(&self) -> Self {
        let Content::Parts(parts) = &self.content else { return self.clone() };
        let texts: Option<Vec<&str>> = parts.iter().map(|part| part.get("text")?.as_str()).collect();
        let content = texts.map_or_else(|| self.content.clone(), |texts| Content::Text(texts.join("\n")));
        Self { content, ..self.clone() }
    }

    /// Converts text to a single part.
    pub(crate) fn with_parts_content(&self) -> Self {
        let Content::Text(text) = &self.content else { return self.clone() };
        Self { content: Content::Parts(vec![json!({"type": "text", "text": text})]), ..self.clone() }
    }
}

/// OpenAI's clients send the arguments of a tool call as JSON in a string; templates expect the object itself.
pub(crate) fn with_parsed_arguments(mut message: Value) -> Value {
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok());
        if let Some(parsed) = parsed {
            *arguments = Value::Object(parsed);
        }
    }
    message
}
