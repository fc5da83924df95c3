//! The replies of `/api/chat` and `/api/generate`: the lines of a stream, or one body.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::openai::TokenLogprob;

/// A line of a stream, or the whole reply
#[derive(Serialize)]
#[serde(untagged)]
pub enum OllamaReply {
    Chat(OllamaChatReply),
    Generate(OllamaGenerateReply),
}

/// A line of a stream, or the whole reply
#[derive(Serialize, ToSchema)]
pub struct OllamaChatReply {
    /// The model's name as in the request
    pub model: String,
    /// RFC 3339
    pub created_at: String,
    pub message: OllamaReplyMessage,
    /// True in the last line of a stream
    pub done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done_reason: Option<OllamaDoneReason>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub logprobs: Vec<TokenLogprob>,
    #[serde(flatten)]
    pub metrics: OllamaMetrics,
}

/// A line of a stream, or the whole reply
#[derive(Serialize, ToSchema)]
pub struct OllamaGenerateReply {
    /// The model's name as in the request
    pub model: String,
    /// RFC 3339
    pub created_at: String,
    pub response: String,
    /// Reasoning before the answer
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    pub thinking: String,
    /// True in the last line of a stream
    pub done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub done_reason: Option<OllamaDoneReason>,
    /// The tokens of the prompt and the answer, for a request that continues them
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub logprobs: Vec<TokenLogprob>,
    #[serde(flatten)]
    pub metrics: OllamaMetrics,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaReplyMessage {
    /// Always `assistant`
    #[schema(value_type = String)]
    pub role: &'static str,
    pub content: String,
    /// Reasoning before the answer
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    pub thinking: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub tool_calls: Vec<OllamaToolCall>,
}

/// A whole tool call; calls are not streamed in pieces
#[derive(Serialize, ToSchema)]
pub struct OllamaToolCall {
    pub id: String,
    pub function: OllamaCalledFunction,
}

#[derive(Serialize, ToSchema)]
pub struct OllamaCalledFunction {
    pub index: usize,
    pub name: String,
    #[schema(value_type = Object)]
    pub arguments: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OllamaDoneReason {
    Stop,
    Length,
    /// There was no prompt: the model is loaded
    Load,
    /// There was no prompt, and `keep_alive` was 0: the model stays loaded
    Unload,
}

/// Counts of tokens, and times in nanoseconds, in the last line of an answer
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct OllamaMetrics {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_duration: Option<u64>,
    /// Time to prepare the prompt; the model is loaded already
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_duration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_eval_count: Option<usize>,
    /// Time in the queue and to compute the prompt
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_eval_duration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_count: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_duration: Option<u64>,
}
