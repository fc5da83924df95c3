//! Tool support for models whose template has none: tools are described in the system prompt and called in Hermes' format.
//! Small models follow that format best, because most datasets of tool calls use it.

use crate::message::{Content, Message, with_parsed_arguments};
use crate::reply::CALL;
use serde_json::{Value, json};

/// The text of the system prompt that describes the tools.
pub(crate) fn tools_prompt(tools: &[Value]) -> String {
    let tools: Vec<String> = tools.iter().map(Value::to_string).collect();
    let example = written(&json!("the function's name"), &json!({"a parameter's name": "its value"}));
    format!(
        "# Tools\n\nThese functions can be called to help with the user's request. Each line describes one:\n<tools>\n{}\n</tools>\n\n\
         To call a function, write its name and its arguments as one JSON object between these tags:\n{}\n{example}\n{}\n\n\
         Several calls may follow one another. Their results come back between <tool_response> tags. Where no function \
         helps, answer in plain words.",
        tools.join("\n"),
        CALL.open,
        CALL.close,
    )
}

/// The conversation with tool calls and results as text. Consecutive results become one message, because many templates
/// require that user and assistant alternate.
pub(crate) fn with_tools_as_text(messages: &[Message]) -> Vec<Message> {
    let mut written: Vec<Message> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for message in messages {
        if message.role != "tool" {
            written.push(with_calls_as_text(message));
            after_result = false;
            continue;
        }
        let result = format!("<tool_response>\n{}\n</tool_response>", message.text());
        match written.last_mut() {
            Some(Message { content: Content::Text(results), .. }) if after_result => {
                results.push('\n');
                results.push_str(&result);
            }
            _ => written.push(Message::new("user", result)),
        }
        after_result = true;
    }
    written
}

/// With the same spaces as the grammar of tool calls.
fn written(name: &Value, arguments: &Value) -> String {
    format!("{{\"name\": {name}, \"arguments\": {arguments}}}")
}

fn with_calls_as_text(message: &Message) -> Message {
    let mut message = message.clone();
    let Some(calls) =
        message.extra.remove("tool_calls").filter(|calls| calls.as_array().is_some_and(|c| !c.is_empty()))
    else {
        return message;
    };
    let calls = with_parsed_arguments(json!({"tool_calls": calls}));
    let mut text = message.text();
    for call in calls["tool_calls"].as_array().into_iter().flatten() {
        let function = call.get("function").unwrap_or(call);
        let call = written(&function["name"], &function["arguments"]);
        let separator = if text.is_empty() { "" } else { "\n" };
        text += &format!("{separator}{}\n{call}\n{}", CALL.open, CALL.close);
    }
    message.content = Content::Text(text);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_results_become_text_and_turns_alternate() {
        let call = json!([
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]);
        let mut assistant = Message::new("assistant", "Let me see.");
        assistant.extra.insert("tool_calls".to_owned(), call);
        let result = |text: &str| Message::new("tool", text);
        let written = with_tools_as_text(&[Message::new("user", "hi"), assistant, result("1"), result("2")]);
        let want = [
            Message::new("user", "hi"),
            Message::new(
                "assistant",
                "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
            ),
            Message::new("user", "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"),
        ];
        assert_eq!(written, want);
    }

    #[test]
    fn the_introduction_shows_each_tool_on_a_line() {
        let tools = [json!({"type": "function", "function": {"name": "f"}}), json!({"name": "g"})];
        let text = tools_prompt(&tools);
        assert!(
            text.contains("<tools>\n{\"type\":\"function\",\"function\":{\"name\":\"f\"}}\n{\"name\":\"g\"}\n</tools>")
        );
    }
}
