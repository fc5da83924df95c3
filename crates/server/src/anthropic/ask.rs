//! From a request of `/v1/messages` to the one inner form.

use serde_json::{Map, Value, json};
use text::Grammar;

use super::request::{
    CountRequest, Effort, InputBlock, InputMessage, OutputFormat, Request, Role, TextBlock, Thinking, Tool, ToolChoice,
    ToolKind,
};
use crate::answer::{self, Ask, Chat, Input, Turn, Wishes};
use crate::error::ApiError;
use crate::parts::TextOr;
use crate::transcript::Transcript;

/// What is asked.
pub fn ask(request: Request) -> Result<Ask, ApiError> {
    let wishes = Wishes {
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k.map(|top_k| top_k as usize),
        ..Wishes::default()
    };
    let format = request.output_config.as_ref().and_then(|config| config.format.clone());
    let grammar = format.map(|OutputFormat::JsonSchema { schema }| Grammar::JsonSchema(Value::Object(schema)));
    let (tokens_max, stop) = (request.max_tokens as usize, request.stop_sequences.clone().unwrap_or_default());
    Ok(Ask { wishes, grammar, stop, tokens_max: Some(tokens_max), ..Ask::new(Input::Chat(chat(request)?)) })
}

/// The conversation whose tokens are to be counted.
pub fn count(request: CountRequest) -> Result<Chat, ApiError> {
    chat(request.into())
}

fn chat(request: Request) -> Result<Chat, ApiError> {
    if request.messages.is_empty() {
        return Err(ApiError::invalid("messages", "there must be at least one message"));
    }
    let mut transcript = Transcript::default();
    for text in request.system.into_iter().flat_map(texts) {
        transcript.system(text);
    }
    for (index, message) in request.messages.into_iter().enumerate() {
        add(&mut transcript, message, index)?;
    }
    let (tool_choice, one_call_only) = tool_choice(request.tool_choice);
    let turn = if transcript.ends_with_assistant() { Turn::Continued } else { Turn::New };
    Ok(Chat {
        messages: transcript.into_messages(),
        tools: request.tools.into_iter().flatten().map(tool).collect(),
        tool_choice,
        one_call_only,
        template_args: template_args(request.thinking, request.output_config.and_then(|config| config.effort)),
        turn,
    })
}

fn add(transcript: &mut Transcript, message: InputMessage, index: usize) -> Result<(), ApiError> {
    let blocks = match message.content {
        TextOr::Text(text) => vec![InputBlock::Text { text }],
        TextOr::Parts(blocks) => blocks,
    };
    for block in blocks {
        match (message.role, block) {
            (Role::System, InputBlock::Text { text }) => transcript.system(text),
            (Role::User, InputBlock::Text { text }) => transcript.user(text),
            (Role::User, InputBlock::ToolResult { tool_use_id, content }) => {
                let content: Vec<_> = content.into_iter().flat_map(texts).collect();
                transcript.tool_result(&tool_use_id, content.join("\n"));
            }
            (Role::Assistant, InputBlock::Text { text }) => transcript.assistant(text),
            (Role::Assistant, InputBlock::Thinking { thinking }) => transcript.reasoning(&thinking),
            (Role::Assistant, InputBlock::RedactedThinking { .. }) => {}
            (Role::Assistant, InputBlock::ToolUse { id, name, input }) => {
                transcript.tool_call(&id, &name, Value::Object(input));
            }
            (role, _) => {
                let param = format!("messages[{index}].content");
                return Err(ApiError::invalid(param, format!("a message of {role:?} may not hold this kind of block")));
            }
        }
    }
    Ok(())
}

fn texts(content: TextOr<TextBlock>) -> Vec<String> {
    match content {
        TextOr::Text(text) => vec![text],
        TextOr::Parts(blocks) => blocks.into_iter().map(|TextBlock::Text { text }| text).collect(),
    }
}

fn tool(tool: Tool) -> Value {
    let Tool { kind: None | Some(ToolKind::Custom), name, description, input_schema } = tool;
    let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
    function.extend(description.map(|description| ("description".to_owned(), json!(description))));
    function.insert("parameters".to_owned(), Value::Object(input_schema));
    json!({"type": "function", "function": function})
}

/// The choice, and whether one call is all that is allowed.
fn tool_choice(choice: Option<ToolChoice>) -> (answer::ToolChoice, bool) {
    let (choice, one) = match choice {
        None => (answer::ToolChoice::Auto, None),
        Some(ToolChoice::Auto { disable_parallel_tool_use }) => (answer::ToolChoice::Auto, disable_parallel_tool_use),
        Some(ToolChoice::Any { disable_parallel_tool_use }) => {
            (answer::ToolChoice::Required, disable_parallel_tool_use)
        }
        Some(ToolChoice::Tool { name, disable_parallel_tool_use }) => {
            (answer::ToolChoice::Named(name), disable_parallel_tool_use)
        }
        Some(ToolChoice::None {}) => (answer::ToolChoice::None, None),
    };
    (choice, one.unwrap_or(false))
}

/// The words by which templates know these wishes. What is not said stays the model's own habit.
fn template_args(thinking: Option<Thinking>, effort: Option<Effort>) -> Map<String, Value> {
    let thinks = thinking.map(|thinking| !matches!(thinking, Thinking::Disabled {}));
    let thinks = thinks.map(|thinks| ("enable_thinking".to_owned(), json!(thinks)));
    thinks.into_iter().chain(effort.map(|effort| ("reasoning_effort".to_owned(), json!(effort)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> Result<Chat, ApiError> {
        let Input::Chat(chat) = ask(serde_json::from_value(json).unwrap())?.input else { panic!("not a chat") };
        Ok(chat)
    }

    fn check(messages: Value, expected: Value) {
        let chat = read(json!({"model": "m", "max_tokens": 1, "messages": messages})).unwrap();
        assert_eq!(serde_json::to_value(chat.messages).unwrap(), expected);
    }

    #[test]
    fn a_turn_of_tools_becomes_calls_and_results() {
        check(
            json!([
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "look", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "sky", "input": {"city": "Rome"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                    {"type": "text", "text": "and?", "cache_control": {"type": "ephemeral"}},
                ]},
            ]),
            json!([
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "I look.", "reasoning_content": "look", "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Rome"}}},
                ]},
                {"role": "tool", "content": "sunny", "tool_call_id": "t1", "name": "sky"},
                {"role": "user", "content": "and?"},
            ]),
        );
    }

    #[test]
    fn the_system_prompt_comes_first_and_tools_have_openai_s_form() {
        let chat = read(json!({
            "model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}],
            "system": [{"type": "text", "text": "be kind"}],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true},
            "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
        }))
        .unwrap();
        assert_eq!(serde_json::to_value(&chat.messages[0]).unwrap(), json!({"role": "system", "content": "be kind"}));
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        assert_eq!(chat.tools, [json!({"type": "function", "function": function})]);
        assert_eq!((chat.tool_choice, chat.one_call_only), (answer::ToolChoice::Named("f".to_owned()), true));
        assert_eq!(Value::Object(chat.template_args), json!({"enable_thinking": false, "reasoning_effort": "low"}));
        assert_eq!(chat.turn, Turn::New);
    }

    #[test]
    fn an_answer_that_was_begun_is_continued() {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("}]);
        let chat = read(json!({"model": "m", "max_tokens": 1, "messages": messages})).unwrap();
        assert_eq!(chat.turn, Turn::Continued);
    }

    #[test]
    fn blocks_in_the_wrong_mouth_are_refused() {
        for message in [
            json!({"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}),
            json!({"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}),
            json!({"role": "system", "content": [{"type": "thinking", "thinking": "a", "signature": "b"}]}),
        ] {
            let error = read(json!({"model": "m", "max_tokens": 1, "messages": [message]})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[0].content"));
        }
        assert!(read(json!({"model": "m", "max_tokens": 1, "messages": []})).is_err());
    }

    #[test]
    fn images_and_server_tools_are_refused_by_name() {
        let image = json!({"role": "user", "content": [{"type": "image", "source": {}}]});
        let error = serde_json::from_value::<InputMessage>(image).unwrap_err().to_string();
        assert!(error.contains("`image`"), "{error}");
        let search = json!({"type": "web_search_20250305", "name": "web_search"});
        let error = serde_json::from_value::<Tool>(search).unwrap_err().to_string();
        assert!(error.contains("`web_search_20250305`"), "{error}");
    }
}
