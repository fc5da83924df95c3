//! The fields that chat completions and completions share, with OpenAI's names, or vLLM's for extensions.

use serde::Deserialize;
use serde_json::{Map, Value};
use text::Grammar;
use types::TokenId;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::generation::{GenerationRequest, SamplingOverrides};
use crate::json_body;

/// Declares a request: its own fields, then the fields that both APIs share. `serde(flatten)` would accept the same JSON,
/// but its errors do not name the wrong field.
macro_rules! generation_request {
    ($(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        pub struct $name {
            $($own)*

            /// Model name; the served model by default
            pub model: Option<String>,
            /// Number of choices for each prompt
            #[schema(minimum = 1, maximum = 128)]
            pub n: Option<usize>,
            /// Sampling temperature; 0 is greedy
            #[schema(minimum = 0, maximum = 2)]
            pub temperature: Option<f32>,
            /// Sample from the most probable tokens that together have this probability
            #[schema(exclusive_minimum = 0, maximum = 1)]
            pub top_p: Option<f32>,
            /// Sample from this many of the most probable tokens; 0 or less is off
            #[schema(minimum = -9_223_372_036_854_775_808_i64, maximum = 9_223_372_036_854_775_807_i64)]
            pub top_k: Option<i64>,
            /// Sample from tokens with at least this fraction of the highest probability
            #[schema(minimum = 0, maximum = 1)]
            pub min_p: Option<f32>,
            /// Divides the logits of tokens that occurred in the prompt or the output; 1 is off
            #[schema(exclusive_minimum = 0, maximum = 1000)]
            pub repetition_penalty: Option<f32>,
            /// Subtracted from the logits of tokens that occurred in the output
            #[schema(minimum = -1000, maximum = 1000)]
            pub presence_penalty: Option<f32>,
            /// Subtracted from a token's logit once for each occurrence in the output
            #[schema(minimum = -1000, maximum = 1000)]
            pub frequency_penalty: Option<f32>,
            /// Added to the logits of tokens, by token id
            #[schema(value_type = Option<std::collections::HashMap<String, f32>>)]
            pub logit_bias: Option<serde_json::Map<String, serde_json::Value>>,
            /// The same seed and request give the same output
            #[schema(minimum = -9_223_372_036_854_775_808_i64, maximum = 9_223_372_036_854_775_807_i64)]
            pub seed: Option<i64>,
            /// Stop strings: the output ends before them
            pub stop: Option<$crate::openai::common_fields::StopField>,
            /// Tokens that end the output
            pub stop_token_ids: Option<Vec<u32>>,
            /// Do not stop at end-of-sequence tokens
            pub ignore_eos: Option<bool>,
            /// Minimum tokens of the output
            #[schema(maximum = 4_294_967_295_u32)]
            pub min_tokens: Option<u32>,
            /// Whether special tokens such as `<|im_end|>` are left out of the text; true by default
            pub skip_special_tokens: Option<bool>,
            /// Send the output as server-sent events
            pub stream: Option<bool>,
            pub stream_options: Option<$crate::openai::common_fields::StreamOptions>,
            /// Constraint on the output, in vLLM's format
            pub structured_outputs: Option<$crate::openai::common_fields::StructuredOutputs>,
            pub guided_json: Option<serde_json::Value>,
            pub guided_regex: Option<String>,
            pub guided_choice: Option<Vec<String>>,
            pub guided_grammar: Option<String>,
        }

        impl $name {
            /// Moves the shared fields into the internal format.
            fn apply_common_fields(&mut self, request: &mut $crate::generation::GenerationRequest) -> Result<(), $crate::error::ApiError> {
                $crate::openai::common_fields::CommonFields {
                    n: self.n,
                    sampling: $crate::generation::SamplingOverrides {
                        temperature: self.temperature,
                        top_p: self.top_p,
                        top_k: self.top_k.map(|k| usize::try_from(k).unwrap_or(0)),
                        min_p: self.min_p,
                        repetition_penalty: self.repetition_penalty,
                        presence_penalty: self.presence_penalty,
                        frequency_penalty: self.frequency_penalty,
                        logit_bias: Vec::new(),
                        seed: self.seed.map(i64::cast_unsigned),
                    },
                    logit_bias: self.logit_bias.take(),
                    stop: self.stop.take(),
                    stop_token_ids: self.stop_token_ids.take(),
                    ignore_eos: self.ignore_eos,
                    min_tokens: self.min_tokens,
                    skip_special_tokens: self.skip_special_tokens,
                    structured: $crate::openai::common_fields::StructuredOutputs::grammar(
                        self.structured_outputs.take(),
                        self.guided_json.take(),
                        self.guided_regex.take(),
                        self.guided_choice.take(),
                        self.guided_grammar.take(),
                    )?,
                }
                .apply(request)
            }
        }
    };
}
pub(super) use generation_request;

/// One string, or several.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
#[schema(as = Stop)]
pub enum StopField {
    One(String),
    Many(Vec<String>),
}

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Send the token usage at the end of the stream
    pub include_usage: Option<bool>,
    /// With `include_usage`: also send the usage so far with every event
    pub continuous_usage_stats: Option<bool>,
}

/// Exactly one of these constraints
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct StructuredOutputs {
    /// A JSON schema
    pub json: Option<Value>,
    /// Regular expression that matches the whole output
    pub regex: Option<String>,
    /// Strings, of which the output is one
    pub choice: Option<Vec<String>>,
    /// A Lark grammar
    pub grammar: Option<String>,
    /// Any JSON object
    pub json_object: Option<bool>,
}

impl StructuredOutputs {
    /// The grammar, from either of vLLM's two ways to specify one.
    pub fn grammar(
        structured: Option<Self>,
        json: Option<Value>,
        regex: Option<String>,
        choice: Option<Vec<String>>,
        grammar: Option<String>,
    ) -> Result<Option<Grammar>, ApiError> {
        let structured = structured.unwrap_or_default();
        let guided = Self { json, regex, choice, grammar, ..Self::default() };
        let mut grammars = [structured, guided].into_iter().flat_map(Self::grammars);
        let first = grammars.next().transpose()?;
        match grammars.next() {
            None => Ok(first),
            Some(_) => {
                Err(ApiError::invalid("structured_outputs", "only one form of structured output can be asked for"))
            }
        }
    }

    fn grammars(self) -> Vec<Result<Grammar, ApiError>> {
        let schema = self.json.map(|schema| match schema {
            // vLLM also accepts a schema as a string.
            Value::String(text) => schema_of(&text),
            schema => Ok(Grammar::JsonSchema(schema)),
        });
        let regex = self.regex.map(|regex| Ok(Grammar::Regex(regex)));
        let lark = self.grammar.map(|grammar| Ok(Grammar::Lark(grammar)));
        let object = self.json_object.unwrap_or(false).then_some(Ok(Grammar::JsonObject));
        [schema, regex, self.choice.map(one_of), lark, object].into_iter().flatten().collect()
    }
}

fn schema_of(text: &str) -> Result<Grammar, ApiError> {
    json_body::check_values(text.as_bytes()).map_err(|error| error.param("structured_outputs"))?;
    let invalid = |error| ApiError::invalid("structured_outputs", format!("the schema is no JSON: {error}"));
    serde_json::from_str(text).map(Grammar::JsonSchema).map_err(invalid)
}

/// A grammar that accepts exactly these texts.
fn one_of(texts: Vec<String>) -> Result<Grammar, ApiError> {
    if texts.is_empty() || texts.iter().any(String::is_empty) {
        return Err(ApiError::invalid("structured_outputs", "a choice needs texts that are not empty"));
    }
    // A JSON string is also a valid Lark string.
    let quoted: Vec<_> = texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    Ok(Grammar::Lark(format!("start: {}", quoted.join(" | "))))
}

/// The values of the shared fields.
pub struct CommonFields {
    pub n: Option<usize>,
    pub sampling: SamplingOverrides,
    pub logit_bias: Option<Map<String, Value>>,
    pub stop: Option<StopField>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    pub min_tokens: Option<u32>,
    pub skip_special_tokens: Option<bool>,
    pub structured: Option<Grammar>,
}

impl CommonFields {
    pub fn apply(self, request: &mut GenerationRequest) -> Result<(), ApiError> {
        request.choices = self.n.unwrap_or(1);
        request.sampling = self.sampling;
        request.sampling.logit_bias = self.logit_bias.iter().flatten().map(bias).collect::<Result<_, _>>()?;
        request.stop = match self.stop {
            None => Vec::new(),
            Some(StopField::One(stop)) => vec![stop],
            Some(StopField::Many(stops)) => stops,
        };
        request.stop_tokens = self.stop_token_ids.unwrap_or_default().into_iter().map(TokenId).collect();
        request.ignore_eos = self.ignore_eos.unwrap_or(false);
        request.tokens_min = self.min_tokens.unwrap_or(0) as usize;
        request.show_special = !self.skip_special_tokens.unwrap_or(true);
        request.grammar = self.structured;
        Ok(())
    }
}

fn bias((token, value): (&String, &Value)) -> Result<(TokenId, f32), ApiError> {
    let id =
        token.parse().map_err(|_| ApiError::invalid("logit_bias", format!("`{token}` is not the id of a token")))?;
    let value = value.as_f64().ok_or_else(|| ApiError::invalid("logit_bias", format!("{value} is not a number")))?;
    Ok((TokenId(id), value as f32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_form_of_structured_output_may_be_asked_for() {
        let outputs = |json: Value| serde_json::from_value::<StructuredOutputs>(json).unwrap();
        let named = |json: Value, regex: Option<&str>| {
            StructuredOutputs::grammar(Some(outputs(json)), None, regex.map(str::to_owned), None, None)
        };
        assert_eq!(named(json!({"regex": "a+"}), None), Ok(Some(Grammar::Regex("a+".into()))));
        assert_eq!(named(json!({}), Some("b")), Ok(Some(Grammar::Regex("b".into()))));
        assert_eq!(
            named(json!({"json": "{\"type\": \"null\"}"}), None),
            Ok(Some(Grammar::JsonSchema(json!({"type": "null"}))))
        );
        assert_eq!(
            named(json!({"choice": ["a\"", "b"]}), None),
            Ok(Some(Grammar::Lark(r#"start: "a\"" | "b""#.into())))
        );
        assert!(named(json!({"regex": "a", "json_object": true}), None).is_err());
        assert!(named(json!({"choice": []}), None).is_err());
        let refused = |schema: &str| named(json!({"json": schema}), None).unwrap_err();
        assert_eq!(refused("{").param.as_deref(), Some("structured_outputs"));
        assert_eq!(refused(&format!("[0{}]", ",0".repeat(1_000_000))).code, Some("too_many_values"));
    }
}
