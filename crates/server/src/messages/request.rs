//! The request format of `/v1/messages`.
//!
//! Unknown fields are ignored, because the API adds fields without notice. Types of content, tools and settings that are not
//! supported are not declared here, so they are refused by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::text_or_parts::TextOrParts;

/// Request of `/v1/messages`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    pub model: String,
    #[schema(min_items = 1)]
    pub messages: Vec<InputMessage>,
    /// Maximum tokens of the output. 0 only computes the prompt into the prefix cache.
    #[schema(maximum = 4_294_967_295_u32)]
    pub max_tokens: u32,
    pub system: Option<TextOrParts<MessagesTextBlock>>,
    pub tools: Option<Vec<MessagesTool>>,
    pub tool_choice: Option<MessagesToolChoice>,
    pub thinking: Option<MessagesThinking>,
    pub output_config: Option<MessagesOutputConfig>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1000)]
    pub temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    #[schema(maximum = 4_294_967_295_u32)]
    pub top_k: Option<u32>,
    pub stop_sequences: Option<Vec<String>>,
}

/// Request of `/v1/messages/count_tokens`: the fields that affect the prompt.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesCountRequest {
    pub model: String,
    #[schema(min_items = 1)]
    pub messages: Vec<InputMessage>,
    pub system: Option<TextOrParts<MessagesTextBlock>>,
    pub tools: Option<Vec<MessagesTool>>,
    pub tool_choice: Option<MessagesToolChoice>,
    pub thinking: Option<MessagesThinking>,
    pub output_config: Option<MessagesOutputConfig>,
}

impl From<MessagesCountRequest> for MessagesRequest {
    /// The request whose prompt is counted.
    fn from(count: MessagesCountRequest) -> Self {
        let MessagesCountRequest { model, messages, system, tools, tool_choice, thinking, output_config } = count;
        Self {
            model,
            messages,
            max_tokens: 0,
            system,
            tools,
            tool_choice,
            thinking,
            output_config,
            stream: None,
            temperature: None,
            top_p: None,
            top_k: None,
            stop_sequences: None,
        }
    }
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct InputMessage {
    pub role: MessagesRole,
    pub content: TextOrParts<InputBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesRole {
    User,
    Assistant,
    System,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputBlock {
    Text {
        text: String,
    },
    /// The signature is not checked, because the server does not sign.
    Thinking {
        thinking: String,
    },
    /// Encrypted reasoning of another service. It is ignored.
    RedactedThinking {
        data: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
    ToolResult {
        tool_use_id: String,
        content: Option<TextOrParts<MessagesTextBlock>>,
    },
}

/// A text block, for fields that allow nothing else.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesTextBlock {
    Text { text: String },
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesTool {
    #[serde(rename = "type")]
    pub kind: Option<MessagesToolKind>,
    pub name: String,
    pub description: Option<String>,
    #[schema(value_type = Object)]
    pub input_schema: Map<String, Value>,
}

/// Tools that the client runs. Server tools of Anthropic are refused.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesToolKind {
    Custom,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesToolChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesThinking {
    /// The budget is ignored: `max_tokens` limits the output.
    Enabled {
        display: Option<MessagesThinkingDisplay>,
    },
    Adaptive {
        display: Option<MessagesThinkingDisplay>,
    },
    BetweenTools {},
    Disabled {},
}

/// Whether thinking is returned. It is never summarised: "summarized" returns it in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesThinkingDisplay {
    Summarized,
    Omitted,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesOutputConfig {
    pub effort: Option<MessagesEffort>,
    pub format: Option<MessagesOutputFormat>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesEffort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesOutputFormat {
    JsonSchema {
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
    },
}
