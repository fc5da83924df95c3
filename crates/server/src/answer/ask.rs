//! `Ask`: what is asked of a model, in one form for all APIs.

use engine::SamplingParams;
use serde_json::{Map, Value};
use text::{GenerationDefaults, Grammar, Message, ToolChoice};
use types::TokenId;

/// The most choices that one request may ask for: prompts times answers to each.
pub const CHOICES_MAX: usize = 128;

/// One request. Everything that is absent is the model's default, or off.
#[derive(Clone, Debug)]
pub struct Ask {
    pub input: Input,
    /// Answers to each prompt.
    pub choices: usize,
    pub wishes: Wishes,
    /// Absent: as many as fit.
    pub tokens_max: Option<usize>,
    pub tokens_min: usize,
    /// Texts before which the answer ends.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_tokens: Vec<TokenId>,
    pub ignore_eos: bool,
    /// What the answer must look like.
    pub grammar: Option<Grammar>,
    /// Log probabilities of the answer's tokens, with this many alternatives.
    pub logprobs: Option<usize>,
    /// The same of the prompt's tokens.
    pub prompt_logprobs: Option<usize>,
    /// Show tokens such as `<|im_end|>` in the text.
    pub show_special: bool,
}

impl Ask {
    pub fn new(input: Input) -> Self {
        Self {
            input,
            choices: 1,
            wishes: Wishes::default(),
            tokens_max: None,
            tokens_min: 0,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
            show_special: false,
        }
    }
}

#[derive(Clone, Debug)]
pub enum Input {
    /// A conversation that the model's template turns into a prompt. The answer is split into text, reasoning and calls.
    Chat(Chat),
    /// Prompts as they are. The answer is text and nothing else.
    Prompts(Vec<Prompt>),
}

#[derive(Clone, Debug)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// A conversation and the tools that the model may call in it.
#[derive(Clone, Debug)]
pub struct Chat {
    pub messages: Vec<Message>,
    /// In OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.
    pub tools: Vec<Value>,
    pub tool_choice: ToolChoice,
    /// Whether one answer may call more than one tool.
    pub one_call_only: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub template_args: Map<String, Value>,
    pub turn: Turn,
}

impl Default for Chat {
    fn default() -> Self {
        Self {
            messages: Vec::new(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            one_call_only: false,
            template_args: Map::new(),
            turn: Turn::New,
        }
    }
}

/// Where the answer begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Turn {
    /// In a new turn of the assistant.
    #[default]
    New,
    /// In the last message, which is its beginning.
    Continued,
    /// After the last message, with whatever turn the model begins itself.
    Open,
}

/// How tokens are to be chosen: what the request says, and only that.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes {
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

impl Wishes {
    /// What is not asked for is what the model's makers recommend; where they are silent, it is off. Penalties are off
    /// unless they are asked for.
    pub fn params(&self, model: &GenerationDefaults, logprobs: Option<usize>, seed: u64) -> SamplingParams {
        let greedy = (model.do_sample == Some(false)).then_some(0.0);
        SamplingParams {
            temperature: self.temperature.or(greedy).or(model.temperature).unwrap_or(1.0),
            top_p: self.top_p.or(model.top_p).unwrap_or(1.0),
            top_k: self.top_k.unwrap_or(model.top_k.unwrap_or(0) as usize),
            min_p: self.min_p.or(model.min_p).unwrap_or(0.0),
            seed,
            repetition_penalty: self.repetition_penalty.unwrap_or(1.0),
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

    fn check(wishes: Wishes, model: GenerationDefaults, expected: (f32, f32, usize)) {
        let params = wishes.params(&model, None, 0);
        assert_eq!((params.temperature, params.top_p, params.top_k), expected);
        assert_eq!(params.repetition_penalty, 1.0, "penalties are off unless asked for");
    }

    #[test]
    fn the_request_comes_before_the_makers_and_they_before_plain_sampling() {
        let model = GenerationDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repetition_penalty: Some(1.2),
            ..GenerationDefaults::default()
        };
        check(Wishes::default(), GenerationDefaults::default(), (1.0, 1.0, 0));
        check(Wishes::default(), model.clone(), (0.6, 1.0, 20));
        check(Wishes { temperature: Some(0.0), top_k: Some(0), ..Wishes::default() }, model, (0.0, 1.0, 0));
    }
}
