//! A chat completion, whole.

use engine::Logprobs;
use serde::Serialize;
use text::Tokenizer;
use types::TokenId;
use utoipa::ToSchema;

use crate::answer::{Finish, Reply, Token, Usage};
use crate::identity;
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
    pub tool_calls: Vec<Call>,
}

#[derive(Serialize, ToSchema)]
pub struct Call {
    pub id: String,
    /// Always `function`
    #[schema(value_type = String)]
    pub r#type: &'static str,
    pub function: CalledFunction,
}

#[derive(Serialize, ToSchema)]
pub struct CalledFunction {
    pub name: String,
    /// JSON, in a string
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

impl ChatCompletion {
    pub fn new(model: &str, tokenizer: &Tokenizer, replies: Vec<Reply>, usage: Usage, logprobs: bool) -> Self {
        let choice = |(index, reply): (usize, Reply)| ChatChoice {
            index,
            logprobs: logprobs.then(|| LogprobsBody::new(tokenizer, &reply.tokens)),
            finish_reason: finish_reason(reply.finish.as_ref()),
            message: AnswerMessage::from(reply),
        };
        Self {
            id: identity::fresh("chatcmpl-"),
            object: "chat.completion",
            created: identity::unix_now(),
            model: model.to_owned(),
            choices: replies.into_iter().enumerate().map(choice).collect(),
            usage: usage.into(),
        }
    }
}

impl From<Reply> for AnswerMessage {
    fn from(reply: Reply) -> Self {
        let call = |call: crate::answer::ToolCall| Call {
            id: call_id(),
            r#type: "function",
            function: CalledFunction { name: call.name, arguments: call.arguments },
        };
        // A message that only calls has no content, as OpenAI's have none.
        let content = (!reply.text.is_empty() || reply.calls.is_empty()).then_some(reply.text);
        Self {
            role: "assistant",
            content,
            refusal: None,
            reasoning_content: (!reply.reasoning.is_empty()).then_some(reply.reasoning),
            tool_calls: reply.calls.into_iter().map(call).collect(),
        }
    }
}

impl LogprobsBody {
    pub fn new(tokenizer: &Tokenizer, tokens: &[Token]) -> Self {
        let content = tokens.iter().filter_map(|Token { id, logprobs }| {
            let Logprobs { chosen, top } = logprobs.as_ref()?;
            let best = |&(id, logprob): &(TokenId, f32)| {
                let (token, bytes) = spelled(tokenizer, id);
                TopLogprob { token, logprob, bytes }
            };
            let (token, bytes) = spelled(tokenizer, *id);
            Some(TokenLogprob { token, logprob: *chosen, bytes, top_logprobs: top.iter().map(best).collect() })
        });
        Self { content: content.collect(), refusal: None }
    }
}

/// A token as text and as bytes. Structure such as `<|im_end|>` has its name.
fn spelled(tokenizer: &Tokenizer, id: TokenId) -> (String, Vec<u8>) {
    let bytes = tokenizer.token_bytes(id).to_vec();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

pub fn call_id() -> String {
    identity::fresh("call_")
}

pub fn finish_reason(finish: Option<&Finish>) -> &'static str {
    match finish {
        Some(Finish::Length) => "length",
        Some(Finish::ToolCalls) => "tool_calls",
        Some(Finish::Stop | Finish::StopString(_)) | None => "stop",
    }
}
