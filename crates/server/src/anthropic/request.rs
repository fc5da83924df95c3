//! The request of `/v1/messages` as it is on the wire: what may be said, with the types that it must have.
//!
//! Fields that we do not know are ignored, as the rules of the API are that there will be more of them. Kinds of
//! content, tools and settings that we know of but cannot honour are missing here on purpose: they are refused by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::parts::TextOr;

/// What `/v1/messages` takes.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = MessagesRequest)]
pub struct Request {
    pub model: String,
    #[schema(min_items = 1)]
    pub messages: Vec<InputMessage>,
    /// Tokens of the answer at most. 0 reads the prompt into the cache and answers nothing.
    #[schema(maximum = 4_294_967_295_u32)]
    pub max_tokens: u32,
    pub system: Option<TextOr<TextBlock>>,
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub thinking: Option<Thinking>,
    pub output_config: Option<OutputConfig>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1000)]
    pub temperature: Option<f32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    #[schema(maximum = 4_294_967_295_u32)]
    pub top_k: Option<u32>,
    pub stop_sequences: Option<Vec<String>>,
}

/// What `/v1/messages/count_tokens` takes: all that makes the prompt.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = MessagesCountRequest)]
pub struct CountRequest {
    pub model: String,
    #[schema(min_items = 1)]
    pub messages: Vec<InputMessage>,
    pub system: Option<TextOr<TextBlock>>,
    pub tools: Option<Vec<Tool>>,
    pub tool_choice: Option<ToolChoice>,
    pub thinking: Option<Thinking>,
    pub output_config: Option<OutputConfig>,
}

impl From<CountRequest> for Request {
    /// The request whose prompt is to be counted.
    fn from(count: CountRequest) -> Self {
        let CountRequest { model, messages, system, tools, tool_choice, thinking, output_config } = count;
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
    pub role: Role,
    pub content: TextOr<InputBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesRole)]
pub enum Role {
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
    /// The signature is not checked: we sign nothing.
    Thinking {
        thinking: String,
    },
    /// Sealed by the service that thought it; there is nothing in it for us.
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
        content: Option<TextOr<TextBlock>>,
    },
}

/// The only kind of block where nothing but text may stand.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesTextBlock)]
pub enum TextBlock {
    Text { text: String },
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = MessagesTool)]
pub struct Tool {
    #[serde(rename = "type")]
    pub kind: Option<ToolKind>,
    pub name: String,
    pub description: Option<String>,
    #[schema(value_type = Object)]
    pub input_schema: Map<String, Value>,
}

/// Tools that a client runs itself; those that Anthropic runs are refused.
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesToolKind)]
pub enum ToolKind {
    Custom,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesToolChoice)]
pub enum ToolChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesThinking)]
pub enum Thinking {
    /// Its budget is not read: `max_tokens` is what bounds an answer.
    Enabled {
        display: Option<Display>,
    },
    Adaptive {
        display: Option<Display>,
    },
    BetweenTools {},
    Disabled {},
}

/// Whether thoughts are shown. Ours are never shortened: "summarized" shows them whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesThinkingDisplay)]
pub enum Display {
    Summarized,
    Omitted,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = MessagesOutputConfig)]
pub struct OutputConfig {
    pub effort: Option<Effort>,
    pub format: Option<OutputFormat>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = MessagesEffort)]
pub enum Effort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = MessagesOutputFormat)]
pub enum OutputFormat {
    JsonSchema {
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
    },
}
