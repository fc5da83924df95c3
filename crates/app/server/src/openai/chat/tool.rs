//! The tools in OpenAI's format, and the tool choice.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use text::ToolChoice;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::tool_names::ToolNames;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = Tool)]
pub struct ChatTool {
    /// Always `function`
    pub r#type: ToolType,
    pub function: ChatFunction,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolType {
    Function,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = Function)]
pub struct ChatFunction {
    #[schema(min_length = 1, max_length = 256)]
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of the arguments
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Map<String, Value>>,
    /// Arguments always follow the schema if a call is forced; otherwise the model is not constrained
    pub strict: Option<bool>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected none, auto, required, or a function by its name")]
pub enum ToolChoiceField {
    Mode(ToolMode),
    Named(NamedTool),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolMode {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct NamedTool {
    pub r#type: ToolType,
    pub function: NamedFunction,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct NamedFunction {
    pub name: String,
}

/// Checks the tools and converts them to the internal format.
pub fn tools(tools: Vec<ChatTool>) -> Result<Vec<Value>, ApiError> {
    let mut names = ToolNames::default();
    let check = |(index, ChatTool { r#type: ToolType::Function, function }): (usize, ChatTool)| {
        let ChatFunction { name, description, parameters, strict } = function;
        names.add(&name, &format!("tools[{index}].function.name"))?;
        let mut function = Map::from_iter([("name".to_owned(), Value::from(name))]);
        function.extend(description.map(|text| ("description".to_owned(), Value::from(text))));
        function.extend(parameters.map(|schema| ("parameters".to_owned(), Value::from(schema))));
        function.extend(strict.map(|strict| ("strict".to_owned(), Value::from(strict))));
        Ok(json!({"type": "function", "function": function}))
    };
    tools.into_iter().enumerate().map(check).collect()
}

/// The tool choice. A named tool must exist.
pub fn tool_choice(field: Option<ToolChoiceField>, tools: &[Value]) -> Result<ToolChoice, ApiError> {
    let choice = match field {
        None | Some(ToolChoiceField::Mode(ToolMode::Auto)) => ToolChoice::Auto,
        Some(ToolChoiceField::Mode(ToolMode::None)) => ToolChoice::None,
        Some(ToolChoiceField::Mode(ToolMode::Required)) => ToolChoice::Required,
        Some(ToolChoiceField::Named(NamedTool { r#type: ToolType::Function, function })) => {
            ToolChoice::Named(function.name)
        }
    };
    match &choice {
        ToolChoice::Required if tools.is_empty() => {
            Err(ApiError::invalid("tool_choice", "there are no tools to choose from"))
        }
        ToolChoice::Named(name) if !tools.iter().any(|tool| tool["function"]["name"] == **name) => {
            Err(ApiError::invalid("tool_choice", format!("there is no tool with the name `{name}`")))
        }
        _ => Ok(choice),
    }
}
