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
            Content::Parts(parts) => parts.insert(0, text_part(&format!("{paragraph}\n\n"))),
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

    /// Appends a message of the same role as a further paragraph. Of two extra values with one key, the first is kept.
    pub(crate) fn append(&mut self, message: Self) {
        for (key, value) in message.extra {
            self.extra.entry(key).or_insert(value);
        }
        self.content = match (std::mem::take(&mut self.content).joined(), message.content.joined()) {
            (content, Content::None) | (Content::None, content) => content,
            (Content::Text(mut text), Content::Text(more)) => {
                text.push_str("\n\n");
                text.push_str(&more);
                Content::Text(text)
            }
            (first, second) => {
                let mut parts = first.into_parts();
                parts.push(text_part("\n\n"));
                parts.extend(second.into_parts());
                Content::Parts(parts)
            }
        };
    }

    /// Joins text parts with newlines. Content with a part of another kind is left unchanged.
    pub(crate) fn with_text_content(&self) -> Self {
        let message = self.clone();
        Self { content: message.content.joined(), ..message }
    }

    /// Converts text to a single part.
    pub(crate) fn with_parts_content(&self) -> Self {
        let Content::Text(text) = &self.content else { return self.clone() };
        Self { content: Content::Parts(vec![text_part(text)]), ..self.clone() }
    }
}

impl Content {
    /// Text parts joined with newlines. Content with a part of another kind is left unchanged.
    fn joined(self) -> Self {
        let Self::Parts(parts) = &self else { return self };
        let texts: Option<Vec<&str>> = parts.iter().map(|part| part.get("text")?.as_str()).collect();
        texts.map(|texts| Self::Text(texts.join("\n"))).unwrap_or(self)
    }

    fn into_parts(self) -> Vec<Value> {
        match self {
            Self::None => Vec::new(),
            Self::Text(text) => vec![text_part(&text)],
            Self::Parts(parts) => parts,
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
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

/// How deep arguments may be nested: as deep as `serde_json` reads. What is open is copied at every comma and bracket.
const ARGUMENTS_DEPTH_MAX: usize = 128;

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
            b'{' | b'[' if open.len() == ARGUMENTS_DEPTH_MAX => return None,
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

    /// In time that grows with the square of the depth, this would take an hour.
    #[test]
    fn arguments_that_are_nested_without_bound_are_left_out() {
        let deep = format!("{{\"a\":{}", "[".repeat(8_000_000));
        assert_eq!(arguments_in(&deep), Map::new());
    }

    #[test]
    fn an_appended_message_keeps_its_parts_and_its_extra_values() {
        let image = json!({"type": "image_url", "image_url": {"url": "data:"}});
        let extra = |name: &str| Map::from_iter([("name".to_owned(), json!(name)), (name.to_owned(), json!(1))]);
        let mut message = Message { extra: extra("a"), ..Message::new("user", "see") };
        message.append(Message {
            content: Content::Parts(vec![text_part("b"), text_part("c")]),
            extra: extra("b"),
            ..message.clone()
        });
        assert_eq!(message.content, Content::Text("see\n\nb\nc".to_owned()));
        assert_eq!(Value::Object(message.extra.clone()), json!({"name": "a", "a": 1, "b": 1}));
        message.append(Message { content: Content::Parts(vec![image.clone()]), ..Message::default() });
        message.append(Message { content: Content::None, ..Message::default() });
        let parts = vec![text_part("see\n\nb\nc"), text_part("\n\n"), image];
        assert_eq!(message.content, Content::Parts(parts));
    }
}
