//! `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's format.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use text::{ChatTemplate, SpecialTokens};
use types::TokenId;
use utoipa::ToSchema;

use super::chat::{ChatMessage, ChatTool, conversation, prompt_ending, tools};
use crate::app::SharedApp;
use crate::blocking;
use crate::error::{ApiError, OpenAiErrorBody};
use crate::error_responses::OpenAiErrors;
use crate::generation::{ChatInput, chat_tokens, text_tokens};
use crate::json_body::JsonBody;
use crate::served_model::ServedModel;

pub fn router() -> Router<SharedApp> {
    Router::new()
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(describe))
}

/// A text, or a conversation
#[derive(Debug, Deserialize, ToSchema)]
pub struct TokenizeRequest {
    /// Model name; the served model by default
    pub model: Option<String>,
    pub prompt: Option<String>,
    #[schema(max_items = 8192)]
    pub messages: Option<Vec<ChatMessage>>,
    #[schema(max_items = 512)]
    pub tools: Option<Vec<ChatTool>>,
    /// For a text: add the special tokens that the model expects around it; true by default
    pub add_special_tokens: Option<bool>,
    /// For a conversation: start the assistant's message; true by default
    pub add_generation_prompt: Option<bool>,
    /// For a conversation: continue the last message instead of starting a new one
    pub continue_final_message: Option<bool>,
    /// Variables of the chat template
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// Also return the tokens as text
    pub return_token_strs: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub struct Tokenized {
    count: usize,
    /// Context size: maximum tokens of prompt and output together
    max_model_len: usize,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct DetokenizeRequest {
    /// Model name; the served model by default
    pub model: Option<String>,
    pub tokens: Vec<u32>,
}

#[derive(Serialize, ToSchema)]
pub struct Detokenized {
    prompt: String,
}

#[derive(Serialize, ToSchema)]
pub struct TokenizerInfo {
    /// Begin-of-sequence token as text; null if there is none
    bos_token: Option<String>,
    /// End-of-sequence token as text; null if there is none
    eos_token: Option<String>,
}

/// Tokenize a text or a conversation
#[utoipa::path(
    post, path = "/tokenize", tag = "tokens", security(("key" = []), ("x-api-key" = [])),
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The tokens", body = Tokenized),
        OpenAiErrors,
    )
)]
pub async fn tokenize(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<TokenizeRequest>,
) -> Result<Response, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    blocking::run(move || {
        let _permit = permit;
        Ok(Json(tokenized(&model, request)?).into_response())
    })
    .await
}

fn tokenized(model: &ServedModel, request: TokenizeRequest) -> Result<Tokenized, ApiError> {
    // Invalid tools are refused even with a text, which does not use them.
    let tools = tools(request.tools.unwrap_or_default())?;
    let tokens = match (request.prompt, request.messages) {
        (Some(text), None) => text_tokens(model, &text, request.add_special_tokens.unwrap_or(true))?,
        (None, Some(list)) => {
            let chat = ChatInput {
                messages: conversation(list)?.into_messages(),
                tools,
                template_args: request.chat_template_kwargs.unwrap_or_default(),
                ending: prompt_ending(request.add_generation_prompt, request.continue_final_message)?,
                ..ChatInput::default()
            };
            chat_tokens(model, &chat)?
        }
        _ => return Err(ApiError::invalid("prompt", "give either a prompt or messages")),
    };
    let text = |&token: &TokenId| String::from_utf8_lossy(model.tokenizer.token_bytes(token)).into_owned();
    let token_strs = request.return_token_strs.unwrap_or(false).then(|| tokens.iter().map(text).collect());
    let tokens: Vec<u32> = tokens.iter().map(|token| token.0).collect();
    Ok(Tokenized { count: tokens.len(), max_model_len: model.context, tokens, token_strs })
}

/// Convert tokens to text
#[utoipa::path(
    post, path = "/detokenize", tag = "tokens", security(("key" = []), ("x-api-key" = [])),
    request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = Detokenized),
        OpenAiErrors,
    )
)]
pub async fn detokenize(
    State(app): State<SharedApp>,
    JsonBody(request, permit): JsonBody<DetokenizeRequest>,
) -> Result<Json<Detokenized>, ApiError> {
    let model = app.model(request.model.as_deref()).await?;
    let (tokens, vocab) = (request.tokens, model.tokenizer.vocab_size());
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
        return Err(ApiError::invalid("tokens", format!("token {token} is outside the vocabulary of {vocab}")));
    }
    let prompt = blocking::run(move || {
        let _permit = permit;
        let tokens: Vec<_> = tokens.into_iter().map(TokenId).collect();
        Ok(model.tokenizer.decode(&tokens, SpecialTokens::Show))
    });
    Ok(Json(Detokenized { prompt: prompt.await? }))
}

/// Get the begin and end tokens of the tokenizer
///
/// lm-eval needs this to use the server's tokenizer instead of one of its own.
#[utoipa::path(
    get, path = "/tokenizer_info", tag = "tokens", security(("key" = []), ("x-api-key" = [])),
    responses(
        (status = 200, description = "The tokenizer's settings", body = TokenizerInfo),
        (status = 401, description = "No key, or an unknown one", body = OpenAiErrorBody),
        (status = 503, description = "No model is loaded", body = OpenAiErrorBody),
    )
)]
pub async fn describe(State(app): State<SharedApp>) -> Result<Json<TokenizerInfo>, ApiError> {
    let model = app.model(None).await?;
    let named = |name: fn(&ChatTemplate) -> Option<&str>| model.template.as_ref().and_then(name).map(str::to_owned);
    // Without a chat template the token names are unknown, but the ids are known.
    let token_text = |ids: &[TokenId]| ids.first().map(|&id| model.tokenizer.decode(&[id], SpecialTokens::Show));
    Ok(Json(TokenizerInfo {
        bos_token: named(ChatTemplate::bos).or_else(|| token_text(model.tokenizer.prefix_ids())),
        eos_token: named(ChatTemplate::eos).or_else(|| token_text(model.tokenizer.eos_ids())),
    }))
}
