//! The request bodies of `/api/chat` and `/api/generate`.
//!
//! Unknown fields and options are ignored: those that tune Ollama's own runner mean nothing here.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use crate::conversation::Effort;
use crate::openai::ChatTool;

/// A conversation to continue. Without messages, the reply says that the model is loaded.
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaChatRequest {
    /// Model name, with or without `:latest`
    pub model: String,
    #[schema(max_items = 8192)]
    pub messages: Option<Vec<OllamaMessage>>,
    #[schema(max_items = 512)]
    pub tools: Option<Vec<ChatTool>>,
    /// False: one reply instead of a stream
    pub stream: Option<bool>,
    pub format: Option<OllamaFormat>,
    pub think: Option<OllamaThink>,
    pub options: Option<OllamaOptions>,
    pub keep_alive: Option<OllamaKeepAlive>,
    /// Leave out the oldest turns of a conversation that does not fit the context; true by default
    pub truncate: Option<bool>,
    /// Return the log probability of each output token
    pub logprobs: Option<bool>,
    /// Also return the log probabilities of this many most probable tokens at each position
    #[schema(maximum = 20)]
    pub top_logprobs: Option<usize>,
}

/// A prompt to answer. Without one, the reply says that the model is loaded.
#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaGenerateRequest {
    /// Model name, with or without `:latest`
    pub model: String,
    pub prompt: Option<String>,
    /// System prompt
    pub system: Option<String>,
    /// Continue the prompt as it is, without the chat template
    pub raw: Option<bool>,
    /// `context` of an earlier reply, which this request continues
    pub context: Option<Vec<u32>>,
    /// False: one reply instead of a stream
    pub stream: Option<bool>,
    pub format: Option<OllamaFormat>,
    pub think: Option<OllamaThink>,
    pub options: Option<OllamaOptions>,
    pub keep_alive: Option<OllamaKeepAlive>,
    /// Return the log probability of each output token
    pub logprobs: Option<bool>,
    /// Also return the log probabilities of this many most probable tokens at each position
    #[schema(maximum = 20)]
    pub top_logprobs: Option<usize>,
    /// Not supported: refused unless empty
    pub suffix: Option<String>,
    /// Not supported: refused unless empty
    pub template: Option<String>,
    /// Not supported: refused unless empty
    pub images: Option<Vec<Value>>,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaMessage {
    pub role: OllamaRole,
    pub content: Option<String>,
    /// Reasoning of the assistant
    pub thinking: Option<String>,
    /// Tool calls that the assistant made
    pub tool_calls: Option<Vec<OllamaToolCallInput>>,
    /// The tool whose result this is
    pub tool_name: Option<String>,
    /// The tool call that this is the result of; by default the oldest one of this tool without a result
    pub tool_call_id: Option<String>,
    /// Not supported: refused unless empty
    pub images: Option<Vec<Value>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum OllamaRole {
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaToolCallInput {
    pub id: Option<String>,
    pub function: OllamaFunctionInput,
}

#[derive(Debug, Deserialize, ToSchema)]
pub struct OllamaFunctionInput {
    pub name: String,
    #[schema(value_type = Option<Object>)]
    pub arguments: Option<Map<String, Value>>,
}

/// The format of the answer: `json` for any JSON object, or a JSON schema
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected `json` or a JSON schema")]
pub enum OllamaFormat {
    Keyword(OllamaFormatKeyword),
    Schema(OllamaSchema),
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub enum OllamaFormatKeyword {
    #[serde(rename = "json")]
    Json,
    #[serde(rename = "")]
    Text,
}

// Not derived: utoipa ignores empty names.
impl PartialSchema for OllamaFormatKeyword {
    fn schema() -> RefOr<Schema> {
        let words = ObjectBuilder::new().schema_type(Type::String).enum_values(Some(["json", ""]));
        words.description(Some("Empty: any text")).into()
    }
}

impl ToSchema for OllamaFormatKeyword {}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(value_type = Object)]
pub struct OllamaSchema(pub Map<String, Value>);

/// Whether the model reasons before it answers, or how much
#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected true, false, low, medium, high or max")]
pub enum OllamaThink {
    Switch(bool),
    Level(Effort),
}

/// Seconds, or a duration such as `5m`. The model stays loaded in any case.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected seconds or a duration such as `5m`")]
pub enum OllamaKeepAlive {
    Seconds(f64),
    Text(String),
}

/// Sampling settings. Absent ones have the model's defaults. Others that Ollama knows, such as `num_ctx`, are ignored.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct OllamaOptions {
    /// Sampling temperature; 0 is greedy
    #[schema(minimum = 0, maximum = 1000)]
    pub temperature: Option<f32>,
    /// Sample from this many of the most probable tokens; 0 or less is off
    #[schema(minimum = -9_223_372_036_854_775_808_i64, maximum = 9_223_372_036_854_775_807_i64)]
    pub top_k: Option<i64>,
    /// Sample from the most probable tokens that together have this probability
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    /// Sample from tokens with at least this fraction of the highest probability
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// The same seed and request give the same output; -1 is a random one
    #[schema(minimum = -9_223_372_036_854_775_808_i64, maximum = 9_223_372_036_854_775_807_i64)]
    pub seed: Option<i64>,
    /// Maximum tokens of the output; -1 and -2 are as many as fit the context
    #[schema(minimum = -9_223_372_036_854_775_808_i64, maximum = 9_223_372_036_854_775_807_i64)]
    pub num_predict: Option<i64>,
    /// Stop strings: the output ends before them
    pub stop: Option<Vec<String>>,
    /// Divides the logits of tokens that occurred in the prompt or the output; 1 is off
    #[schema(exclusive_minimum = 0, maximum = 1000)]
    pub repeat_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that occurred in the output
    #[schema(minimum = -1000, maximum = 1000)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit once for each occurrence in the output
    #[schema(minimum = -1000, maximum = 1000)]
    pub frequency_penalty: Option<f32>,
}

impl OllamaKeepAlive {
    /// The seconds; negative: for ever. `None` if the duration cannot be read.
    pub fn seconds(&self) -> Option<f64> {
        match self {
            Self::Seconds(seconds) => Some(*seconds).filter(|seconds| seconds.is_finite()),
            Self::Text(text) => seconds(text),
        }
    }
}

/// Reads a duration of Go: `0`, or numbers with units, such as `1h30m` or `-1.5s`.
fn seconds(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 8] =
        [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("μs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    let mut rest = text.strip_prefix(['+', '-']).unwrap_or(text);
    let sign = if text.starts_with('-') { -1.0 } else { 1.0 };
    if rest == "0" {
        return Some(0.0);
    }
    let mut total = None;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, unit) = rest.split_at(end);
        let end = unit.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(unit.len());
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == &unit[..end])?;
        total = Some(total.unwrap_or(0.0) + number.parse::<f64>().ok()? * factor);
        rest = &unit[end..];
    }
    total.map(|total| sign * total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_those_of_go() {
        for (text, expected) in [
            ("0", Some(0.0)),
            ("0s", Some(0.0)),
            ("0h0m0.0s", Some(0.0)),
            ("5m", Some(300.0)),
            ("-1s", Some(-1.0)),
            ("1h30m", Some(5400.0)),
            ("1.5s", Some(1.5)),
            ("", None),
            ("-", None),
            ("5", None),
            ("m", None),
            ("5 minutes", None),
            ("1.2.3s", None),
        ] {
            assert_eq!(seconds(text), expected, "{text:?}");
        }
    }
}
