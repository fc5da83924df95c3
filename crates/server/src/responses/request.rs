//! The request format of `/v1/responses`.
//!
//! Unknown fields are ignored. Items, parts and tools that are not supported are not declared here, so they are refused by
//! name; settings that need stored state must be null.

use std::borrow::Cow;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::contract;
use crate::text_or_parts::TextOrParts;

/// Request of `/v1/responses`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponsesRequest {
    pub model: String,
    pub input: TextOrParts<ResponsesInputItem>,
    pub instructions: Option<String>,
    #[schema(maximum = 4_294_967_295_u32)]
    pub max_output_tokens: Option<u32>,
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Option<ResponsesReasoning>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 1000)]
    pub temperature: Option<f32>,
    pub text: Option<ResponsesTextConfig>,
    pub tool_choice: Option<ResponsesToolChoice>,
    pub tools: Option<Vec<ResponsesTool>>,
    #[schema(maximum = 20)]
    pub top_logprobs: Option<u32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    pub truncation: Option<ResponsesTruncation>,
    pub include: Option<Vec<String>>,
    pub user: Option<String>,
    #[schema(schema_with = contract::never)]
    pub background: Option<Value>,
    #[schema(schema_with = contract::null)]
    pub conversation: Option<Value>,
    #[schema(schema_with = contract::null)]
    pub previous_response_id: Option<Value>,
    #[schema(schema_with = contract::null)]
    pub prompt: Option<Value>,
}

/// One item of the conversation. The `type` of a message is optional.
#[derive(Clone, Debug)]
pub struct ResponsesInputItem(pub InputItem);

#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputItem {
    Message { role: ResponsesRole, content: TextOrParts<ResponsesInputPart> },
    FunctionCall { call_id: String, name: String, arguments: String },
    FunctionCallOutput { call_id: String, output: TextOrParts<ResponsesInputPart> },
    Reasoning { content: Option<Vec<ResponsesReasoningPart>> },
}

impl<'de> Deserialize<'de> for ResponsesInputItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut item = Map::deserialize(deserializer)?;
        item.entry("type").or_insert_with(|| json!("message"));
        let item = serde_path_to_error::deserialize(Value::Object(item)).map_err(|error| {
            let path = error.path().to_string();
            D::Error::custom(if path == "." { error.into_inner().to_string() } else { error.to_string() })
        })?;
        Ok(Self(item))
    }
}

impl PartialSchema for ResponsesInputItem {
    fn schema() -> RefOr<Schema> {
        let mut schema = InputItem::schema();
        if let RefOr::T(Schema::OneOf(kinds)) = &mut schema
            && let Some(RefOr::T(Schema::Object(message))) = kinds.items.first_mut()
        {
            message.required.retain(|name| name != "type");
        }
        schema
    }
}

impl ToSchema for ResponsesInputItem {
    fn name() -> Cow<'static, str> {
        "ResponsesInputItem".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        InputItem::schemas(schemas);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesRole {
    User,
    Assistant,
    System,
    Developer,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesInputPart {
    InputText { text: String },
    OutputText { text: String },
    Refusal { refusal: String },
}

impl ResponsesInputPart {
    pub fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text } | Self::Refusal { refusal: text } => text,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesReasoningPart {
    ReasoningText { text: String },
}

/// A function that the client runs. Tools that OpenAI runs are refused.
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
    /// The mode applies to these tools only; all others are ignored.
    AllowedTools {
        mode: ResponsesToolMode,
        tools: Vec<ResponsesAllowedTool>,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesAllowedTool {
    Function { name: String },
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

#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ResponsesTextConfig {
    pub format: Option<ResponsesTextFormat>,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesTextFormat {
    Text {},
    JsonObject {},
    JsonSchema {
        name: String,
        #[schema(value_type = Object)]
        schema: Map<String, Value>,
        #[serde(default)]
        description: Option<String>,
        #[serde(default)]
        strict: Option<bool>,
    },
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ResponsesReasoning {
    pub effort: Option<ResponsesEffort>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesEffort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// What to do with a conversation that is too long. Only `disabled` is supported: it is refused, never truncated.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesTruncation {
    Disabled,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_need_not_say_that_it_is_one() {
        let ResponsesInputItem(item) = serde_json::from_value(json!({"role": "user", "content": "hi"})).unwrap();
        assert!(matches!(item, InputItem::Message { role: ResponsesRole::User, content: TextOrParts::Text(_) }));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        let refused = [
            json!({"type": "item_reference", "id": "x"}),
            json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
        ];
        for (item, name) in refused.into_iter().zip(["item_reference", "input_image"]) {
            let error = serde_json::from_value::<ResponsesInputItem>(item).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        let error = serde_json::from_value::<ResponsesTool>(json!({"type": "web_search"})).unwrap_err().to_string();
        assert!(error.contains("web_search"), "{error}");
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
