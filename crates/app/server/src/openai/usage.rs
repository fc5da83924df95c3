//! `usage` in OpenAI's format.

use serde::Serialize;
use utoipa::ToSchema;

use crate::generation::Usage;

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct UsageBody {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptDetails,
    pub completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct PromptDetails {
    /// Prompt tokens from the prefix cache
    pub cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct CompletionDetails {
    pub reasoning_tokens: usize,
}

impl From<Usage> for UsageBody {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.total_tokens(),
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails { reasoning_tokens: usage.reasoning_tokens },
        }
    }
}
