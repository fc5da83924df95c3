//! The body of `/v1/chat/completions`, and its conversion to a [`GenerationRequest`].

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::format::ResponseFormat;
use super::message::{ChatMessage, conversation};
use super::tool::{ChatTool, ToolChoiceField, tools};
use crate::conversation::{Effort, Reasoning};
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, PromptEnding};
use crate::openai::common_fields::generation_request;

generation_request! {
    /// A conversation to continue. Fields that are not listed here are ignored.
    #[derive(Debug, Deserialize, ToSchema)]
    pub struct ChatRequest {
        #[schema(min_items = 1, max_items = 8192)]
        pub messages: Vec<ChatMessage>,
        /// Maximum tokens of the output; by default what the context holds
        #[schema(minimum = 1, maximum = 4_294_967_295_u32)]
        pub max_completion_tokens: Option<u32>,
        /// The older name of `max_completion_tokens`
        #[schema(minimum = 1, maximum = 4_294_967_295_u32)]
        pub max_tokens: Option<u32>,
        /// Return the log probability of each output token
        pub logprobs: Option<bool>,
        /// Also return the log probabilities of this many most probable tokens at each position
        #[schema(maximum = 20)]
        pub top_logprobs: Option<usize>,
        pub response_format: Option<ResponseFormat>,
        #[schema(max_items = 512)]
        pub tools: Option<Vec<ChatTool>>,
        pub tool_choice: Option<ToolChoiceField>,
        /// Whether one response may call more than one tool; by default only if `tool_choice` forces none
        pub parallel_tool_calls: Option<bool>,
        /// Variables of the chat template, such as `enable_thinking`
        #[schema(value_type = Option<Object>)]
        pub chat_template_kwargs: Option<Map<String, Value>>,
        /// `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`; another word is a variable of the chat template
        pub reasoning_effort: Option<String>,
        /// False: do not start the assistant's message
        pub add_generation_prompt: Option<bool>,
        /// Continue the last message instead of starting a new one
        pub continue_final_message: Option<bool>,
        /// With `stream`: the answer is kept under this id, of 16 to 64 letters, digits, `-` and `_`, for a while. It goes on if
        /// the client disconnects, and `/v1/answers/{id}` resumes and cancels it
        #[schema(min_length = 16, max_length = 64)]
        pub answer_id: Option<String>,
        /// Refused unless it is `["text"]`: no other modality is supported
        pub modalities: Option<Vec<String>>,
        /// Not supported: refused
        #[schema(schema_with = crate::contract::null)]
        pub audio: Option<Value>,
        /// Not supported: refused. Use `tools`
        #[schema(schema_with = crate::contract::null)]
        pub functions: Option<Value>,
        /// Not supported: refused. Use `tool_choice`
        #[schema(schema_with = crate::contract::null)]
        pub function_call: Option<Value>,
        /// Not supported: refused
        #[schema(schema_with = crate::contract::null)]
        pub prediction: Option<Value>,
        /// Not supported: refused
        #[schema(schema_with = crate::contract::null)]
        pub web_search_options: Option<Value>,
    }
}

impl ChatRequest {
    pub fn into_generation_request(mut self) -> Result<GenerationRequest, ApiError> {
        self.refuse_unsupported()?;
        let (reasoning, template_args) = self.reasoning();
        let mut request = GenerationRequest::new(GenerationInput::Chat(ChatInput {
            messages: conversation(std::mem::take(&mut self.messages))?.into_messages(),
            tools: tools(self.tools.take().unwrap_or_default())?,
            tool_choice: self.tool_choice.take().map(Into::into).unwrap_or_default(),
            parallel_tool_calls: self.parallel_tool_calls,
            reasoning,
            template_args,
            ending: prompt_ending(self.add_generation_prompt, self.continue_final_message)?,
            truncates: false,
        }));
        self.apply_common_fields(&mut request)?;
        if let Some(format) = self.response_format.take() {
            let format = format.grammar()?;
            if format.is_some() && request.grammar.is_some() {
                let message = "response_format and vLLM's structured outputs exclude each other";
                return Err(ApiError::invalid("response_format", message));
            }
            request.grammar = request.grammar.or(format);
        }
        request.tokens_max = self.max_completion_tokens.or(self.max_tokens).map(|tokens| tokens as usize);
        if request.tokens_max == Some(0) {
            return Err(ApiError::invalid("max_completion_tokens", "an answer has at least one token"));
        }
        request.logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true")),
        };
        Ok(request)
    }

    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        if self.modalities.iter().flatten().any(|modality| modality != "text") {
            return Err(ApiError::unsupported("modalities", "answers are text only"));
        }
        let fields = [
            ("audio", &self.audio, "answers are text only"),
            ("functions", &self.functions, "functions are called tools: use `tools`"),
            ("function_call", &self.function_call, "functions are called tools: use `tool_choice`"),
            ("prediction", &self.prediction, "predicted outputs are not supported"),
            ("web_search_options", &self.web_search_options, "this server does not search the web"),
        ];
        let given = fields.into_iter().find(|(_, value, _)| value.is_some());
        given.map_or(Ok(()), |(name, _, message)| Err(ApiError::unsupported(name, message)))
    }

    /// How much to reason, and the variables of the template. A word for an effort that only the template may know is one of
    /// them.
    fn reasoning(&mut self) -> (Reasoning, Map<String, Value>) {
        let mut args = self.chat_template_kwargs.take().unwrap_or_default();
        let Some(word) = self.reasoning_effort.take() else { return (Reasoning::Default, args) };
        match Effort::from_word(&word) {
            Some(effort) => (effort.into(), args),
            None => {
                args.entry("reasoning_effort").or_insert(Value::String(word));
                (Reasoning::Default, args)
            }
        }
    }
}

/// What the rendered prompt ends with.
pub fn prompt_ending(
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
) -> Result<PromptEnding, ApiError> {
    match (continue_final_message.unwrap_or(false), add_generation_prompt) {
        (true, Some(true)) => {
            let message = "an answer cannot both continue the last message and begin a new one";
            Err(ApiError::invalid("continue_final_message", message))
        }
        (true, _) => Ok(PromptEnding::ContinueFinalMessage),
        (false, Some(false)) => Ok(PromptEnding::None),
        (false, _) => Ok(PromptEnding::GenerationPrompt),
    }
}
