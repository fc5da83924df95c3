//! The response of `/v1/responses`: one object, or the events from which a client builds the same object.

use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use text::Tokenizer;
use utoipa::ToSchema;

use super::request::{ResponsesReasoning, ResponsesShellAction, ResponsesTextConfig, ResponsesTruncation};
use super::tool_types::{ResponsesTool, ResponsesToolChoice};
use crate::generation::ScoredToken;

/// The response, with the settings of its request.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ResponsesReply {
    pub id: String,
    pub object: ResponsesReplyObject,
    pub created_at: u64,
    #[schema(required)]
    pub completed_at: Option<u64>,
    pub status: ResponsesStatus,
    #[schema(required)]
    pub error: Option<ResponsesFailure>,
    #[schema(required)]
    pub incomplete_details: Option<ResponsesIncompleteDetails>,
    pub model: String,
    pub output: Vec<ResponsesItem>,
    #[schema(required)]
    pub usage: Option<ResponsesUsage>,
    #[schema(required)]
    pub instructions: Option<String>,
    #[schema(required)]
    pub max_output_tokens: Option<u32>,
    #[schema(value_type = Object)]
    pub metadata: JsonText,
    pub parallel_tool_calls: bool,
    #[schema(required)]
    pub previous_response_id: Option<String>,
    pub reasoning: ResponsesReasoning,
    pub background: bool,
    pub store: bool,
    #[schema(required)]
    pub temperature: Option<f32>,
    #[schema(value_type = ResponsesTextConfig)]
    pub text: JsonText,
    #[schema(value_type = ResponsesToolChoice)]
    pub tool_choice: JsonText,
    #[schema(value_type = Vec<ResponsesTool>)]
    pub tools: JsonText,
    pub top_logprobs: u32,
    #[schema(required)]
    pub top_p: Option<f32>,
    pub truncation: ResponsesTruncation,
    #[schema(required)]
    pub user: Option<String>,
}

/// A setting of the request, as JSON: its values would take far more memory than its text. Clones share the text.
#[derive(Clone, Debug)]
pub struct JsonText(Arc<RawValue>);

impl JsonText {
    pub fn new(value: &impl Serialize) -> Self {
        Self(to_raw_value(value).expect("wire types have string keys").into())
    }

    pub fn bytes(&self) -> usize {
        self.0.get().len()
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesReplyObject {
    Response,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
    /// By a request
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ResponsesFailure {
    /// Error code as in all APIs, such as `rank_lost`; `server_error` if there is none
    pub code: &'static str,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ResponsesIncompleteDetails {
    pub reason: ResponsesIncompleteReason,
}

/// Also used if the context is full, because the API has no other value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesIncompleteReason {
    MaxOutputTokens,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesItem {
    Message {
        id: String,
        status: ResponsesStatus,
        role: ResponsesReplyRole,
        content: Vec<ResponsesPart>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        arguments: String,
        status: ResponsesStatus,
    },
    CustomToolCall {
        id: String,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        input: String,
        status: ResponsesStatus,
    },
    LocalShellCall {
        id: String,
        call_id: String,
        action: ResponsesShellAction,
        status: ResponsesStatus,
    },
    Reasoning {
        id: String,
        summary: Vec<Value>,
        content: Vec<ResponsesPart>,
        status: ResponsesStatus,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesReplyRole {
    Assistant,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesPart {
    OutputText { text: String, annotations: Vec<Value>, logprobs: Vec<ResponsesLogprob> },
    ReasoningText { text: String },
}

/// The log probability of a token, and its alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ResponsesLogprob {
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
    pub top_logprobs: Vec<ResponsesTopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct ResponsesTopLogprob {
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ResponsesUsage {
    pub input_tokens: usize,
    pub input_tokens_details: ResponsesInputDetails,
    pub output_tokens: usize,
    pub output_tokens_details: ResponsesOutputDetails,
    pub total_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ResponsesInputDetails {
    pub cached_tokens: usize,
    /// Always 0: writing to the prefix cache is free.
    pub cache_write_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ResponsesOutputDetails {
    pub reasoning_tokens: usize,
}

/// One event of a stream.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ResponsesEvent {
    #[serde(flatten)]
    pub kind: ResponsesEventKind,
    /// Counts from 0, without gaps.
    pub sequence_number: u64,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub enum ResponsesEventKind {
    #[serde(rename = "response.created")]
    Created { response: Box<ResponsesReply> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Box<ResponsesReply> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: ResponsesItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: ResponsesPart },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        logprobs: Vec<ResponsesLogprob>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        logprobs: Vec<ResponsesLogprob>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: ResponsesPart },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
    #[serde(rename = "response.custom_tool_call_input.delta")]
    CustomInputDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.custom_tool_call_input.done")]
    CustomInputDone { item_id: String, output_index: usize, input: String },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: ResponsesItem },
    #[serde(rename = "response.completed")]
    Completed { response: Box<ResponsesReply> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Box<ResponsesReply> },
    #[serde(rename = "response.failed")]
    Failed { response: Box<ResponsesReply> },
}

impl ResponsesEventKind {
    /// The name in the `event:` line, which is also the `type` in the data.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Created { .. } => "response.created",
            Self::InProgress { .. } => "response.in_progress",
            Self::ItemAdded { .. } => "response.output_item.added",
            Self::PartAdded { .. } => "response.content_part.added",
            Self::TextDelta { .. } => "response.output_text.delta",
            Self::TextDone { .. } => "response.output_text.done",
            Self::ReasoningDelta { .. } => "response.reasoning_text.delta",
            Self::ReasoningDone { .. } => "response.reasoning_text.done",
            Self::PartDone { .. } => "response.content_part.done",
            Self::ArgumentsDelta { .. } => "response.function_call_arguments.delta",
            Self::ArgumentsDone { .. } => "response.function_call_arguments.done",
            Self::CustomInputDelta { .. } => "response.custom_tool_call_input.delta",
            Self::CustomInputDone { .. } => "response.custom_tool_call_input.done",
            Self::ItemDone { .. } => "response.output_item.done",
            Self::Completed { .. } => "response.completed",
            Self::Incomplete { .. } => "response.incomplete",
            Self::Failed { .. } => "response.failed",
        }
    }
}

/// The log probability for a probability of 0, because JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

impl ResponsesLogprob {
    /// `None` if log probabilities were not requested.
    pub fn new(token: &ScoredToken, tokenizer: &Tokenizer) -> Option<Self> {
        let logprobs = token.logprobs.as_ref()?;
        let top = logprobs.top.iter().map(|&(id, logprob)| {
            let bytes = tokenizer.token_bytes(id).to_vec();
            ResponsesTopLogprob {
                token: String::from_utf8_lossy(&bytes).into(),
                bytes,
                logprob: logprob.max(LOGPROB_MIN),
            }
        });
        let bytes = tokenizer.token_bytes(token.id).to_vec();
        let text = String::from_utf8_lossy(&bytes).into();
        let logprob = logprobs.chosen.max(LOGPROB_MIN);
        Some(Self { token: text, logprob, top_logprobs: top.collect(), bytes })
    }
}
