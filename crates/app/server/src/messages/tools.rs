//! The tools of a request of `/v1/messages`: which of them the model is offered, and in which form.

use std::collections::HashSet;

use super::request::{InputBlock, InputMessage, MessagesResultBlock, MessagesTool};
use crate::conversation::{ToolDefinition, Tools};
use crate::error::ApiError;
use crate::hosted_tools::HostedTools;
use crate::text_or_parts::TextOrParts;

/// The tools that the client runs. A tool with `defer_loading` is offered once the conversation refers to
/// it. Tools that need Anthropic's services are left out.
pub fn offered(tools: Vec<MessagesTool>, messages: &[InputMessage]) -> Result<Tools, ApiError> {
    let loaded = loaded(messages);
    let (mut offered, mut hosted) = (Tools::default(), HostedTools::default());
    for (index, tool) in tools.into_iter().enumerate() {
        if let Some(kind) = tool.kind.as_deref().filter(|kind| *kind != "custom") {
            hosted.add(kind);
            continue;
        }
        let missing = |field: &str| ApiError::missing(format!("tools[{index}].{field}"));
        let name = tool.name.ok_or_else(|| missing("name"))?;
        let schema = tool.input_schema.ok_or_else(|| missing("input_schema"))?;
        if tool.defer_loading == Some(true) && !loaded.contains(name.as_str()) {
            continue;
        }
        let (description, parameters) = (tool.description, Some(schema));
        let tool = ToolDefinition { name, description, parameters, strict: None, input: None };
        offered.add(tool, &format!("tools[{index}].name"))?;
    }
    hosted.log();
    Ok(offered)
}

/// The names of the tools that the conversation refers to.
fn loaded(messages: &[InputMessage]) -> HashSet<&str> {
    let mut names = HashSet::new();
    for message in messages {
        let TextOrParts::Parts(blocks) = &message.content else { continue };
        for block in blocks {
            match block {
                InputBlock::ToolAddition { tool } => names.extend(tool.name.as_deref()),
                InputBlock::ToolResult { content: Some(TextOrParts::Parts(blocks)), .. } => {
                    names.extend(blocks.iter().filter_map(|block| match block {
                        MessagesResultBlock::ToolReference { tool_name } => Some(tool_name.as_str()),
                        _ => None,
                    }));
                }
                _ => {}
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn names(tools: Value, messages: Value) -> Result<Vec<String>, ApiError> {
        let messages: Vec<InputMessage> = serde_json::from_value(messages).unwrap();
        let offered = offered(serde_json::from_value(tools).unwrap(), &messages)?;
        Ok(offered.definitions().iter().map(|tool| tool["function"]["name"].as_str().unwrap().to_owned()).collect())
    }

    fn tools() -> Value {
        let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
        let deferred = |name: &str| json!({"name": name, "input_schema": {"type": "object"}, "defer_loading": true});
        json!([{"type": "web_search_20250305", "name": "web_search"}, tool("a"), deferred("b"), deferred("c")])
    }

    #[test]
    fn tools_of_other_services_and_deferred_ones_are_left_out() {
        assert_eq!(names(tools(), json!([])).unwrap(), ["a"]);
    }

    #[test]
    fn a_deferred_tool_is_offered_once_it_was_found_or_added() {
        let found = json!({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "b"}]});
        let added = json!({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "c"}});
        let messages = json!([{"role": "user", "content": [found]}, {"role": "system", "content": [added]}]);
        assert_eq!(names(tools(), messages).unwrap(), ["a", "b", "c"]);
    }

    #[test]
    fn a_tool_of_the_client_needs_a_name_and_a_schema() {
        let param = |tool: Value| names(json!([tool]), json!([])).unwrap_err().param.unwrap();
        assert_eq!(param(json!({"input_schema": {}})), "tools[0].name");
        assert_eq!(param(json!({"type": "custom", "name": "a"})), "tools[0].input_schema");
        assert_eq!(param(json!({"name": "a b", "input_schema": {}})), "tools[0].name");
    }

    #[test]
    fn two_tools_with_one_name_are_refused() {
        let tool = json!({"name": "a", "input_schema": {}});
        assert_eq!(names(json!([tool, tool]), json!([])).unwrap_err().param.as_deref(), Some("tools[1].name"));
    }
}
