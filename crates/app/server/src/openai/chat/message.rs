//! The messages in OpenAI's format.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use text::{Content, Message};
use utoipa::ToSchema;

use crate::error::ApiError;

/// The maximum messages of one request.
pub const MESSAGES_MAX: usize = 8192;

#[derive(Debug, Deserialize, ToSchema)]
pub struct ChatMessage {
    pub role: ChatRole,
    pub content: Option<MessageContent>,
    /// Name of the speaker, if several have the same role
    pub name: Option<String>,
    /// Tool calls that the assistant made
    pub tool_calls: Option<Vec<AssistantToolCall>>,
    /// The tool call that this message is the result of
    pub tool_call_id: Option<String>,
    /// Reasoning of the assistant
    pub reasoning_content: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = Role)]
pub enum ChatRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text or a list of parts")]
pub enum MessageContent {
    Text(String),
    Parts(Vec<ContentPart>),
}

/// Content part: only text is supported
#[derive(Debug, Deserialize, ToSchema)]
pub struct ContentPart {
    pub r#type: String,
    pub text: Option<String>,
    /// Refusal of the assistant, instead of text
    pub refusal: Option<String>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct AssistantToolCall {
    pub id: Option<String>,
    pub function: FunctionCalled,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct FunctionCalled {
    pub name: String,
    /// JSON as a string
    pub arguments: Option<String>,
}

/// Checks the messages and converts them to the internal format.
pub fn messages(messages: Vec<ChatMessage>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() || messages.len() > MESSAGES_MAX {
        return Err(ApiError::invalid("messages", format!("there must be 1 to {MESSAGES_MAX} messages")));
    }
    messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| message.into_message(&format!("messages[{index}]")))
        .collect()
}

impl ChatMessage {
    fn into_message(self, at: &str) -> Result<Message, ApiError> {
        let calls = self.tool_calls.unwrap_or_default();
        let is_empty = self.content.is_none();
        if is_empty && (self.role != ChatRole::Assistant || (calls.is_empty() && self.reasoning_content.is_none())) {
            return Err(ApiError::invalid(format!("{at}.content"), "the message is empty").code("missing_content"));
        }
        if !calls.is_empty() && self.role != ChatRole::Assistant {
            return Err(ApiError::invalid(format!("{at}.tool_calls"), "only the assistant calls tools"));
        }
        let content = match self.content {
            None => Content::None,
            Some(MessageContent::Text(text)) => Content::Text(text),
            Some(MessageContent::Parts(parts)) => {
                let part = |(index, part): (usize, ContentPart)| part.into_json(&format!("{at}.content[{index}]"));
                Content::Parts(parts.into_iter().enumerate().map(part).collect::<Result<_, _>>()?)
            }
        };
        let mut extra = Map::new();
        let texts =
            [("name", self.name), ("tool_call_id", self.tool_call_id), ("reasoning_content", self.reasoning_content)];
        for (key, text) in texts {
            if let Some(text) = text {
                extra.insert(key.to_owned(), text.into());
            }
        }
        if !calls.is_empty() {
            let calls: Vec<_> = calls.into_iter().map(AssistantToolCall::into_json).collect();
            extra.insert("tool_calls".to_owned(), calls.into());
        }
        Ok(Message { role: self.role.name().to_owned(), content, extra })
    }
}

impl ChatRole {
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

impl ContentPart {
    fn into_json(self, at: &str) -> Result<Value, ApiError> {
        let text = match self.r#type.as_str() {
            "text" => self.text,
            "refusal" => self.refusal,
            other => {
                let message = format!("parts of type `{other}` are not supported by this model");
                return Err(ApiError::unsupported(format!("{at}.type"), message).code("unsupported_content"));
            }
        };
        let text = text.ok_or_else(|| ApiError::invalid(format!("{at}.text"), "the part has no text"))?;
        Ok(json!({"type": "text", "text": text}))
    }
}

impl AssistantToolCall {
    /// The arguments may be incomplete JSON, if the call was cut off.
    fn into_json(self) -> Value {
        let arguments = self.function.arguments.filter(|json| !json.trim().is_empty());
        let arguments = arguments.unwrap_or_else(|| "{}".to_owned());
        let function = json!({"name": self.function.name, "arguments": arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }
}
