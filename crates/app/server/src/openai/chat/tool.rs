//! The tools in OpenAI's format, and the tool choice.

use serde::Deserialize;
use serde_json::{Map, Value};
use text::ToolChoice;
use utoipa::ToSchema;

use crate::conversation::{ToolDefinition, Tools};
use crate::error::ApiError;

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

/// The tools as the inner form, checked.
pub fn tools(tools: Vec<ChatTool>) -> Result<Tools, ApiError> {
    let mut offered = Tools::default();
    for (index, ChatTool { r#type: ToolType::Function, function }) in tools.into_iter().enumerate() {
        let ChatFunction { name, description, parameters, strict } = function;
        let tool = ToolDefinition { name, description, parameters, strict, input: None };
        offered.add(tool, &format!("tools[{index}].function.name"))?;
    }
    Ok(offered)
}

impl From<ToolChoiceField> for ToolChoice {
    fn from(field: ToolChoiceField) -> Self {
        match field {
            ToolChoiceField::Mode(ToolMode::Auto) => Self::Auto,
            ToolChoiceField::Mode(ToolMode::None) => Self::None,
            ToolChoiceField::Mode(ToolMode::Required) => Self::Required,
            ToolChoiceField::Named(NamedTool { r#type: ToolType::Function, function }) => Self::Named(function.name),
        }
    }
}
