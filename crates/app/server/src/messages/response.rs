//! The response of `/v1/messages`: a message, or the events from which a client builds the same message.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct MessagesReply {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: MessagesReplyKind,
    pub role: MessagesReplyRole,
    pub model: String,
    pub content: Vec<MessagesReplyBlock>,
    /// Null only while the output is not finished.
    #[schema(required)]
    pub stop_reason: Option<MessagesStopReason>,
    #[schema(required)]
    pub stop_sequence: Option<String>,
    pub usage: MessagesUsage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesReplyKind {
    Message,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesReplyRole {
    Assistant,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesReplyBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesStopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
}

/// The prompt tokens are the sum of the three input counts. Writing to the prefix cache is free, so
/// `cache_creation_input_tokens` is always 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct MessagesUsage {
    pub input_tokens: usize,
    pub cache_creation_input_tokens: usize,
    pub cache_read_input_tokens: usize,
    pub output_tokens: usize,
}

/// Response of `/v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct MessagesTokenCount {
    pub input_tokens: usize,
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesEvent {
    MessageStart { message: MessagesReply },
    Ping,
    ContentBlockStart { index: usize, content_block: MessagesReplyBlock },
    ContentBlockDelta { index: usize, delta: MessagesBlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessagesDelta, usage: MessagesUsage },
    MessageStop,
}

impl MessagesEvent {
    /// The name in the `event:` line, which is also the `type` in the data.
    pub fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::Ping => "ping",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::enum_variant_names)] // the names in the API
pub enum MessagesBlockDelta {
    TextDelta { text: String },
    ThinkingDelta { thinking: String },
    SignatureDelta { signature: String },
    InputJsonDelta { partial_json: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct MessagesDelta {
    pub stop_reason: MessagesStopReason,
    #[schema(required)]
    pub stop_sequence: Option<String>,
}
