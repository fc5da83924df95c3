//! Converts requests of `/api/chat` and `/api/generate` into [`GenerationRequest`]s.

use serde_json::Value;
use text::Grammar;
use types::TokenId;

use super::request::{
    OllamaChatRequest, OllamaFormat, OllamaFormatKeyword, OllamaGenerateRequest, OllamaMessage, OllamaOptions,
    OllamaRole, OllamaSchema, OllamaThink, OllamaToolCallInput,
};
use crate::conversation::{Conversation, Reasoning, Role};
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, Prompt, PromptEnding, SamplingOverrides};
use crate::openai::tools;
use crate::served_model::ServedModel;

pub fn chat_request(model: &ServedModel, request: OllamaChatRequest) -> Result<GenerationRequest, ApiError> {
    let reasoning = reasoning(model, &request.model, request.think)?;
    let conversation = conversation(request.messages.unwrap_or_default())?;
    let chat = ChatInput {
        ending: PromptEnding::continuing(&conversation),
        messages: conversation.into_messages(),
        tools: tools(request.tools.unwrap_or_default())?,
        reasoning,
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
    let reasoning = reasoning(model, &request.model, request.think)?;
    let input = match (raw || model.template.is_none(), system) {
        (true, None) => GenerationInput::Prompts(vec![Prompt::Text(prompt)]),
        (true, Some(_)) => {
            return Err(ApiError::invalid("system", "this model has no chat template, so it takes no system prompt"));
        }
        (false, system) => {
            let mut conversation = Conversation::default();
            system.into_iter().for_each(|text| conversation.say(Role::System, text));
            conversation.say(Role::User, prompt);
            let messages = conversation.into_messages();
            GenerationInput::Chat(ChatInput { messages, reasoning, ..ChatInput::default() })
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

/// Absent, the template's default holds. Ollama's clients rely on the error for a model that cannot think.
fn reasoning(model: &ServedModel, name: &str, think: Option<OllamaThink>) -> Result<Reasoning, ApiError> {
    let reasoning = match think {
        None => Reasoning::Default,
        Some(OllamaThink::Switch(false)) => Reasoning::Off,
        Some(OllamaThink::Switch(true)) => Reasoning::On(None),
        Some(OllamaThink::Level(effort)) => effort.into(),
    };
    if matches!(reasoning, Reasoning::On(_)) && !model.format.has_reasoning() {
        return Err(ApiError::invalid("think", format!("\"{name}\" does not support thinking")));
    }
    Ok(reasoning)
}

fn conversation(messages: Vec<OllamaMessage>) -> Result<Conversation, ApiError> {
    let mut conversation = Conversation::default();
    for (index, message) in messages.into_iter().enumerate() {
        let OllamaMessage { role, content, thinking, tool_calls, tool_name, tool_call_id, images } = message;
        refuse_images(&format!("messages[{index}].images"), images.as_deref())?;
        if role == OllamaRole::Tool {
            conversation.tool_result(tool_call_id, tool_name, content.unwrap_or_default());
            continue;
        }
        conversation.begin(None);
        if role == OllamaRole::Assistant {
            thinking.iter().for_each(|text| conversation.reasoning(text));
        }
        conversation.say(role.into(), content.unwrap_or_default());
        for OllamaToolCallInput { id, function } in
            tool_calls.into_iter().flatten().filter(|_| role == OllamaRole::Assistant)
        {
            conversation.tool_call(id, function.name, Value::Object(function.arguments.unwrap_or_default()));
        }
    }
    Ok(conversation)
}

impl From<OllamaRole> for Role {
    fn from(role: OllamaRole) -> Self {
        match role {
            OllamaRole::System => Self::System,
            OllamaRole::User => Self::User,
            OllamaRole::Assistant => Self::Assistant,
            OllamaRole::Tool => Self::Tool,
        }
    }
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
    use serde_json::json;

    fn check(conversation: Value, expected: Value) {
        let conversation = serde_json::from_value(conversation).unwrap();
        assert_eq!(serde_json::to_value(super::conversation(conversation).unwrap().into_messages()).unwrap(), expected);
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
                {"role": "tool", "content": "found too", "name": "find", "tool_call_id": "call_2"},
                {"role": "tool", "content": "nobody asked", "name": "fly"},
            ]),
        );
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
        let ending = |messages: Value| {
            PromptEnding::continuing(&conversation(serde_json::from_value(messages).unwrap()).unwrap())
        };
        let user = json!({"role": "user", "content": "a"});
        assert_eq!(ending(json!([user])), PromptEnding::GenerationPrompt);
        let begun = json!({"role": "assistant", "content": "The"});
        assert_eq!(ending(json!([user, begun])), PromptEnding::ContinueFinalMessage);
        let call = json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]});
        assert_eq!(ending(json!([user, call])), PromptEnding::GenerationPrompt);
    }
}
