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

/// OpenAI's clients send the arguments of a tool call as JSON in a string; templates expect the object itself. A call that was
/// cut off comes back with incomplete JSON: its object has what is complete.
pub(crate) fn with_parsed_arguments(mut message: Value) -> Value {
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        if let Some(text) = arguments.as_str() {
            *arguments = Value::Object(arguments_in(text));
        }
    }
    message
}

/// The object that a text contains, or begins.
fn arguments_in(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).ok().or_else(|| completed(text)).unwrap_or_default()
}

/// Completes JSON that was cut off: closes what is open, and leaves out a value that cannot be completed.
fn completed(text: &str) -> Option<Map<String, Value>> {
    let mut open = Vec::new();
    let (mut in_string, mut escape_start) = (false, None);
    // The end of the last complete value, and what is open there.
    let (mut whole, mut open_there) = (0, Vec::new());
    for (at, byte) in text.bytes().enumerate() {
        if in_string {
            match byte {
                _ if escape_start == Some(at.wrapping_sub(1)) => escape_start = None,
                b'\\' => escape_start = Some(at),
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' => open.push(b'}'),
            b'[' => open.push(b']'),
            b'}' | b']' => {
                open.pop().filter(|&close| close == byte)?;
            }
            _ => {}
        }
        if matches!(byte, b'{' | b'[' | b'}' | b']' | b',') {
            whole = if byte == b',' { at } else { at + 1 };
            open_there.clone_from(&open);
        }
    }
    let closed = |text: &str, quote: &str, open: &[u8]| {
        let closing: String = open.iter().rev().map(|&byte| char::from(byte)).collect();
        serde_json::from_str(&format!("{text}{quote}{closing}")).ok()
    };
    let text_end = if in_string { escape_start.unwrap_or(text.len()) } else { text.len() };
    let quote = if in_string { "\"" } else { "" };
    closed(&text[..text_end], quote, &open).or_else(|| closed(&text[..whole], "", &open_there))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_were_cut_off_have_what_is_complete() {
        let check = |text: &str, want: Value| assert_eq!(Value::Object(arguments_in(text)), want, "{text}");
        check(r#"{"a": 1}"#, json!({"a": 1}));
        check(r#"{"a": "Par"#, json!({"a": "Par"}));
        check(r#"{"a": "x\\"#, json!({"a": "x\\"}));
        check(r#"{"a": "x\"#, json!({"a": "x"}));
        check(r#"{"a": "x\""#, json!({"a": "x\""}));
        check(r#"{"a": [1, {"b": "c"#, json!({"a": [1, {"b": "c"}]}));
        check(r#"{"a": 1, "b": tr"#, json!({"a": 1}));
        check(r#"{"a": {"b": 1}, "c"#, json!({"a": {"b": 1}}));
        check(r#"{"a": [1, 2], "c":"#, json!({"a": [1, 2]}));
        check(r#"{"a"#, json!({}));
        check("{", json!({}));
        for text in ["", "x", "[1]", "{]", "}", "\"", "nonsense {"] {
            check(text, json!({}));
        }
    }
}
