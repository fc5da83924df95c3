//! `GenerationRequest`: a request to a model, in one format for all APIs.

use engine::SamplingParams;
use serde_json::{Map, Value};
use text::{Grammar, Message, SamplingDefaults, ToolChoice};
use types::TokenId;

use crate::conversation::{Conversation, Reasoning, Tools};

/// The maximum choices of one request: prompts times choices for each.
pub const CHOICES_MAX: usize = 128;

/// Absent fields use the model's default, or are off.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    pub input: GenerationInput,
    /// Choices for each prompt.
    pub choices: usize,
    pub sampling: SamplingOverrides,
    /// `None`: as many as fit in the context.
    pub tokens_max: Option<usize>,
    pub tokens_min: usize,
    /// Stop strings. They are not part of the output.
    pub stop: Vec<String>,
    /// Tokens that end the output, besides the model's own.
    pub stop_tokens: Vec<TokenId>,
    pub ignore_eos: bool,
    /// The grammar that the output must follow.
    pub grammar: Option<Grammar>,
    /// Log probabilities of the generated tokens, with this many alternatives.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// Keep tokens such as `<|im_end|>` in the text.
    pub show_special: bool,
    /// Tokens before the prompt: an earlier conversation.
    pub prefix: Vec<TokenId>,
    /// Return the tokens of the prompt and of the output, with the token that ended it.
    pub return_tokens: bool,
}

impl GenerationRequest {
    pub fn new(input: GenerationInput) -> Self {
        Self {
            input,
            choices: 1,
            sampling: SamplingOverrides::default(),
            tokens_max: None,
            tokens_min: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
            show_special: false,
            prefix: Vec::new(),
            return_tokens: false,
        }
    }
}

#[derive(Clone, Debug)]
pub enum GenerationInput {
    /// A conversation that the model's template renders to a prompt. The output is parsed into text, reasoning and tool
    /// calls.
    Chat(ChatInput),
    /// Plain prompts. All output is text.
    Prompts(Vec<Prompt>),
}

#[derive(Clone, Debug)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// A conversation and the tools that the model may call in it.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    /// Of a [`Conversation`].
    pub messages: Vec<Message>,
    pub tools: Tools,
    pub tool_choice: ToolChoice,
    /// Whether the output may have several tool calls. `None`: only if no call is forced, because the grammar of a forced
    /// call would let the model call for ever.
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Reasoning,
    /// Variables of the template that the client gives. They have precedence over those of `reasoning`.
    pub template_args: Map<String, Value>,
    pub ending: PromptEnding,
    /// Leave out the oldest messages if the conversation does not fit into the context.
    pub truncates: bool,
}

impl ChatInput {
    /// Whether the output ends before a second tool call.
    pub fn is_single_tool_call(&self) -> bool {
        let is_forced = matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        !self.parallel_tool_calls.unwrap_or(!is_forced)
    }
}

/// What the rendered prompt ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnding {
    /// The header of a new assistant message.
    #[default]
    GenerationPrompt,
    /// The last message, left open: the output continues it.
    ContinueFinalMessage,
    /// The last message, closed: the model itself starts the next one.
    None,
}

impl PromptEnding {
    /// For APIs that continue a final message of the assistant.
    pub fn continuing(conversation: &Conversation) -> Self {
        if conversation.is_open() { Self::ContinueFinalMessage } else { Self::GenerationPrompt }
    }
}

/// The sampling settings that a request gives.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingOverrides {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<usize>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub logit_bias: Vec<(TokenId, f32)>,
    pub seed: Option<u64>,
}

impl SamplingOverrides {
    /// Settings that the request leaves out are the model's defaults.
    pub fn params(&self, default: &SamplingDefaults, logprobs: Option<usize>, seed: u64) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k.unwrap_or(default.top_k as usize),
            min_p: self.min_p.unwrap_or(default.min_p),
            seed,
            repetition_penalty: self.repetition_penalty.unwrap_or(default.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: (!self.logit_bias.is_empty()).then(|| self.logit_bias.as_slice().into()),
            logprobs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::GenerationDefaults;

    fn check(overrides: SamplingOverrides, model: &GenerationDefaults, expected: (f32, f32, usize, f32, f32)) {
        let params = overrides.params(&model.sampling(), None, 0);
        let SamplingParams { temperature, top_p, top_k, min_p, repetition_penalty, .. } = params;
        assert_eq!((temperature, top_p, top_k, min_p, repetition_penalty), expected);
    }

    #[test]
    fn the_request_overrides_the_model_s_defaults() {
        let model = GenerationDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repetition_penalty: Some(1.2),
            ..GenerationDefaults::default()
        };
        let none = SamplingOverrides::default;
        check(none(), &GenerationDefaults::default(), (0.7, 0.95, 40, 0.05, 1.0));
        check(none(), &model, (0.6, 1.0, 20, 0.0, 1.2));
        let all_off =
            SamplingOverrides { temperature: Some(0.0), top_k: Some(0), repetition_penalty: Some(1.0), ..none() };
        check(all_off, &model, (0.0, 1.0, 0, 0.0, 1.0));
    }
}
