//! The request format of `/v1/responses`.
//!
//! Unknown fields are ignored, and so are items and tools that only OpenAI's services can use. Other items and parts that are
//! not supported, such as an image from the user, are not declared here, so they are refused by name; settings that need
//! other stored state than responses must be null.

use std::borrow::Cow;

use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::tool_types::{ResponsesTool, ResponsesToolChoice};
use crate::contract;
use crate::conversation::{Effort, UNSEEN_IMAGE};
use crate::text_or_parts::TextOrParts;

/// Request of `/v1/responses`.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct ResponsesRequest {
    pub model: String,
    pub input: TextOrParts<ResponsesInputItem>,
    pub instructions: Option<String>,
    #[schema(maximum = 4_294_967_295_u32)]
    pub max_output_tokens: Option<u32>,
    /// At most 16 texts of 512 characters, with names of 64
    #[schema(value_type = Option<Object>)]
    pub metadata: Option<Map<String, Value>>,
    pub parallel_tool_calls: Option<bool>,
    pub reasoning: Option<ResponsesReasoning>,
    pub stream: Option<bool>,
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f32>,
    pub text: Option<ResponsesTextConfig>,
    pub tool_choice: Option<ResponsesToolChoice>,
    /// At most 512 that are offered, with those in namespaces
    #[schema(max_items = 512)]
    pub tools: Option<Vec<ResponsesTool>>,
    #[schema(maximum = 20)]
    pub top_logprobs: Option<u32>,
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    pub truncation: Option<ResponsesTruncation>,
    pub include: Option<Vec<String>>,
    pub user: Option<String>,
    /// Generate whether or not the client stays: poll, resume or cancel the response by its id. It has to be stored
    pub background: Option<bool>,
    #[schema(schema_with = contract::null)]
    pub conversation: Option<Value>,
    /// The conversation continues after this response, which must be stored. Its instructions do not apply any more
    pub previous_response_id: Option<String>,
    /// Whether the response is stored, for `previous_response_id`; true by default
    pub store: Option<bool>,
    #[schema(schema_with = contract::null)]
    pub prompt: Option<Value>,
}

/// One item of the conversation. The `type` of a message is optional.
#[derive(Clone, Debug)]
pub struct ResponsesInputItem {
    /// The id that the client knows the item by, if it is a string.
    pub id: Option<String>,
    pub item: InputItem,
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum InputItem {
    Message {
        role: ResponsesRole,
        content: TextOrParts<ResponsesInputPart>,
    },
    FunctionCall {
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        arguments: String,
    },
    FunctionCallOutput {
        call_id: String,
        output: TextOrParts<ResponsesOutputPart>,
    },
    CustomToolCall {
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        input: String,
    },
    CustomToolCallOutput {
        call_id: String,
        output: TextOrParts<ResponsesOutputPart>,
    },
    LocalShellCall {
        call_id: String,
        action: ResponsesShellAction,
    },
    /// The result of the call with this id.
    LocalShellCallOutput {
        #[serde(skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        call_id: Option<String>,
        output: String,
    },
    Reasoning {
        content: Option<Vec<ResponsesReasoningPart>>,
    },
    /// Calls and results of tools that another service ran. They are ignored, as are the next ones.
    WebSearchCall {},
    FileSearchCall {},
    CodeInterpreterCall {},
    ImageGenerationCall {},
    ComputerCall {},
    ComputerCallOutput {},
    McpListTools {},
    McpCall {},
    McpApprovalRequest {},
    McpApprovalResponse {},
    ToolSearchCall {},
    ToolSearchOutput {},
    Compaction {},
    CompactionTrigger {},
    ContextCompaction {},
}

/// A command for the shell of the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesShellAction {
    Exec {
        command: Vec<String>,
        #[serde(default)]
        #[schema(value_type = Option<Object>)]
        env: Option<Map<String, Value>>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        working_directory: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(minimum = 0)]
        timeout_ms: Option<f64>,
    },
}

impl<'de> Deserialize<'de> for ResponsesInputItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut item = Map::deserialize(deserializer)?;
        item.entry("type").or_insert_with(|| json!("message"));
        let id = item.get("id").and_then(Value::as_str).map(str::to_owned);
        let item = serde_path_to_error::deserialize(Value::Object(item)).map_err(|error| {
            let path = error.path().to_string();
            D::Error::custom(if path == "." { error.into_inner().to_string() } else { error.to_string() })
        })?;
        Ok(Self { id, item })
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

/// What a tool returned. The model is told that there is an image or a file, but not what it contains.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesOutputPart {
    InputText { text: String },
    OutputText { text: String },
    InputImage {},
    InputFile {},
}

impl ResponsesOutputPart {
    pub fn text(&self) -> &str {
        match self {
            Self::InputText { text } | Self::OutputText { text } => text,
            Self::InputImage {} => UNSEEN_IMAGE,
            Self::InputFile {} => "(a file, which this model cannot read)",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponsesReasoningPart {
    ReasoningText { text: String },
    Text { text: String },
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
    pub effort: Option<Effort>,
}

/// What to do with a conversation that is too long: refuse it, or leave out its oldest turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResponsesTruncation {
    Disabled,
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_need_not_say_that_it_is_one() {
        let ResponsesInputItem { item, .. } = serde_json::from_value(json!({"role": "user", "content": "hi"})).unwrap();
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
    }
}
