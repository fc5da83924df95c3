//! `response_format`: the format that the output must have.

use serde::Deserialize;
use serde_json::{Map, Value};
use text::Grammar;
use utoipa::ToSchema;

use crate::error::ApiError;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResponseFormat {
    Text,
    JsonObject,
    JsonSchema { json_schema: NamedSchema },
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct NamedSchema {
    #[schema(value_type = Option<Object>)]
    pub schema: Option<Map<String, Value>>,
}

impl ResponseFormat {
    /// `None`: any text.
    pub fn grammar(self) -> Result<Option<Grammar>, ApiError> {
        match self {
            Self::Text => Ok(None),
            Self::JsonObject => Ok(Some(Grammar::JsonObject)),
            Self::JsonSchema { json_schema } => match json_schema.schema {
                Some(schema) => Ok(Some(Grammar::JsonSchema(Value::Object(schema)))),
                None => Err(ApiError::invalid("response_format.json_schema.schema", "the schema is missing")),
            },
        }
    }
}
