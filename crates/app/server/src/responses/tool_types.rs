//! The format of tools and of the tool choice in requests and responses of `/v1/responses`.

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Functions, custom tools and the shell are run by the client. Tools that OpenAI runs are left out.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesTool {
    Function {
        name: String,
        #[serde(default)]
        description: Option<String>,
        #[serde(default)]
        #[schema(value_type = Option<Object>)]
        parameters: Option<Map<String, Value>>,
        #[serde(default)]
        strict: Option<bool>,
    },
    /// A tool whose input is a text.
    Custom {
        name: String,
        #[serde(default)]
        description: Option<String>,
        #[serde(default)]
        format: Option<ResponsesCustomFormat>,
    },
    /// Tools that the model sees as `namespace.tool`.
    Namespace {
        name: String,
        #[serde(default)]
        description: Option<String>,
        #[schema(no_recursion, max_items = 512)]
        tools: Vec<ResponsesTool>,
    },
    LocalShell {},
    /// Left out, as are the next ones.
    WebSearch {},
    #[serde(rename = "web_search_2025_08_26")]
    WebSearch20250826 {},
    WebSearchPreview {},
    #[serde(rename = "web_search_preview_2025_03_11")]
    WebSearchPreview20250311 {},
    FileSearch {},
    CodeInterpreter {},
    ImageGeneration {},
    Computer {},
    ComputerUsePreview {},
    Mcp {},
    Shell {},
    ApplyPatch {},
    ToolSearch {},
}

/// What the input of a custom tool may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesCustomFormat {
    Text {},
    Grammar { syntax: ResponsesGrammarSyntax, definition: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesGrammarSyntax {
    Lark,
    Regex,
}

#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ResponsesToolChoice {
    Mode(ResponsesToolMode),
    Named(ResponsesNamedChoice),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesToolMode {
    None,
    Auto,
    Required,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesNamedChoice {
    Function {
        name: String,
    },
    Custom {
        name: String,
    },
    /// The mode applies to these tools only; all others are ignored.
    AllowedTools {
        mode: ResponsesToolMode,
        #[schema(max_items = 512)]
        tools: Vec<ResponsesAllowedTool>,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesAllowedTool {
    Function { name: String },
    Custom { name: String },
}

impl ResponsesAllowedTool {
    pub fn name(&self) -> &str {
        match self {
            Self::Function { name } | Self::Custom { name } => name,
        }
    }
}

impl<'de> Deserialize<'de> for ResponsesToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let choice = Value::deserialize(deserializer)?;
        let read = if choice.is_object() {
            ResponsesNamedChoice::deserialize(choice).map(Self::Named)
        } else {
            ResponsesToolMode::deserialize(choice).map(Self::Mode)
        };
        read.map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_unknown_tool_is_refused_by_name() {
        let error = serde_json::from_value::<ResponsesTool>(json!({"type": "teleport"})).unwrap_err().to_string();
        assert!(error.contains("teleport"), "{error}");
    }

    #[test]
    fn a_tool_choice_is_a_word_or_names_tools() {
        let read = |value| serde_json::from_value::<ResponsesToolChoice>(value);
        assert!(matches!(read(json!("required")), Ok(ResponsesToolChoice::Mode(ResponsesToolMode::Required))));
        let named = read(json!({"type": "function", "name": "f"}));
        assert!(matches!(named, Ok(ResponsesToolChoice::Named(ResponsesNamedChoice::Function { .. }))));
        assert!(read(json!("sometimes")).unwrap_err().to_string().contains("sometimes"));
        assert!(read(json!(7)).is_err());
    }
}
