//! From a request of `/v1/responses` to the one inner form.

use serde_json::{Map, Value, json};
use text::Grammar;

use super::request::{
    AllowedTool, Effort, Format, InputItem, InputPart, Item, Mode, NamedChoice, ReasoningPart, Request, Role, Tool,
    ToolChoice,
};
use crate::answer::{self, Ask, Chat, Input, Turn, Wishes};
use crate::error::ApiError;
use crate::parts::TextOr;
use crate::transcript::Transcript;

/// Log probabilities are given to those who ask for them under this name in `include`.
const INCLUDE_LOGPROBS: &str = "message.output_text.logprobs";

/// What is asked.
pub fn ask(request: &Request) -> Result<Ask, ApiError> {
    refuse_what_needs_a_memory(request)?;
    let wishes = Wishes { temperature: request.temperature, top_p: request.top_p, ..Wishes::default() };
    let format = request.text.as_ref().and_then(|text| text.format.as_ref());
    let grammar = match format {
        None | Some(Format::Text {}) => None,
        Some(Format::JsonObject {}) => Some(Grammar::JsonObject),
        Some(Format::JsonSchema { schema, .. }) => Some(Grammar::JsonSchema(Value::Object(schema.clone()))),
    };
    let includes = request.include.iter().flatten().any(|name| name == INCLUDE_LOGPROBS);
    let top = request.top_logprobs.map(|top| top as usize);
    Ok(Ask {
        wishes,
        grammar,
        tokens_max: request.max_output_tokens.map(|tokens| tokens as usize),
        logprobs: if includes { Some(top.unwrap_or(0)) } else { top.filter(|top| *top > 0) },
        ..Ask::new(Input::Chat(chat(request)?))
    })
}

fn refuse_what_needs_a_memory(request: &Request) -> Result<(), ApiError> {
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

fn chat(request: &Request) -> Result<Chat, ApiError> {
    let mut transcript = Transcript::default();
    if let Some(instructions) = &request.instructions {
        transcript.system(instructions);
    }
    match &request.input {
        TextOr::Text(text) => transcript.user(text),
        TextOr::Parts(items) => items.iter().for_each(|Item(item)| add(&mut transcript, item)),
    }
    let messages = transcript.into_messages();
    if messages.is_empty() {
        return Err(ApiError::invalid("input", "there must be at least one item"));
    }
    let (tool_choice, allowed) = tool_choice(request.tool_choice.as_ref());
    let tools = request.tools.iter().flatten();
    let tools =
        tools.filter(|Tool::Function { name, .. }| allowed.as_ref().is_none_or(|names| names.contains(&&**name)));
    Ok(Chat {
        messages,
        tools: tools.map(tool).collect(),
        tool_choice,
        one_call_only: request.parallel_tool_calls == Some(false),
        template_args: template_args(request.reasoning.and_then(|reasoning| reasoning.effort)),
        // The API has no way to say so: a conversation that ends with the assistant gets another answer.
        turn: Turn::New,
    })
}

fn add(transcript: &mut Transcript, item: &InputItem) {
    match item {
        InputItem::Message { role, content } => {
            for text in texts(content) {
                match role {
                    Role::User => transcript.user(text),
                    Role::Assistant => transcript.assistant(text),
                    Role::System | Role::Developer => transcript.system(text),
                }
            }
        }
        InputItem::FunctionCall { call_id, name, arguments } => transcript.tool_call(call_id, name, json!(arguments)),
        InputItem::FunctionCallOutput { call_id, output } => {
            transcript.tool_result(call_id, texts(output).collect::<Vec<_>>().join("\n"));
        }
        InputItem::Reasoning { content } => {
            for ReasoningPart::ReasoningText { text } in content.iter().flatten() {
                transcript.reasoning(text);
            }
        }
    }
}

fn texts(content: &TextOr<InputPart>) -> Box<dyn Iterator<Item = &str> + '_> {
    match content {
        TextOr::Text(text) => Box::new(std::iter::once(text.as_str())),
        TextOr::Parts(parts) => Box::new(parts.iter().map(InputPart::text)),
    }
}

fn tool(Tool::Function { name, description, parameters, strict }: &Tool) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
    let optional = [
        ("description", description.as_ref().map(|text| json!(text))),
        ("parameters", parameters.as_ref().map(|schema| json!(schema))),
        ("strict", strict.map(|strict| json!(strict))),
    ];
    function.extend(optional.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))));
    json!({"type": "function", "function": function})
}

/// The choice, and the tools that it is confined to.
fn tool_choice(choice: Option<&ToolChoice>) -> (answer::ToolChoice, Option<Vec<&str>>) {
    match choice {
        None => (answer::ToolChoice::Auto, None),
        Some(ToolChoice::Mode(mode)) => ((*mode).into(), None),
        Some(ToolChoice::Named(NamedChoice::Function { name })) => (answer::ToolChoice::Named(name.clone()), None),
        Some(ToolChoice::Named(NamedChoice::AllowedTools { mode, tools })) => {
            let names = tools.iter().map(|AllowedTool::Function { name }| name.as_str());
            ((*mode).into(), Some(names.collect()))
        }
    }
}

impl From<Mode> for answer::ToolChoice {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::None => Self::None,
            Mode::Auto => Self::Auto,
            Mode::Required => Self::Required,
        }
    }
}

/// The words by which templates know how much to reason. What is not said stays the model's own habit.
fn template_args(effort: Option<Effort>) -> Map<String, Value> {
    let Some(effort) = effort else { return Map::new() };
    let reasons = ("enable_thinking".to_owned(), json!(effort != Effort::None));
    Map::from_iter([reasons, ("reasoning_effort".to_owned(), json!(effort))])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mut json: Value) -> Result<Ask, ApiError> {
        json["model"] = json!("m");
        ask(&serde_json::from_value(json).unwrap())
    }

    fn chat_of(ask: Ask) -> Chat {
        let Input::Chat(chat) = ask.input else { panic!("not a chat") };
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
        assert_eq!(chat.tool_choice, answer::ToolChoice::Required);
        let b = json!({"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}});
        assert_eq!(chat.tools, [b]);
    }

    #[test]
    fn what_needs_a_memory_is_refused_by_name() {
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
