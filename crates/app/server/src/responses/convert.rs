//! Converts a request of `/v1/responses` into a [`GenerationRequest`].

use std::collections::HashSet;

use serde_json::{Map, Value};
use text::{Grammar, ToolChoice};

use super::request::{
    InputItem, ResponsesInputItem, ResponsesInputPart, ResponsesOutputPart, ResponsesReasoningPart, ResponsesRequest,
    ResponsesRole, ResponsesTextFormat, ResponsesTruncation,
};
use super::tool_types::{ResponsesAllowedTool, ResponsesNamedChoice, ResponsesToolChoice, ResponsesToolMode};
use super::tools::{OfferedTools, SHELL, custom_arguments, shell_arguments, visible_name};
use crate::conversation::{Conversation, Role};
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, PromptEnding, SamplingOverrides};
use crate::text_or_parts::TextOrParts;

/// The value in `include` that requests log probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

/// The maximum items of a conversation, with those of earlier responses.
const ITEMS_MAX: usize = 8192;
/// The bounds of `metadata`.
const METADATA_PAIRS_MAX: usize = 16;
const METADATA_KEY_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;

/// `history` is the conversation before the request's own input.
pub fn generation_request(
    request: &ResponsesRequest,
    history: &[ResponsesInputItem],
    tools: &OfferedTools,
) -> Result<GenerationRequest, ApiError> {
    refuse_stored_state(request)?;
    check_metadata(request.metadata.as_ref())?;
    let sampling =
        SamplingOverrides { temperature: request.temperature, top_p: request.top_p, ..SamplingOverrides::default() };
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    let grammar = match format {
        None | Some(ResponsesTextFormat::Text {}) => None,
        Some(ResponsesTextFormat::JsonObject {}) => Some(Grammar::JsonObject),
        Some(ResponsesTextFormat::JsonSchema { schema, .. }) => {
            Some(Grammar::JsonSchema(Value::Object(schema.clone())))
        }
    };
    let includes = request.include.iter().flatten().any(|name| name == INCLUDE_LOGPROBS);
    let top = request.top_logprobs.map(|top| top as usize);
    Ok(GenerationRequest {
        sampling,
        grammar,
        tokens_max: request.max_output_tokens.map(|tokens| tokens as usize),
        logprobs: if includes { Some(top.unwrap_or(0)) } else { top.filter(|top| *top > 0) },
        ..GenerationRequest::new(GenerationInput::Chat(chat_input(request, history, tools)?))
    })
}

fn refuse_stored_state(request: &ResponsesRequest) -> Result<(), ApiError> {
    let given = [("conversation", &request.conversation), ("prompt", &request.prompt)];
    for (name, value) in given {
        if value.is_some() {
            let message = format!("`{name}` is not supported: send the conversation, or `previous_response_id`");
            return Err(ApiError::unsupported(name, message));
        }
    }
    Ok(())
}

/// The bounds are OpenAI's: the response repeats the metadata.
fn check_metadata(metadata: Option<&Map<String, Value>>) -> Result<(), ApiError> {
    let Some(metadata) = metadata else { return Ok(()) };
    let is_long = |text: &str, max: usize| text.chars().nth(max).is_some();
    let is_bad = |(key, value): (&String, &Value)| {
        is_long(key, METADATA_KEY_CHARS_MAX)
            || value.as_str().is_none_or(|value| is_long(value, METADATA_VALUE_CHARS_MAX))
    };
    if metadata.len() > METADATA_PAIRS_MAX || metadata.iter().any(is_bad) {
        let message = format!(
            "`metadata` has at most {METADATA_PAIRS_MAX} texts of at most {METADATA_VALUE_CHARS_MAX} characters, \
             with names of at most {METADATA_KEY_CHARS_MAX}"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(())
}

fn chat_input(
    request: &ResponsesRequest,
    history: &[ResponsesInputItem],
    tools: &OfferedTools,
) -> Result<ChatInput, ApiError> {
    let own = if let TextOrParts::Parts(items) = &request.input { items.len() } else { 1 };
    if history.len() + own > ITEMS_MAX {
        return Err(ApiError::invalid("input", format!("a conversation has at most {ITEMS_MAX} items")));
    }
    let mut conversation = Conversation::default();
    if let Some(instructions) = &request.instructions {
        conversation.say(Role::System, instructions);
    }
    let mut add_all = |items: &[ResponsesInputItem]| {
        items.iter().for_each(|item| add_item(&mut conversation, &item.item));
    };
    add_all(history);
    match &request.input {
        TextOrParts::Text(text) => add_message(&mut conversation, Role::User, std::iter::once(text.as_str())),
        TextOrParts::Parts(items) => add_all(items),
    }
    let messages = conversation.into_messages();
    if messages.is_empty() {
        return Err(ApiError::invalid("input", "there must be at least one item"));
    }
    let (tool_choice, allowed) = tool_choice(request.tool_choice.as_ref());
    let effort = request.reasoning.and_then(|reasoning| reasoning.effort);
    Ok(ChatInput {
        messages,
        tools: tools.allowed(allowed.as_ref()),
        tool_choice,
        parallel_tool_calls: request.parallel_tool_calls,
        reasoning: effort.map(Into::into).unwrap_or_default(),
        template_args: Map::new(),
        // The API has no way to continue a message: after an assistant's message a new one starts.
        ending: PromptEnding::GenerationPrompt,
        truncates: request.truncation == Some(ResponsesTruncation::Auto),
    })
}

fn add_item(conversation: &mut Conversation, item: &InputItem) {
    let mut call = |id: &String, name: String, arguments: Value| {
        conversation.tool_call(Some(id.clone()), name, arguments);
    };
    match item {
        InputItem::Message { role, content } => {
            add_message(conversation, (*role).into(), texts(content, ResponsesInputPart::text));
        }
        InputItem::FunctionCall { call_id, name, namespace, arguments } => {
            call(call_id, visible_name(namespace.as_deref(), name), arguments.as_str().into());
        }
        InputItem::CustomToolCall { call_id, name, namespace, input } => {
            call(call_id, visible_name(namespace.as_deref(), name), custom_arguments(input));
        }
        InputItem::LocalShellCall { call_id, action } => call(call_id, SHELL.to_owned(), shell_arguments(action)),
        InputItem::FunctionCallOutput { call_id, output } | InputItem::CustomToolCallOutput { call_id, output } => {
            let text = texts(output, ResponsesOutputPart::text).collect::<Vec<_>>().join("\n");
            conversation.tool_result(Some(call_id.clone()), None, text);
        }
        InputItem::LocalShellCallOutput { id, call_id, output } => {
            conversation.tool_result(call_id.as_ref().or(id.as_ref()).cloned(), Some(SHELL.to_owned()), output);
        }
        InputItem::Reasoning { content } => {
            for part in content.iter().flatten() {
                let (ResponsesReasoningPart::ReasoningText { text } | ResponsesReasoningPart::Text { text }) = part;
                conversation.reasoning(text);
            }
        }
        // Of no use to the model.
        _ => {}
    }
}

/// The items of the assistant's turn are one message: its reasoning, texts and calls.
fn add_message<'a>(conversation: &mut Conversation, role: Role, texts: impl Iterator<Item = &'a str>) {
    if role != Role::Assistant {
        conversation.begin(None);
    }
    texts.for_each(|text| conversation.say(role, text));
}

impl From<ResponsesRole> for Role {
    fn from(role: ResponsesRole) -> Self {
        match role {
            ResponsesRole::User => Self::User,
            ResponsesRole::Assistant => Self::Assistant,
            ResponsesRole::System => Self::System,
            ResponsesRole::Developer => Self::Developer,
        }
    }
}

fn texts<'a, P>(content: &'a TextOrParts<P>, text: fn(&'a P) -> &'a str) -> Box<dyn Iterator<Item = &'a str> + 'a> {
    match content {
        TextOrParts::Text(text) => Box::new(std::iter::once(text.as_str())),
        TextOrParts::Parts(parts) => Box::new(parts.iter().map(text)),
    }
}

/// The tool choice, and the tools that it is restricted to.
fn tool_choice(choice: Option<&ResponsesToolChoice>) -> (ToolChoice, Option<HashSet<&str>>) {
    match choice {
        None => (ToolChoice::Auto, None),
        Some(ResponsesToolChoice::Mode(mode)) => ((*mode).into(), None),
        Some(ResponsesToolChoice::Named(
            ResponsesNamedChoice::Function { name } | ResponsesNamedChoice::Custom { name },
        )) => (ToolChoice::Named(name.clone()), None),
        Some(ResponsesToolChoice::Named(ResponsesNamedChoice::AllowedTools { mode, tools })) => {
            ((*mode).into(), Some(tools.iter().map(ResponsesAllowedTool::name).collect()))
        }
    }
}

impl From<ResponsesToolMode> for ToolChoice {
    fn from(mode: ResponsesToolMode) -> Self {
        match mode {
            ResponsesToolMode::None => Self::None,
            ResponsesToolMode::Auto => Self::Auto,
            ResponsesToolMode::Required => Self::Required,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conversation::{Effort, Reasoning};
    use serde_json::json;

    fn read(mut json: Value) -> Result<GenerationRequest, ApiError> {
        json["model"] = json!("m");
        let request: ResponsesRequest = serde_json::from_value(json).unwrap();
        let tools = OfferedTools::new(request.tools.as_deref().unwrap_or_default())?;
        generation_request(&request, &[], &tools)
    }

    fn chat_of(request: GenerationRequest) -> ChatInput {
        let GenerationInput::Chat(chat) = request.input else { panic!("not a chat") };
        chat
    }

    fn check(request: Value, expected: Value) {
        assert_eq!(serde_json::to_value(chat_of(read(request).unwrap()).messages).unwrap(), expected);
    }

    #[test]
    fn a_text_is_what_the_user_says_and_instructions_come_before_it() {
        check(
            json!({"input": "hi", "instructions": "be kind"}),
            json!([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]),
        );
    }

    #[test]
    fn items_of_one_turn_become_one_message() {
        check(
            json!({"input": [
                {"role": "developer", "content": "be kind"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
                {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "look"}]},
                {"type": "message", "id": "m", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
                {"type": "function_call", "call_id": "c1", "name": "sky", "arguments": "{\"city\":\"Rome\"}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            ]}),
            json!([
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "look", "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": "{\"city\":\"Rome\"}"}},
                ]},
                {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "sky"},
            ]),
        );
    }

    #[test]
    fn calls_of_custom_tools_of_namespaces_and_of_the_shell_are_calls_of_functions() {
        let call = |id: &str, name: &str, arguments: Value| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
        let result = |id: &str, name: &str, text: &str| json!({"role": "tool", "content": text, "tool_call_id": id, "name": name});
        check(
            json!({"input": [
                {"type": "function_call", "call_id": "c1", "namespace": "agents", "name": "wait", "arguments": "{}"},
                {"type": "custom_tool_call", "id": "ctc", "status": "completed", "call_id": "c2", "name": "patch", "input": "a\nb"},
                {"type": "local_shell_call", "call_id": "c3", "status": "completed",
                    "action": {"type": "exec", "command": ["ls"], "env": {}}},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": "x"}]},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
                {"type": "local_shell_call_output", "id": "c3", "output": "a.txt"},
                {"type": "web_search_call", "id": "ws", "status": "completed"},
            ]}),
            json!([
                {"role": "assistant", "content": "", "tool_calls": [
                    call("c1", "agents.wait", json!("{}")),
                    call("c2", "patch", json!({"input": "a\nb"})),
                    call("c3", "local_shell", json!({"command": ["ls"], "env": {}})),
                ]},
                result("c1", "agents.wait", "(an image, which this model cannot see)"),
                result("c2", "patch", "done"),
                result("c3", "local_shell", "a.txt"),
            ]),
        );
    }

    #[test]
    fn a_choice_may_be_confined_to_some_tools() {
        let function = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}});
        let allowed =
            json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]});
        let request = json!({"input": "hi", "tools": [function("a"), function("b")], "tool_choice": allowed});
        let chat = chat_of(read(request).unwrap());
        assert_eq!(chat.tool_choice, ToolChoice::Required);
        let b = json!({"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}});
        assert_eq!(chat.tools.definitions(), [b]);
    }

    #[test]
    fn fields_that_need_stored_state_are_refused_by_name() {
        for (name, value) in [("conversation", json!("conv_1")), ("prompt", json!({"id": "p"}))] {
            let error = read(json!({"input": "hi", name: value})).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unsupported_parameter")));
            assert!(read(json!({"input": "hi", name: null})).is_ok());
        }
        assert!(read(json!({"input": "hi", "background": false, "store": true})).is_ok());
    }

    #[test]
    fn metadata_and_items_have_limits() {
        let param = |fields: Value| {
            let mut request = json!({"input": "hi"});
            request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            read(request).err().and_then(|error| error.param)
        };
        let pairs = |count: usize| (0..count).map(|number| (number.to_string(), json!("x"))).collect::<Map<_, _>>();
        let metadata = Some("metadata".to_owned());
        assert_eq!(param(json!({"metadata": pairs(16)})), None);
        assert_eq!(param(json!({"metadata": pairs(17)})), metadata);
        assert_eq!(param(json!({"metadata": {"k".repeat(64): "ä".repeat(512)}})), None);
        assert_eq!(param(json!({"metadata": {"k".repeat(65): "v"}})), metadata);
        assert_eq!(param(json!({"metadata": {"k": "v".repeat(513)}})), metadata);
        assert_eq!(param(json!({"metadata": {"k": {"v": 1}}})), metadata);
        let items = |count: usize| vec![json!({"role": "user", "content": "x"}); count];
        assert_eq!(param(json!({"input": items(ITEMS_MAX)})), None);
        assert_eq!(param(json!({"input": items(ITEMS_MAX + 1)})), Some("input".to_owned()));
    }

    #[test]
    fn log_probabilities_are_asked_for_by_count_or_by_name() {
        let asked = |more: Value| {
            let mut request = json!({"input": "hi"});
            request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            read(request).unwrap().logprobs
        };
        assert_eq!(asked(json!({})), None);
        assert_eq!(asked(json!({"top_logprobs": 0})), None);
        assert_eq!(asked(json!({"top_logprobs": 3})), Some(3));
        assert_eq!(asked(json!({"include": [INCLUDE_LOGPROBS]})), Some(0));
    }

    #[test]
    fn an_effort_is_how_much_to_reason() {
        let reasoning = |fields: Value| chat_of(read(json!({"input": "hi", "reasoning": fields})).unwrap()).reasoning;
        assert_eq!(reasoning(json!(null)), Reasoning::Default);
        assert_eq!(reasoning(json!({"summary": "auto"})), Reasoning::Default);
        assert_eq!(reasoning(json!({"effort": "none"})), Reasoning::Off);
        assert_eq!(reasoning(json!({"effort": "xhigh"})), Effort::High.into());
    }
}
