//! The response of `/v1/chat/completions`.

use engine::Logprobs;
use serde::Serialize;
use text::Tokenizer;
use types::TokenId;
use utoipa::ToSchema;

use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, OutputBlock, ScoredToken};
use crate::ids;
use crate::openai::usage::UsageBody;

#[derive(Serialize, ToSchema)]
pub struct ChatCompletion {
    pub id: String,
    /// Always `chat.completion`
    #[schema(value_type = String)]
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: UsageBody,
}

#[derive(Serialize, ToSchema)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AnswerMessage,
    pub logprobs: Option<LogprobsBody>,
    /// `stop`, `length` or `tool_calls`
    #[schema(value_type = String)]
    pub finish_reason: &'static str,
}

#[derive(Serialize, ToSchema)]
pub struct AnswerMessage {
    /// Always `assistant`
    #[schema(value_type = String)]
    pub role: &'static str,
    pub content: Option<String>,
    pub refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub tool_calls: Vec<ChatToolCall>,
}

#[derive(Serialize, ToSchema)]
#[schema(as = Call)]
pub struct ChatToolCall {
    pub id: String,
    /// Always `function`
    #[schema(value_type = String)]
    pub r#type: &'static str,
    pub function: CalledFunction,
}

#[derive(Serialize, ToSchema)]
pub struct CalledFunction {
    pub name: String,
    /// JSON as a string
    pub arguments: String,
}

#[derive(Serialize, ToSchema)]
pub struct LogprobsBody {
    pub content: Vec<TokenLogprob>,
    pub refusal: Option<Vec<TokenLogprob>>,
}

#[derive(Serialize, ToSchema)]
pub struct TokenLogprob {
    pub token: String,
    pub logprob: f32,
    /// The token's bytes; it may end in the middle of a character
    pub bytes: Vec<u8>,
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Serialize, ToSchema)]
pub struct TopLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

impl From<ChoiceOutput> for AnswerMessage {
    fn from(output: ChoiceOutput) -> Self {
        let (text, reasoning) = (output.text(BlockKind::Text), output.text(BlockKind::Reasoning));
        let call = |OutputBlock { kind, text, .. }: OutputBlock| match kind {
            BlockKind::ToolCall { name } => Some(ChatToolCall {
                id: call_id(),
                r#type: "function",
                function: CalledFunction { name, arguments: text },
            }),
            BlockKind::Text | BlockKind::Reasoning => None,
        };
        let tool_calls: Vec<_> = output.blocks.into_iter().filter_map(call).collect();
        Self {
            role: "assistant",
            // A message with only tool calls has null content, as in OpenAI's API.
            content: (!text.is_empty() || tool_calls.is_empty()).then_some(text),
            refusal: None,
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            tool_calls,
        }
    }
}

impl LogprobsBody {
    pub fn new(tokenizer: &Tokenizer, tokens: &[ScoredToken]) -> Self {
        let content = tokens.iter().filter_map(|ScoredToken { id, logprobs }| {
            let Logprobs { chosen, top } = logprobs.as_ref()?;
            let best = |&(id, logprob): &(TokenId, f32)| {
                let (token, bytes) = token_text(tokenizer, id);
                TopLogprob { token, logprob, bytes }
            };
            let (token, bytes) = token_text(tokenizer, *id);
            Some(TokenLogprob { token, logprob: *chosen, bytes, top_logprobs: top.iter().map(best).collect() })
        });
        Self { content: content.collect(), refusal: None }
    }
}

/// A token as text and as bytes. Special tokens are token_text by their names, such as `<|im_end|>`.
fn token_text(tokenizer: &Tokenizer, id: TokenId) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(id).to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

pub fn call_id() -> String {
    ids::new_id("call_")
}

pub fn finish_reason(finish: &ChoiceFinish) -> &'static str {
    match finish {
        ChoiceFinish::Length => "length",
        ChoiceFinish::ToolCalls => "tool_calls",
        ChoiceFinish::Stop | ChoiceFinish::StopString(_) => "stop",
    }
}
