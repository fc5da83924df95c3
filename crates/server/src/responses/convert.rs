//! Converts a request of `/v1/responses` into a [`GenerationRequest`].

use serde_json::{Map, Value, json};
use text::{Grammar, ToolChoice};

use super::request::{
    InputItem, ResponsesAllowedTool, ResponsesEffort, ResponsesInputItem, ResponsesInputPart, ResponsesNamedChoice,
    ResponsesReasoningPart, ResponsesRequest, ResponsesRole, ResponsesTextFormat, ResponsesTool, ResponsesToolChoice,
    ResponsesToolMode,
};
use crate::conversation::ConversationBuilder;
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, PromptEnding, SamplingOverrides};
use crate::text_or_parts::TextOrParts;

/// The value in `include` that requests log probabilities.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

pub fn generation_request(request: &ResponsesRequest) -> Result<GenerationRequest, ApiError> {
    refuse_stored_state(request)?;
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
        ..GenerationRequest::new(GenerationInput::Chat(chat_input(request)?))
    })
}

fn refuse_stored_state(request: &ResponsesRequest) -> Result<(), ApiError> {
    let given = [
        ("previous_response_id", &request.previous_response_id),
        ("conversation", &request.conversation),
        ("prompt", &request.prompt),
    ];
    for (name, value) in given {
        if value.is_some() {
            let message = format!("nothing is stored here, so `{name}` means nothing: send the whole conversation");
            return Err(ApiError::unsupported(name, message));
        }
    }
    match &request.background {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(_) => Err(ApiError::unsupported("background", "an answer is made while its connection is open")),
    }
}

fn chat_input(request: &ResponsesRequest) -> Result<ChatInput, ApiError> {
    let mut conversation = ConversationBuilder::default();
    if let Some(instructions) = &request.instructions {
        conversation.system(instructions);
    }
    match &request.input {
        TextOrParts::Text(text) => conversation.user(text),
        TextOrParts::Parts(items) => {
            items.iter().for_each(|ResponsesInputItem(item)| add_item(&mut conversation, item))
        }
    }
    let messages = conversation.into_messages();
    if messages.is_empty() {
        return Err(ApiError::invalid("input", "there must be at least one item"));
    }
    let (tool_choice, allowed) = tool_choice(request.tool_choice.as_ref());
    let tools = request.tools.iter().flatten();
    let tools = tools
        .filter(|ResponsesTool::Function { name, .. }| allowed.as_ref().is_none_or(|names| names.contains(&&**name)));
    Ok(ChatInput {
        messages,
        tools: tools.map(tool).collect(),
        tool_choice,
        parallel_tool_calls: request.parallel_tool_calls,
        template_args: template_args(request.reasoning.and_then(|reasoning| reasoning.effort)),
        // The API has no way to continue a message: after an assistant's message a new one starts.
        ending: PromptEnding::GenerationPrompt,
    })
}

fn add_item(conversation: &mut ConversationBuilder, item: &InputItem) {
    match item {
        InputItem::Message { role, content } => {
            for text in texts(content) {
                match role {
                    ResponsesRole::User => conversation.user(text),
                    ResponsesRole::Assistant => conversation.assistant(text),
                    ResponsesRole::System | ResponsesRole::Developer => conversation.system(text),
                }
            }
        }
        InputItem::FunctionCall { call_id, name, arguments } => conversation.tool_call(call_id, name, json!(arguments)),
        InputItem::FunctionCallOutput { call_id, output } => {
            conversation.tool_result(call_id, texts(output).collect::<Vec<_>>().join("\n"));
        }
        InputItem::Reasoning { content } => {
            for ResponsesReasoningPart::ReasoningText { text } in content.iter().flatten() {
                conversation.reasoning(text);
            }
        }
    }
}

fn texts(content: &TextOrParts<ResponsesInputPart>) -> Box<dyn Iterator<Item = &str> + '_> {
    match content {
        TextOrParts::Text(text) => Box::new(std::iter::once(text.as_str())),
        TextOrParts::Parts(parts) => Box::new(parts.iter().map(ResponsesInputPart::text)),
    }
}

fn tool(ResponsesTool::Function { name, description, parameters, strict }: &ResponsesTool) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
    let optional = [
        ("description", description.as_ref().map(|text| json!(text))),
        ("parameters", parameters.as_ref().map(|schema| json!(schema))),
        ("strict", strict.map(|strict| json!(strict))),
    ];
    function.extend(optional.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    json!({"type": "function", "function": function})
}

/// The tool choice, and the tools that it is restricted to.
fn tool_choice(choice: Option<&ResponsesToolChoice>) -> (ToolChoice, Option<Vec<&str>>) {
    match choice {
        None => (ToolChoice::Auto, None),
        Some(ResponsesToolChoice::Mode(mode)) => ((*mode).into(), None),
        Some(ResponsesToolChoice::Named(ResponsesNamedChoice::Function { name })) => {
            (ToolChoice::Named(name.clone()), None)
        }
        Some(ResponsesToolChoice::Named(ResponsesNamedChoice::AllowedTools { mode, tools })) => {
            let names = tools.iter().map(|ResponsesAllowedTool::Function { name }| name.as_str());
            ((*mode).into(), Some(names.collect()))
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

/// The template variables for the reasoning effort. Without an effort the template's default is used.
fn template_args(effort: Option<ResponsesEffort>) -> Map<String, Value> {
    let Some(effort) = effort else { return Map::new() };
    let reasons = ("enable_thinking".to_owned(), json!(effort != ResponsesEffort::None));
    Map::from_iter([reasons, ("reasoning_effort".to_owned(), json!(effort))])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut json: Value) -> Result<GenerationRequest, ApiError> {
        json["model"] = json!("m");
        generation_request(&serde_json::from_value(json).unwrap())
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
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "look", "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": "{\"city\":\"Rome\"}"}},
                ]},
                {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "sky"},
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
        assert_eq!(chat.tools, [b]);
    }

    #[test]
    fn fields_that_need_stored_state_are_refused_by_name() {
        for (name, value) in [
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!("conv_1")),
            ("prompt", json!({"id": "p"})),
            ("background", json!(true)),
        ] {
            let error = read(json!({"input": "hi", name: value})).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some(name), Some("unsupported_parameter")));
            assert!(read(json!({"input": "hi", name: null})).is_ok());
        }
        assert!(read(json!({"input": "hi", "background": false, "store": true})).is_ok());
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
    fn effort_is_told_to_the_template() {
        let effort = |effort: &str| chat_of(read(json!({"input": "hi", "reasoning": {"effort": effort}})).unwrap());
        let args = Value::Object(effort("none").template_args);
        assert_eq!(args, json!({"enable_thinking": false, "reasoning_effort": "none"}));
        assert_eq!(effort("high").template_args["enable_thinking"], true);
    }
}
