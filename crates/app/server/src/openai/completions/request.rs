//! The body of `/v1/completions`, and its conversion to a [`GenerationRequest`].

use serde::Deserialize;
use types::TokenId;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::generation::{CHOICES_MAX, GenerationInput, GenerationRequest, Prompt};
use crate::openai::common_fields::generation_request;

/// OpenAI's default of `max_tokens`.
const TOKENS_DEFAULT: usize = 16;

generation_request! {
    /// Prompts to continue. Fields that are not listed here are ignored.
    #[derive(Debug, Deserialize, ToSchema)]
    pub struct CompletionRequest {
        pub prompt: PromptField,
        /// Maximum tokens of each choice; 16 by default. 0 is allowed for `echo`
        #[schema(maximum = 4_294_967_295_u32)]
        pub max_tokens: Option<u32>,
        /// Return the log probability of each token, and of this many most probable tokens at each position
        #[schema(maximum = 20)]
        pub logprobs: Option<usize>,
        /// Start each choice with its prompt; log probabilities then include the prompt
        pub echo: Option<bool>,
        /// Not supported: refused
        pub suffix: Option<String>,
        /// Not supported: refused unless it equals `n`
        pub best_of: Option<usize>,
    }
}

/// A text, texts, tokens, or lists of tokens
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text, texts, tokens, or lists of tokens")]
pub enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl PromptField {
    pub fn into_prompts(self, param: &str) -> Result<Vec<Prompt>, ApiError> {
        let tokens = |ids: Vec<u32>| Prompt::Tokens(ids.into_iter().map(TokenId).collect());
        let prompts = match self {
            Self::Text(text) => vec![Prompt::Text(text)],
            Self::Tokens(ids) => vec![tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(Prompt::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(tokens).collect(),
        };
        if prompts.is_empty() || prompts.len() > CHOICES_MAX {
            return Err(ApiError::invalid(param, format!("there must be 1 to {CHOICES_MAX} prompts")));
        }
        Ok(prompts)
    }
}

impl CompletionRequest {
    pub fn into_generation_request(mut self) -> Result<GenerationRequest, ApiError> {
        if self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "texts are continued, not filled in"));
        }
        if self.best_of.is_some_and(|best_of| best_of != self.n.unwrap_or(1)) {
            return Err(ApiError::unsupported("best_of", "all answers are given: use `n`"));
        }
        let prompt = std::mem::replace(&mut self.prompt, PromptField::Texts(Vec::new()));
        let mut request = GenerationRequest::new(GenerationInput::Prompts(prompt.into_prompts("prompt")?));
        self.apply_common_fields(&mut request)?;
        let echo = self.echo.unwrap_or(false);
        request.tokens_max = Some(self.max_tokens.map_or(TOKENS_DEFAULT, |tokens| tokens as usize));
        if request.tokens_max == Some(0) && !echo {
            return Err(ApiError::invalid(
                "max_tokens",
                "an answer has at least one token, unless its prompt is echoed",
            ));
        }
        request.logprobs = self.logprobs;
        request.prompt_logprobs = self.logprobs.filter(|_| echo);
        Ok(request)
    }
}
