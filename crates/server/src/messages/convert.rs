//! Converts a request of `/v1/messages` into a [`GenerationRequest`].

use serde_json::{Map, Value, json};
use text::{Grammar, ToolChoice};

use super::request::{
    InputBlock, InputMessage, MessagesCountRequest, MessagesEffort, MessagesOutputFormat, MessagesRequest,
    MessagesRole, MessagesTextBlock, MessagesThinking, MessagesTool, MessagesToolChoice, MessagesToolKind,
};
use crate::conversation::ConversationBuilder;
use crate::error::ApiError;
use crate::generation::{ChatInput, GenerationInput, GenerationRequest, PromptEnding, SamplingOverrides};
use crate::text_or_parts::TextOrParts;

pub fn generation_request(request: MessagesRequest) -> Result<GenerationRequest, ApiError> {
    let sampling = SamplingOverrides {
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k.map(|top_k| top_k as usize),
        ..SamplingOverrides::default()
    };
    let format = request.output_config.as_ref().and_then(|config| config.format.clone());
    let grammar = format.map(|MessagesOutputFormat::JsonSchema { schema }| Grammar::JsonSchema(Value::Object(schema)));
    let (tokens_max, stop) = (request.max_tokens as usize, request.stop_sequences.clone().unwrap_or_default());
    Ok(GenerationRequest {
        sampling,
        grammar,
        stop,
        tokens_max: Some(tokens_max),
        ..GenerationRequest::new(GenerationInput::Chat(chat_input(request)?))
    })
}

/// The conversation whose tokens `/v1/messages/count_tokens` counts.
pub fn count_input(request: MessagesCountRequest) -> Result<ChatInput, ApiError> {
    chat_input(request.into())
}

fn chat_input(request: MessagesRequest) -> Result<ChatInput, ApiError> {
    if request.messages.is_empty() {
        return Err(ApiError::invalid("messages", "there must be at least one message"));
    }
    let mut conversation = ConversationBuilder::default();
    for text in request.system.into_iter().flat_map(texts) {
        conversation.system(text);
    }
    for (index, message) in request.messages.into_iter().enumerate() {
        add_message(&mut conversation, message, index)?;
    }
    let (tool_choice, parallel_tool_calls) = tool_choice(request.tool_choice);
    let ending = if conversation.ends_with_assistant() {
        PromptEnding::ContinueFinalMessage
    } else {
        PromptEnding::GenerationPrompt
    };
    Ok(ChatInput {
        messages: conversation.into_messages(),
        tools: request.tools.into_iter().flatten().map(tool).collect(),
        tool_choice,
        parallel_tool_calls,
        template_args: template_args(request.thinking, request.output_config.and_then(|config| config.effort)),
        ending,
    })
}

fn add_message(conversation: &mut ConversationBuilder, message: InputMessage, index: usize) -> Result<(), ApiError> {
    let blocks = match message.content {
        TextOrParts::Text(text) => vec![InputBlock::Text { text }],
        TextOrParts::Parts(blocks) => blocks,
    };
    for block in blocks {
        match (message.role, block) {
            (MessagesRole::System, InputBlock::Text { text }) => conversation.system(text),
            (MessagesRole::User, InputBlock::Text { text }) => conversation.user(text),
            (MessagesRole::User, InputBlock::ToolResult { tool_use_id, content }) => {
                let content: Vec<_> = content.into_iter().flat_map(texts).collect();
                conversation.tool_result(&tool_use_id, content.join("\n"));
            }
            (MessagesRole::Assistant, InputBlock::Text { text }) => conversation.assistant(text),
            (MessagesRole::Assistant, InputBlock::Thinking { thinking }) => conversation.reasoning(&thinking),
            (MessagesRole::Assistant, InputBlock::RedactedThinking { .. }) => {}
            (MessagesRole::Assistant, InputBlock::ToolUse { id, name, input }) => {
                conversation.tool_call(&id, &name, Value::Object(input));
            }
            (role, _) => {
                let param = format!("messages[{index}].content");
                return Err(ApiError::invalid(param, format!("a message of {role:?} may not hold this kind of block")));
            }
        }
    }
    Ok(())
}

fn texts(content: TextOrParts<MessagesTextBlock>) -> Vec<String> {
    match content {
        TextOrParts::Text(text) => vec![text],
        TextOrParts::Parts(blocks) => blocks.into_iter().map(|MessagesTextBlock::Text { text }| text).collect(),
    }
}

fn tool(tool: MessagesTool) -> Value {
    let MessagesTool { kind: None | Some(MessagesToolKind::Custom), name, description, input_schema } = tool;
    let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
    function.extend(description.map(|description| ("description".to_owned(), json!(description))));
    function.insert("parameters".to_owned(), Value::Object(input_schema));
    json!({"type": "function", "function": function})
}

/// The tool choice, and whether several calls are allowed.
fn tool_choice(choice: Option<MessagesToolChoice>) -> (ToolChoice, Option<bool>) {
    let (choice, disable_parallel) = match choice {
        None => (ToolChoice::Auto, None),
        Some(MessagesToolChoice::Auto { disable_parallel_tool_use }) => (ToolChoice::Auto, disable_parallel_tool_use),
        Some(MessagesToolChoice::Any { disable_parallel_tool_use }) => {
            (ToolChoice::Required, disable_parallel_tool_use)
        }
        Some(MessagesToolChoice::Tool { name, disable_parallel_tool_use }) => {
            (ToolChoice::Named(name), disable_parallel_tool_use)
        }
        Some(MessagesToolChoice::None {}) => (ToolChoice::None, None),
    };
    (choice, disable_parallel.map(|disable| !disable))
}

/// The template variables for these settings. Absent settings keep the template's default.
fn template_args(thinking: Option<MessagesThinking>, effort: Option<MessagesEffort>) -> Map<String, Value> {
    let thinks = thinking.map(|thinking| !matches!(thinking, MessagesThinking::Disabled {}));
    let thinks = thinks.map(|thinks| ("enable_thinking".to_owned(), json!(thinks)));
    thinks.into_iter().chain(effort.map(|effort| ("reasoning_effort".to_owned(), json!(effort)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Value) -> Result<ChatInput, ApiError> {
        let GenerationInput::Chat(chat) = generation_request(serde_json::from_value(json).unwrap())?.input else {
            panic!("not a chat")
        };
        Ok(chat)
    }

    fn check(messages: Value, expected: Value) {
        let chat = read(json!({"model": "m", "max_tokens": 1, "messages": messages})).unwrap();
        assert_eq!(serde_json::to_value(chat.messages).unwrap(), expected);
    }

    #[test]
    fn tool_blocks_become_calls_and_results() {
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
        assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Named("f".to_owned()), Some(false)));
        assert_eq!(Value::Object(chat.template_args), json!({"enable_thinking": false, "reasoning_effort": "low"}));
        assert_eq!(chat.ending, PromptEnding::GenerationPrompt);
    }

    #[test]
    fn a_final_assistant_message_is_continued() {
        let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("}]);
        let chat = read(json!({"model": "m", "max_tokens": 1, "messages": messages})).unwrap();
        assert_eq!(chat.ending, PromptEnding::ContinueFinalMessage);
    }

    #[test]
    fn blocks_that_do_not_fit_the_role_are_refused() {
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
        let error = serde_json::from_value::<MessagesTool>(search).unwrap_err().to_string();
        assert!(error.contains("`web_search_20250305`"), "{error}");
    }
}
