//! The request format of `/v1/messages`.
//!
//! Unknown fields are ignored, because the API adds fields without notice. Content that only Anthropic's services make and
//! read is ignored too; other content that is not supported, such as an image from the user, is not declared here, so it is
//! refused by name.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::conversation::Effort;
use crate::text_or_parts::TextOrParts;

/// Request of `/v1/messages`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    pub model: String,
    #[schema(min_items = 1, max_items = 8192)]
    pub messages: Vec<InputMessage>,
    /// Maximum tokens of the output. 0 only computes the prompt into the prefix cache.
    #[schema(maximum = 4_294_967_295_u32)]
    pub max_tokens: u32,
    pub system: Option<TextOrParts<MessagesTextBlock>>,
    /// At most 512 that are offered; the others have `defer_loading`
    #[schema(max_items = 10000)]
    pub tools: Option<Vec<MessagesTool>>,
    pub tool_choice: Option<MessagesToolChoice>,
    pub thinking: Option<MessagesThinking>,
    pub output_config: Option<MessagesOutputConfig>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1)]
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
    #[schema(min_items = 1, max_items = 8192)]
    pub messages: Vec<InputMessage>,
    pub system: Option<TextOrParts<MessagesTextBlock>>,
    /// At most 512 that are offered; the others have `defer_loading`
    #[schema(max_items = 10000)]
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
        content: Option<TextOrParts<MessagesResultBlock>>,
    },
    SearchResult {
        title: String,
        content: Vec<MessagesTextBlock>,
    },
    /// A summary of earlier messages.
    Compaction {
        content: Option<String>,
    },
    /// From here on, a tool with `defer_loading` is offered.
    ToolAddition {
        tool: MessagesToolReference,
    },
    /// Ignored: the tool stays.
    ToolRemoval {},
    /// Calls and results of tools that another service ran. They are ignored, as are the next ones.
    ServerToolUse {},
    WebSearchToolResult {},
    WebFetchToolResult {},
    AdvisorToolResult {},
    CodeExecutionToolResult {},
    BashCodeExecutionToolResult {},
    TextEditorCodeExecutionToolResult {},
    ToolSearchToolResult {},
    McpToolUse {},
    McpToolResult {},
    McpToolListing {},
    Fallback {},
}

impl InputBlock {
    /// The `type` of a block that belongs to one role.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Thinking { .. } => "thinking",
            Self::ToolUse { .. } => "tool_use",
            Self::ToolResult { .. } => "tool_result",
            _ => "text",
        }
    }
}

/// A text block, for fields that allow nothing else.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesTextBlock {
    Text { text: String },
}

/// What a tool returned.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesResultBlock {
    Text {
        text: String,
    },
    SearchResult {
        title: String,
        content: Vec<MessagesTextBlock>,
    },
    /// A tool that was found. If it has `defer_loading`, it is offered from here on.
    ToolReference {
        tool_name: String,
    },
    /// The model is told that there is one, but not what it shows.
    Image {},
    /// The same.
    Document {},
    /// Ignored.
    BrowserState {},
}

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct MessagesToolReference {
    pub name: Option<String>,
}

/// A tool that the client runs (`custom`, or without a type), or one that Anthropic's services define. The latter are left
/// out.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesTool {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub name: Option<String>,
    pub description: Option<String>,
    /// Required for a tool that the client runs
    #[schema(value_type = Option<Object>)]
    pub input_schema: Option<Map<String, Value>>,
    /// Offer the tool only after a search has found it
    pub defer_loading: Option<bool>,
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

/// Whether thinking is returned. It is never summarised: all but "omitted" return it in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MessagesThinkingDisplay {
    Summarized,
    Omitted,
    Updates,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct MessagesOutputConfig {
    pub effort: Option<Effort>,
    pub format: Option<MessagesOutputFormat>,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum MessagesOutputFormat {
    JsonSchema {
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
    },
}

impl MessagesRole {
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::System => "system",
        }
    }
}
