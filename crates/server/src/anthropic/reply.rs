//! What `/v1/messages` answers: a message, or the events from which a client builds the same message.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = MessagesReply)]
pub struct Message {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: MessageKind,
    pub role: ReplyRole,
    pub model: String,
    pub content: Vec<Block>,
    /// Null only while the answer is not finished.
    #[schema(required)]
    pub stop_reason: Option<StopReason>,
    #[schema(required)]
    pub stop_sequence: Option<String>,
    pub usage: Usage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesReplyKind)]
pub enum MessageKind {
    Message,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesReplyRole)]
pub enum ReplyRole {
    Assistant,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesReplyBlock)]
pub enum Block {
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
#[schema(as = MessagesStopReason)]
pub enum StopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
}

/// The whole prompt is the sum of the three input counts. Pages of the cache are written as a matter of course and
/// cost nothing, so nothing is ever counted as cache creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = MessagesUsage)]
pub struct Usage {
    pub input_tokens: usize,
    pub cache_creation_input_tokens: usize,
    pub cache_read_input_tokens: usize,
    pub output_tokens: usize,
}

/// What `/v1/messages/count_tokens` answers.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = MessagesTokenCount)]
pub struct TokenCount {
    pub input_tokens: usize,
}

/// One event of a streamed answer.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesEvent)]
pub enum Event {
    MessageStart { message: Message },
    Ping,
    ContentBlockStart { index: usize, content_block: Block },
    ContentBlockDelta { index: usize, delta: BlockDelta },
    ContentBlockStop { index: usize },
    MessageDelta { delta: MessageDelta, usage: Usage },
    MessageStop,
}

impl Event {
    /// The name in the `event:` line, which is the `type` in the data too.
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
#[schema(as = MessagesBlockDelta)]
#[allow(clippy::enum_variant_names)] // the names on the wire
pub enum BlockDelta {
    TextDelta { text: String },
    ThinkingDelta { thinking: String },
    SignatureDelta { signature: String },
    InputJsonDelta { partial_json: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = MessagesDelta)]
pub struct MessageDelta {
    pub stop_reason: StopReason,
    #[schema(required)]
    pub stop_sequence: Option<String>,
}
