//! Converts a request of `/v1/messages` into a [`GenerationRequest`].

use serde_json::{Map, Value};
use text::{Grammar, ToolChoice};

use super::request::{
    InputBlock, InputMessage, MessagesCountRequest, MessagesOutputFormat, MessagesRequest, MessagesResultBlock,
    MessagesRole, MessagesTextBlock, MessagesThinking, MessagesToolChoice,
};
use super::tools;
use crate::conversation::{Conversation, Effort, Reasoning, Role, UNSEEN_IMAGE};
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
    let tools = tools::offered(request.tools.unwrap_or_default(), &request.messages)?;
    let mut conversation = Conversation::default();
    for text in request.system.into_iter().flat_map(system_texts) {
        conversation.say(Role::System, text);
    }
    for (index, message) in request.messages.into_iter().enumerate() {
        add_message(&mut conversation, message, index)?;
    }
    let (tool_choice, parallel_tool_calls) = tool_choice(request.tool_choice);
    Ok(ChatInput {
        ending: PromptEnding::continuing(&conversation),
        messages: conversation.into_messages(),
        tools,
        tool_choice,
        parallel_tool_calls,
        reasoning: reasoning(request.thinking, request.output_config.and_then(|config| config.effort)),
        template_args: Map::new(),
        truncates: false,
    })
}

fn add_message(conversation: &mut Conversation, message: InputMessage, index: usize) -> Result<(), ApiError> {
    conversation.begin(None);
    let blocks = match message.content {
        TextOrParts::Text(text) => vec![InputBlock::Text { text }],
        TextOrParts::Parts(blocks) => blocks,
    };
    let role = message.role;
    for (number, block) in blocks.into_iter().enumerate() {
        match (role, block) {
            (_, InputBlock::Text { text } | InputBlock::Compaction { content: Some(text) }) => {
                conversation.say(role.into(), text);
            }
            (_, InputBlock::SearchResult { title, content }) => {
                conversation.say(role.into(), search_result(title, content));
            }
            (MessagesRole::User, InputBlock::ToolResult { tool_use_id, content }) => {
                conversation.tool_result(Some(tool_use_id), None, result_text(content));
            }
            (MessagesRole::Assistant, InputBlock::Thinking { thinking }) => conversation.reasoning(&thinking),
            (MessagesRole::Assistant, InputBlock::ToolUse { id, name, input }) => {
                conversation.tool_call(Some(id), name, Value::Object(input));
            }
            (_, block @ (InputBlock::ToolResult { .. } | InputBlock::Thinking { .. } | InputBlock::ToolUse { .. })) => {
                let at = format!("messages[{index}].content[{number}]");
                let (kind, role) = (block.kind(), role.name());
                let message = format!("`{at}` has the type `{kind}`, which a message of role `{role}` cannot contain");
                return Err(ApiError::invalid(at, message));
            }
            // Of no use to the model.
            _ => {}
        }
    }
    Ok(())
}

impl From<MessagesRole> for Role {
    fn from(role: MessagesRole) -> Self {
        match role {
            MessagesRole::System => Self::System,
            MessagesRole::User => Self::User,
            MessagesRole::Assistant => Self::Assistant,
        }
    }
}

fn system_texts(content: TextOrParts<MessagesTextBlock>) -> Vec<String> {
    match content {
        TextOrParts::Text(text) => vec![text],
        TextOrParts::Parts(blocks) => texts(blocks).collect(),
    }
}

fn texts(blocks: Vec<MessagesTextBlock>) -> impl Iterator<Item = String> {
    blocks.into_iter().map(|MessagesTextBlock::Text { text }| text)
}

fn result_text(content: Option<TextOrParts<MessagesResultBlock>>) -> String {
    let blocks = match content {
        None => Vec::new(),
        Some(TextOrParts::Text(text)) => return text,
        Some(TextOrParts::Parts(blocks)) => blocks,
    };
    let text = |block| match block {
        MessagesResultBlock::Text { text } => Some(text),
        MessagesResultBlock::SearchResult { title, content } => Some(search_result(title, content)),
        MessagesResultBlock::ToolReference { tool_name } => Some(format!("The tool {tool_name} can be called now.")),
        MessagesResultBlock::Image {} => Some(UNSEEN_IMAGE.to_owned()),
        MessagesResultBlock::Document {} => Some("(a document, which this model cannot read)".to_owned()),
        MessagesResultBlock::BrowserState {} => None,
    };
    blocks.into_iter().filter_map(text).collect::<Vec<_>>().join("\n")
}

fn search_result(title: String, content: Vec<MessagesTextBlock>) -> String {
    std::iter::once(title).chain(texts(content)).collect::<Vec<_>>().join("\n")
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

/// An effort without `thinking` is one to think with, as in the other APIs.
fn reasoning(thinking: Option<MessagesThinking>, effort: Option<Effort>) -> Reasoning {
    match (thinking, effort) {
        (Some(MessagesThinking::Disabled {}), _) => Reasoning::Off,
        (_, Some(effort)) => effort.into(),
        (Some(_), None) => Reasoning::On(None),
        (None, None) => Reasoning::Default,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
        assert_eq!(chat.tools.definitions(), [json!({"type": "function", "function": function})]);
        assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Named("f".to_owned()), Some(false)));
        assert_eq!(chat.reasoning, Reasoning::Off);
        assert_eq!(chat.ending, PromptEnding::GenerationPrompt);
    }

    #[test]
    fn thinking_and_effort_are_how_much_to_reason() {
        let check = |fields: Value, expected: Reasoning| {
            let mut request = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]});
            request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            assert_eq!(read(request).unwrap().reasoning, expected, "{fields}");
        };
        let high = json!({"effort": "high"});
        check(json!({}), Reasoning::Default);
        check(json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), Reasoning::On(None));
        check(json!({"thinking": {"type": "adaptive"}, "output_config": high}), Effort::High.into());
        check(json!({"output_config": high}), Effort::High.into());
        check(json!({"thinking": {"type": "disabled"}, "output_config": high}), Reasoning::Off);
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
            assert_eq!(error.param.as_deref(), Some("messages[0].content[0]"));
        }
        assert!(read(json!({"model": "m", "max_tokens": 1, "messages": []})).is_err());
    }

    #[test]
    fn an_image_from_the_user_is_refused_and_one_from_a_tool_is_mentioned() {
        let image = json!({"role": "user", "content": [{"type": "image", "source": {}}]});
        assert!(serde_json::from_value::<InputMessage>(image).is_err());
        let image = json!([{"type": "text", "text": "a.png:"}, {"type": "image", "source": {}}]);
        check(
            json!([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": image}]}]),
            json!([{"role": "tool", "content": "a.png:\n(an image, which this model cannot see)", "tool_call_id": "t"}]),
        );
    }

    #[test]
    fn what_other_services_added_is_ignored() {
        check(
            json!([
                {"role": "user", "content": "news?"},
                {"role": "assistant", "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "text", "text": "none"},
                ]},
                {"role": "system", "content": [{"type": "tool_removal", "tool": {}}, {"type": "text", "text": "be brief"}]},
            ]),
            json!([
                {"role": "user", "content": "news?"},
                {"role": "assistant", "content": "none"},
                {"role": "system", "content": "be brief"},
            ]),
        );
    }
}
