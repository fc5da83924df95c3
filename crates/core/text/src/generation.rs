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

/// The sampling settings of a request that gives none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
}

impl GenerationDefaults {
    /// What the model recommends; settings that it leaves out are off. A model that recommends nothing gets common values,
    /// because unfiltered sampling makes small models ramble.
    pub fn sampling(&self) -> SamplingDefaults {
        let silent = self.do_sample.is_none()
            && self.top_k.is_none()
            && [self.temperature, self.top_p, self.min_p].iter().all(Option::is_none);
        let fallback = if silent { SamplingDefaults::COMMON } else { SamplingDefaults::OFF };
        let greedy = (self.do_sample == Some(false)).then_some(0.0);
        SamplingDefaults {
            temperature: greedy.or(self.temperature).unwrap_or(fallback.temperature),
            top_p: self.top_p.unwrap_or(fallback.top_p),
            top_k: self.top_k.unwrap_or(fallback.top_k),
            min_p: self.min_p.unwrap_or(fallback.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(fallback.repetition_penalty),
        }
    }

    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TextLoadError> {
        let path = path.as_ref();
        let text = read_bounded(path, FILE_BYTES_MAX)?;
        serde_json::from_str(&text).map_err(|source| TextLoadError::Json { path: path.to_owned(), source })
    }
}

impl SamplingDefaults {
    const COMMON: Self = Self { temperature: 0.7, top_p: 0.95, top_k: 40, min_p: 0.05, repetition_penalty: 1.0 };
    const OFF: Self = Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 };
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
    fn a_model_that_recommends_nothing_gets_common_values() {
        assert_eq!(parse("{}").sampling(), SamplingDefaults::COMMON);
        assert_eq!(parse(r#"{"eos_token_id": 2}"#).sampling(), SamplingDefaults::COMMON);
        let penalty = parse(r#"{"repetition_penalty": 1.1}"#).sampling();
        assert_eq!(penalty, SamplingDefaults { repetition_penalty: 1.1, ..SamplingDefaults::COMMON });
    }

    #[test]
    fn what_a_recommendation_leaves_out_is_off() {
        let sampling = parse(r#"{"temperature": 0.6, "repetition_penalty": 1.2}"#).sampling();
        assert_eq!(sampling, SamplingDefaults { temperature: 0.6, repetition_penalty: 1.2, ..SamplingDefaults::OFF });
        let greedy = parse(r#"{"do_sample": false, "temperature": 0.6}"#).sampling();
        assert_eq!(greedy, SamplingDefaults { temperature: 0.0, ..SamplingDefaults::OFF });
    }

    #[test]
    fn a_file_that_is_too_long_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![b' '; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(matches!(GenerationDefaults::from_file(file.path()), Err(TextLoadError::TooLong { .. })));
    }
}
