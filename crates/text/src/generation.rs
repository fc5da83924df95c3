//! The recommended sampling settings of a model: `generation_config.json`.

use crate::read::read_bounded;
use crate::tokenizer::TextLoadError;
use serde::{Deserialize, Deserializer};
use std::path::Path;
use types::TokenId;

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Absent values are `None`; unknown keys are ignored.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct GenerationDefaults {
    /// All end-of-sequence tokens.
    #[serde(rename = "eos_token_id", deserialize_with = "one_or_many")]
    pub eos_ids: Vec<TokenId>,
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TextLoadError> {
        let path = path.as_ref();
        let text = read_bounded(path, FILE_BYTES_MAX)?;
        serde_json::from_str(&text).map_err(|source| TextLoadError::Json { path: path.to_owned(), source })
    }
}

fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<TokenId>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Ids {
        One(u32),
        Many(Vec<u32>),
    }
    Ok(match Option::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![TokenId(id)],
        Some(Ids::Many(ids)) => ids.into_iter().map(TokenId).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> GenerationDefaults {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn end_tokens_may_be_one_or_many_or_none() {
        assert_eq!(parse(r#"{"eos_token_id": 2}"#).eos_ids, [TokenId(2)]);
        assert_eq!(parse(r#"{"eos_token_id": [2, 7]}"#).eos_ids, [TokenId(2), TokenId(7)]);
        assert_eq!(parse(r#"{"eos_token_id": null}"#).eos_ids, []);
        assert_eq!(parse("{}"), GenerationDefaults::default());
    }

    #[test]
    fn sampling_values_are_read_and_other_keys_ignored() {
        let read = parse(r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "x": []}"#);
        let want = GenerationDefaults {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            min_p: Some(0.0),
            ..GenerationDefaults::default()
        };
        assert_eq!(read, want);
    }

    #[test]
    fn a_file_that_is_too_long_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![b' '; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(matches!(GenerationDefaults::from_file(file.path()), Err(TextLoadError::TooLong { .. })));
    }
}
