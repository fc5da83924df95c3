//! Converts requests of `/api/chat` and `/api/generate` into [`GenerationRequest`]s.

use std::collections::{HashMap, VecDeque};

use serde_json::{Map, Value, json};
use text::{Content, Grammar, Message};
use types::TokenId;

use super::request::{
    OllamaChatRequest, OllamaFormat, OllamaFormatKeyword, OllamaGenerateRequest, OllamaMessage, OllamaOptions,
    OllamaRole, OllamaSchema, OllamaThink, OllamaThinkLevel, OllamaToolCallInput,
};
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, Prompt, PromptEnding, SamplingOverrides};
use crate::openai::tools;
use crate::served_model::ServedModel;

pub fn chat_request(model: &ServedModel, request: OllamaChatRequest) -> Result<GenerationRequest, ApiError> {
    let template_args = template_args(model, &request.model, request.think)?;
    let messages = messages(request.messages.unwrap_or_default())?;
    let chat = ChatInput {
        ending: ending(&messages),
        messages,
        tools: tools(request.tools.unwrap_or_default())?,
        template_args,
        truncates: request.truncate.unwrap_or(true),
        ..ChatInput::default()
    };
    let mut generation = GenerationRequest::new(GenerationInput::Chat(chat));
    generation.grammar = request.format.and_then(grammar);
    generation.logprobs = logprobs(request.logprobs, request.top_logprobs)?;
    apply(request.options.unwrap_or_default(), &mut generation);
    Ok(generation)
}

pub fn generate_request(model: &ServedModel, request: OllamaGenerateRequest) -> Result<GenerationRequest, ApiError> {
    refuse_unsupported(&request)?;
    let (raw, context) = (request.raw.unwrap_or(false), request.context.unwrap_or_default());
    let (prompt, system) = (request.prompt.unwrap_or_default(), request.system.filter(|system| !system.is_empty()));
    if raw && (system.is_some() || !context.is_empty()) {
        return Err(ApiError::invalid("raw", "a raw prompt takes neither `system` nor `context`"));
    }
    let template_args = template_args(model, &request.model, request.think)?;
    let input = match (raw || model.template.is_none(), system) {
        (true, None) => GenerationInput::Prompts(vec![Prompt::Text(prompt)]),
        (true, Some(_)) => {
            return Err(ApiError::invalid("system", "this model has no chat template, so it takes no system prompt"));
        }
        (false, system) => {
            let system = system.map(|text| message("system", text));
            let messages = system.into_iter().chain([message("user", prompt)]).collect();
            GenerationInput::Chat(ChatInput { messages, template_args, ..ChatInput::default() })
        }
    };
    let mut generation = GenerationRequest::new(input);
    generation.prefix = context.into_iter().map(TokenId).collect();
    generation.return_tokens = !raw;
    generation.grammar = request.format.and_then(grammar);
    generation.logprobs = logprobs(request.logprobs, request.top_logprobs)?;
    apply(request.options.unwrap_or_default(), &mut generation);
    Ok(generation)
}

fn refuse_unsupported(request: &OllamaGenerateRequest) -> Result<(), ApiError> {
    let is_given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    if is_given(&request.suffix) {
        return Err(ApiError::unsupported("suffix", "texts are continued, not filled in: `suffix` is not supported"));
    }
    if is_given(&request.template) {
        let message = "the template is that of the model: `template` is not supported, use `raw`";
        return Err(ApiError::unsupported("template", message));
    }
    refuse_images("images", request.images.as_deref())
}

fn refuse_images(at: &str, images: Option<&[Value]>) -> Result<(), ApiError> {
    match images {
        None | Some([]) => Ok(()),
        Some(_) => Err(ApiError::unsupported(at, "this model takes text only: `images` are not supported")),
    }
}

/// The template variables for `think`. Absent, the template's default holds.
fn template_args(model: &ServedModel, name: &str, think: Option<OllamaThink>) -> Result<Map<String, Value>, ApiError> {
    let thinks = !matches!(think, None | Some(OllamaThink::Switch(false)));
    if thinks && !model.format.has_reasoning() {
        return Err(ApiError::invalid("think", format!("\"{name}\" does not support thinking")));
    }
    let args = match think {
        None => json!({}),
        Some(OllamaThink::Switch(thinks)) => json!({"enable_thinking": thinks}),
        // Templates know three levels.
        Some(OllamaThink::Level(OllamaThinkLevel::Max)) => json!({"enable_thinking": true, "reasoning_effort": "high"}),
        Some(OllamaThink::Level(level)) => json!({"enable_thinking": true, "reasoning_effort": level}),
    };
    let Value::Object(args) = args else { return Ok(Map::new()) };
    Ok(args)
}

/// A final message of the assistant is continued.
fn ending(messages: &[Message]) -> PromptEnding {
    let continues = |last: &Message| last.role == "assistant" && !last.extra.contains_key("tool_calls");
    if messages.last().is_some_and(continues) {
        PromptEnding::ContinueFinalMessage
    } else {
        PromptEnding::GenerationPrompt
    }
}

fn messages(messages: Vec<OllamaMessage>) -> Result<Vec<Message>, ApiError> {
    let mut unanswered = UnansweredCalls::default();
    let convert = |(index, message): (usize, OllamaMessage)| {
        let OllamaMessage { role, content, thinking, tool_calls, tool_name, tool_call_id, images } = message;
        refuse_images(&format!("messages[{index}].images"), images.as_deref())?;
        let mut extra = Map::new();
        match role {
            OllamaRole::Assistant => {
                extra.extend(thinking.map(|text| ("reasoning_content".to_owned(), Value::from(text))));
                let calls = tool_calls.filter(|calls| !calls.is_empty());
                extra.extend(calls.map(|calls| ("tool_calls".to_owned(), unanswered.add(calls))));
            }
            OllamaRole::Tool => {
                let id = tool_call_id.or_else(|| unanswered.answer(tool_name.as_deref()));
                extra.extend(tool_name.map(|name| ("name".to_owned(), Value::from(name))));
                extra.extend(id.map(|id| ("tool_call_id".to_owned(), Value::from(id))));
            }
            OllamaRole::System | OllamaRole::User => {}
        }
        Ok(Message { extra, ..self::message(role.name(), content.unwrap_or_default()) })
    };
    messages.into_iter().enumerate().map(convert).collect()
}

/// Tool calls without a result. Ollama's clients name a tool with its result, where templates may need an id.
#[derive(Default)]
struct UnansweredCalls {
    /// The ids of all calls; `None` once a call has its result.
    ids: Vec<Option<String>>,
    /// Indices of `ids`, by the tool's name, oldest first.
    by_tool: HashMap<String, VecDeque<usize>>,
    /// All calls before this index have their results.
    first: usize,
}

impl UnansweredCalls {
    /// The calls of a message, in OpenAI's format.
    fn add(&mut self, calls: Vec<OllamaToolCallInput>) -> Value {
        let add = |OllamaToolCallInput { id, function }: OllamaToolCallInput| {
            let index = self.ids.len();
            let id = id.unwrap_or_else(|| format!("call_{index}"));
            self.ids.push(Some(id.clone()));
            self.by_tool.entry(function.name.clone()).or_default().push_back(index);
            let function = json!({"name": function.name, "arguments": function.arguments.unwrap_or_default()});
            json!({"id": id, "type": "function", "function": function})
        };
        calls.into_iter().map(add).collect()
    }

    /// The id of the oldest call of this tool, or of any tool. Each call is looked at twice at most, however many results come.
    fn answer(&mut self, name: Option<&str>) -> Option<String> {
        let Some(name) = name else {
            let left = &self.ids[self.first..];
            let at = left.iter().position(Option::is_some).unwrap_or(left.len());
            self.first += at;
            return self.ids.get_mut(self.first)?.take();
        };
        let calls = self.by_tool.get_mut(name)?;
        std::iter::from_fn(|| calls.pop_front()).find_map(|index| self.ids[index].take())
    }
}

impl OllamaRole {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

fn message(role: &str, text: String) -> Message {
    Message { role: role.to_owned(), content: Content::Text(text), extra: Map::new() }
}

fn grammar(format: OllamaFormat) -> Option<Grammar> {
    match format {
        OllamaFormat::Keyword(OllamaFormatKeyword::Text) => None,
        OllamaFormat::Keyword(OllamaFormatKeyword::Json) => Some(Grammar::JsonObject),
        OllamaFormat::Schema(OllamaSchema(schema)) => Some(Grammar::JsonSchema(Value::Object(schema))),
    }
}

fn logprobs(logprobs: Option<bool>, top: Option<usize>) -> Result<Option<usize>, ApiError> {
    match (logprobs.unwrap_or(false), top.unwrap_or(0)) {
        (true, top) => Ok(Some(top)),
        (false, 0) => Ok(None),
        (false, _) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
    }
}

fn apply(options: OllamaOptions, request: &mut GenerationRequest) {
    request.sampling = SamplingOverrides {
        temperature: options.temperature,
        top_k: options.top_k.map(|top_k| usize::try_from(top_k).unwrap_or(0)),
        // 0 leaves the most probable token.
        top_p: options.top_p.map(|top_p| top_p.max(f32::MIN_POSITIVE)),
        min_p: options.min_p,
        repetition_penalty: options.repeat_penalty,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        logit_bias: Vec::new(),
        seed: options.seed.filter(|&seed| seed != -1).map(i64::cast_unsigned),
    };
    request.tokens_max = options.num_predict.and_then(|tokens| usize::try_from(tokens).ok());
    request.stop = options.stop.unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(conversation: Value, expected: Value) {
        let conversation = serde_json::from_value(conversation).unwrap();
        assert_eq!(serde_json::to_value(messages(conversation).unwrap()).unwrap(), expected);
    }

    #[test]
    fn results_belong_to_the_calls_of_their_tools() {
        let call = |name: &str, id: Value| json!({"id": id, "function": {"name": name, "arguments": {"a": 1}}});
        let called = |name: &str, id: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}});
        check(
            json!([
                {"role": "assistant", "thinking": "hm", "tool_calls":
                    [call("find", json!(null)), call("stop", json!("own")), call("find", json!(null))]},
                {"role": "tool", "content": "stopped", "tool_name": "stop"},
                {"role": "tool", "content": "found", "tool_name": "find"},
                {"role": "tool", "content": "found too"},
                {"role": "tool", "content": "nobody asked", "tool_name": "fly"},
            ]),
            json!([
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls":
                    [called("find", "call_0"), called("stop", "own"), called("find", "call_2")]},
                {"role": "tool", "content": "stopped", "name": "stop", "tool_call_id": "own"},
                {"role": "tool", "content": "found", "name": "find", "tool_call_id": "call_0"},
                {"role": "tool", "content": "found too", "tool_call_id": "call_2"},
                {"role": "tool", "content": "nobody asked", "name": "fly"},
            ]),
        );
    }

    /// Fails by its time: a search per result takes minutes.
    #[test]
    fn many_results_are_matched_with_their_calls_in_linear_time() {
        let count = 100_000;
        let calls: Vec<_> = (0..count).map(|_| json!({"function": {"name": "f"}})).collect();
        let mut conversation = vec![json!({"role": "assistant", "tool_calls": calls})];
        conversation.extend((0..count).map(|number| match number % 3 {
            0 => json!({"role": "tool", "tool_name": "g"}),
            1 => json!({"role": "tool", "tool_name": "f"}),
            _ => json!({"role": "tool"}),
        }));
        let messages = messages(serde_json::from_value(json!(conversation)).unwrap()).unwrap();
        let id = |index: usize| messages[index].extra.get("tool_call_id").cloned();
        assert_eq!((id(1), id(2), id(3)), (None, Some(json!("call_0")), Some(json!("call_1"))));
    }

    #[test]
    fn options_mean_what_they_mean_in_ollama() {
        let applied = |options: Value| {
            let mut request = GenerationRequest::new(GenerationInput::Prompts(Vec::new()));
            apply(serde_json::from_value(options).unwrap(), &mut request);
            request
        };
        let unlimited = applied(json!({"num_predict": -2, "seed": -1, "top_k": -1, "num_ctx": 7, "mirostat": 1}));
        assert_eq!((unlimited.tokens_max, unlimited.sampling.seed, unlimited.sampling.top_k), (None, None, Some(0)));
        let limited = applied(json!({"num_predict": 5, "seed": 0, "repeat_penalty": 1.1, "stop": ["a"]}));
        assert_eq!((limited.tokens_max, limited.sampling.seed, limited.stop), (Some(5), Some(0), vec!["a".to_owned()]));
        assert_eq!(limited.sampling.repetition_penalty, Some(1.1));
        assert!(applied(json!({"top_p": 0})).sampling.top_p.is_some_and(|top_p| top_p > 0.0));
    }

    #[test]
    fn the_last_message_is_continued_if_it_is_the_assistant_s() {
        let ending = |conversation: Value| ending(&messages(serde_json::from_value(conversation).unwrap()).unwrap());
        let user = json!({"role": "user", "content": "a"});
        assert_eq!(ending(json!([user])), PromptEnding::GenerationPrompt);
        let begun = json!({"role": "assistant", "content": "The"});
        assert_eq!(ending(json!([user, begun])), PromptEnding::ContinueFinalMessage);
        let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]});
        assert_eq!(ending(json!([user, call])), PromptEnding::GenerationPrompt);
    }
}
