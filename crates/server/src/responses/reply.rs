//! What `/v1/responses` answers: a response, or the events from which a client builds the same response.

use serde::Serialize;
use serde_json::{Map, Value};
use text::Tokenizer;
use utoipa::ToSchema;

use super::request::{Reasoning, TextConfig, Tool, ToolChoice, Truncation};
use crate::answer::Token;

/// The answer, and the settings that it was made with.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponsesReply)]
pub struct Response {
    pub id: String,
    pub object: ResponseObject,
    pub created_at: u64,
    #[schema(required)]
    pub completed_at: Option<u64>,
    pub status: Status,
    #[schema(required)]
    pub error: Option<Failure>,
    #[schema(required)]
    pub incomplete_details: Option<IncompleteDetails>,
    pub model: String,
    pub output: Vec<Item>,
    #[schema(required)]
    pub usage: Option<Usage>,
    #[schema(required)]
    pub instructions: Option<String>,
    #[schema(required)]
    pub max_output_tokens: Option<u32>,
    #[schema(value_type = Object)]
    pub metadata: Map<String, Value>,
    pub parallel_tool_calls: bool,
    #[schema(required)]
    pub previous_response_id: Option<String>,
    pub reasoning: Reasoning,
    pub background: bool,
    pub store: bool,
    #[schema(required)]
    pub temperature: Option<f32>,
    pub text: TextConfig,
    pub tool_choice: ToolChoice,
    pub tools: Vec<Tool>,
    pub top_logprobs: u32,
    #[schema(required)]
    pub top_p: Option<f32>,
    pub truncation: Truncation,
    #[schema(required)]
    pub user: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponsesReplyObject)]
pub enum ResponseObject {
    Response,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponsesStatus)]
pub enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = ResponsesFailure)]
pub struct Failure {
    /// The word that an error of every API has, such as `rank_lost`; `server_error` where there is none
    pub code: &'static str,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponsesIncompleteDetails)]
pub struct IncompleteDetails {
    pub reason: IncompleteReason,
}

/// A full context is said in the same word: the API has no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponsesIncompleteReason)]
pub enum IncompleteReason {
    MaxOutputTokens,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponsesItem)]
pub enum Item {
    Message { id: String, status: Status, role: ReplyRole, content: Vec<Part> },
    FunctionCall { id: String, call_id: String, name: String, arguments: String, status: Status },
    Reasoning { id: String, summary: Vec<Value>, content: Vec<Part>, status: Status },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponsesReplyRole)]
pub enum ReplyRole {
    Assistant,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponsesPart)]
pub enum Part {
    OutputText { text: String, annotations: Vec<Value>, logprobs: Vec<Logprob> },
    ReasoningText { text: String },
}

/// How likely a token was, and which others could have been.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = ResponsesLogprob)]
pub struct Logprob {
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[schema(as = ResponsesTopLogprob)]
pub struct TopLogprob {
    pub token: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponsesUsage)]
pub struct Usage {
    pub input_tokens: usize,
    pub input_tokens_details: InputDetails,
    pub output_tokens: usize,
    pub output_tokens_details: OutputDetails,
    pub total_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponsesInputDetails)]
pub struct InputDetails {
    pub cached_tokens: usize,
    /// Pages of the cache are written as a matter of course and cost nothing.
    pub cache_write_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponsesOutputDetails)]
pub struct OutputDetails {
    pub reasoning_tokens: usize,
}

/// One event of a streamed answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponsesEvent)]
pub struct Event {
    #[serde(flatten)]
    pub kind: EventKind,
    /// Counts from 0, without a gap.
    pub sequence_number: u64,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
#[schema(as = ResponsesEventKind)]
pub enum EventKind {
    #[serde(rename = "response.created")]
    Created { response: Box<Response> },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Box<Response> },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: Item },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: Part },
    #[serde(rename = "response.output_text.delta")]
    TextDelta { item_id: String, output_index: usize, content_index: usize, delta: String, logprobs: Vec<Logprob> },
    #[serde(rename = "response.output_text.done")]
    TextDone { item_id: String, output_index: usize, content_index: usize, text: String, logprobs: Vec<Logprob> },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: Part },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: Item },
    #[serde(rename = "response.completed")]
    Completed { response: Box<Response> },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Box<Response> },
    #[serde(rename = "response.failed")]
    Failed { response: Box<Response> },
}

impl EventKind {
    /// The name in the `event:` line, which is the `type` in the data too.
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
            Self::ItemDone { .. } => "response.output_item.done",
            Self::Completed { .. } => "response.completed",
            Self::Incomplete { .. } => "response.incomplete",
            Self::Failed { .. } => "response.failed",
        }
    }
}

/// What stands for a probability of nothing: JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

impl Logprob {
    /// None where log probabilities were not asked for.
    pub fn of(token: &Token, tokenizer: &Tokenizer) -> Option<Self> {
        let logprobs = token.logprobs.as_ref()?;
        let top = logprobs.top.iter().map(|&(id, logprob)| {
            let bytes = tokenizer.token_bytes(id).to_vec();
            TopLogprob { token: String::from_utf8_lossy(&bytes).into(), bytes, logprob: logprob.max(LOGPROB_MIN) }
        });
        let bytes = tokenizer.token_bytes(token.id).to_vec();
        let text = String::from_utf8_lossy(&bytes).into();
        let logprob = logprobs.chosen.max(LOGPROB_MIN);
        Some(Self { token: text, logprob, top_logprobs: top.collect(), bytes })
    }
}
