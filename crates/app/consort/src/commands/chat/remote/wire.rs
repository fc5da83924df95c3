//! The parts of OpenAI's chat API that a chat needs.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use text::Message;

/// The longest text of a server in a sentence for the user.
const MESSAGE_CHARS_MAX: usize = 300;

#[derive(Serialize)]
pub struct WireRequest<'a> {
    pub model: &'a str,
    pub messages: Vec<Message>,
    pub stream: bool,
    pub stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    // Not OpenAI's: sent only if the user has set them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template_kwargs: Option<TemplateVariables>,
}

#[derive(Serialize)]
pub struct StreamOptions {
    pub include_usage: bool,
}

#[derive(Serialize)]
pub struct TemplateVariables {
    pub enable_thinking: bool,
}

#[derive(Deserialize)]
pub struct ModelList {
    pub data: Vec<ListedModel>,
}

#[derive(Deserialize)]
pub struct ListedModel {
    pub id: String,
}

/// The data of an event.
#[derive(Deserialize)]
pub struct Chunk {
    #[serde(default)]
    pub choices: Vec<ChunkChoice>,
    pub usage: Option<ChunkUsage>,
    pub error: Option<Value>,
}

#[derive(Deserialize)]
pub struct ChunkChoice {
    pub delta: Option<ChunkDelta>,
    pub finish_reason: Option<String>,
}

#[derive(Deserialize)]
pub struct ChunkDelta {
    pub content: Option<String>,
    pub reasoning_content: Option<String>,
    /// Another name for the same.
    pub reasoning: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ChunkUsage {
    #[serde(default)]
    pub prompt_tokens: usize,
    #[serde(default)]
    pub completion_tokens: usize,
    pub prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct PromptDetails {
    pub cached_tokens: Option<usize>,
}

/// What a server says in the body of an error: `{"error": {"message": …}}`, or what other servers make of it.
pub fn error_message(body: &[u8]) -> Option<String> {
    let json: Value = serde_json::from_slice(body).ok()?;
    let error = json.get("error").or_else(|| json.get("detail")).unwrap_or(&json);
    message_of(error)
}

/// The message of an error object.
pub fn message_of(error: &Value) -> Option<String> {
    let text = error.as_str().or_else(|| error.get("message")?.as_str())?;
    (!text.trim().is_empty()).then(|| shortened(text))
}

/// A text of a server in one line.
pub fn shortened(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MESSAGE_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_of_an_error_is_found() {
        let check =
            |body: &str, expected: Option<&str>| assert_eq!(error_message(body.as_bytes()).as_deref(), expected);
        check(r#"{"error": {"message": "no  such\nmodel", "code": 1}}"#, Some("no such model"));
        check(r#"{"error": "busy"}"#, Some("busy"));
        check(r#"{"detail": "Not Found"}"#, Some("Not Found"));
        check(r#"{"message": "x"}"#, Some("x"));
        for body in ["", "<html>", "[]", "{}", r#"{"error": {"message": ""}}"#] {
            check(body, None);
        }
        assert_eq!(shortened(&"é".repeat(1000)).chars().count(), MESSAGE_CHARS_MAX + 1);
    }
}
