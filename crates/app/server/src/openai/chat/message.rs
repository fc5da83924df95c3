//! The messages in OpenAI's format.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::conversation::{Conversation, Role};
use crate::error::ApiError;

#[derive(Debug, Deserialize, ToSchema)]
pub struct ChatMessage {
    pub role: ChatRole,
    pub content: Option<MessageContent>,
    /// Name of the speaker, if several have the same role, or of the tool whose result this is
    pub name: Option<String>,
    /// Tool calls that the assistant made
    pub tool_calls: Option<Vec<AssistantToolCall>>,
    /// The tool call that this message is the result of; by default the oldest one without a result
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

/// The messages as the inner form of a conversation.
pub fn conversation(messages: Vec<ChatMessage>) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    for (index, message) in messages.into_iter().enumerate() {
        message.add_to(&mut conversation, &format!("messages[{index}]"))?;
    }
    Ok(conversation)
}

impl ChatMessage {
    fn add_to(self, conversation: &mut Conversation, at: &str) -> Result<(), ApiError> {
        let calls = self.tool_calls.unwrap_or_default();
        let is_empty = self.content.is_none();
        if is_empty && (self.role != ChatRole::Assistant || (calls.is_empty() && self.reasoning_content.is_none())) {
            return Err(ApiError::invalid(format!("{at}.content"), "the message is empty").code("missing_content"));
        }
        if !calls.is_empty() && self.role != ChatRole::Assistant {
            return Err(ApiError::invalid(format!("{at}.tool_calls"), "only the assistant calls tools"));
        }
        let texts = self.content.map_or_else(|| Ok(Vec::new()), |content| content.into_texts(at))?;
        if self.role == ChatRole::Tool {
            conversation.tool_result(self.tool_call_id, self.name, texts.join("\n"));
            return Ok(());
        }
        conversation.begin(self.name);
        if self.role == ChatRole::Assistant {
            self.reasoning_content.iter().for_each(|text| conversation.reasoning(text));
        }
        texts.into_iter().for_each(|text| conversation.say(self.role.into(), text));
        for AssistantToolCall { id, function } in calls {
            conversation.tool_call(id, function.name, function.arguments.unwrap_or_default().into());
        }
        Ok(())
    }
}

impl From<ChatRole> for Role {
    fn from(role: ChatRole) -> Self {
        match role {
            ChatRole::System => Self::System,
            ChatRole::Developer => Self::Developer,
            ChatRole::User => Self::User,
            ChatRole::Assistant => Self::Assistant,
            ChatRole::Tool => Self::Tool,
        }
    }
}

impl MessageContent {
    /// `at` is the message.
    fn into_texts(self, at: &str) -> Result<Vec<String>, ApiError> {
        match self {
            Self::Text(text) => Ok(vec![text]),
            Self::Parts(parts) => {
                let text = |(index, part): (usize, ContentPart)| part.into_text(&format!("{at}.content[{index}]"));
                parts.into_iter().enumerate().map(text).collect()
            }
        }
    }
}

impl ContentPart {
    fn into_text(self, at: &str) -> Result<String, ApiError> {
        let text = match self.r#type.as_str() {
            "text" => self.text,
            "refusal" => self.refusal,
            other => {
                let message = format!("parts of type `{other}` are not supported by this model");
                return Err(ApiError::unsupported(format!("{at}.type"), message).code("unsupported_content"));
            }
        };
        text.ok_or_else(|| ApiError::invalid(format!("{at}.text"), "the part has no text"))
    }
}
