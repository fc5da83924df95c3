//! Log probabilities in the format of the completions API: four lists, with one entry for each token.

use serde::{Serialize, Serializer};
use text::Tokenizer;
use types::TokenId;
use utoipa::ToSchema;

use crate::generation::ScoredToken;

#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// Null for the first token of a prompt, which has no preceding tokens
    pub token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<std::collections::HashMap<String, f32>>>)]
    pub top_logprobs: Vec<Option<TopLogprobs>>,
    /// Offset of each token in the text, in characters
    pub text_offset: Vec<usize>,
}

/// The most probable tokens by their text, best first. If two have the same text, the more probable one is kept.
///
/// The numbers are formatted as in `token_logprobs`, so that equal ones are written alike: lm-eval compares them.
#[derive(Debug, Default)]
pub struct TopLogprobs(Vec<(String, f32)>);

impl TopLogprobs {
    fn add(&mut self, text: String, logprob: f32) {
        if self.0.iter().all(|(other, _)| *other != text) {
            self.0.push((text, logprob));
        }
    }
}

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// The offset of the next token in the text.
#[derive(Debug, Default)]
pub struct TextOffset {
    characters: usize,
}

impl CompletionLogprobs {
    pub fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[ScoredToken], offset: &mut TextOffset) {
        for ScoredToken { id, logprobs } in tokens {
            let text = token_text(tokenizer, *id);
            self.text_offset.push(offset.characters);
            offset.characters += started_characters(tokenizer.token_bytes(*id));
            self.token_logprobs.push(logprobs.as_ref().map(|logprobs| logprobs.chosen));
            self.top_logprobs.push(logprobs.as_ref().map(|logprobs| {
                let mut top = TopLogprobs::default();
                logprobs.top.iter().for_each(|&(id, logprob)| top.add(token_text(tokenizer, id), logprob));
                // The chosen token is always included, as in OpenAI's API, so that a client can see whether it was the most
                // probable one.
                top.add(text.clone(), logprobs.chosen);
                top
            }));
            self.tokens.push(text);
        }
    }
}

/// A token as text, or as escaped bytes if it is not UTF-8, so that different tokens stay different.
fn token_text(tokenizer: &Tokenizer, id: TokenId) -> String {
    let bytes = tokenizer.token_bytes(id);
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

/// The number of characters that start in these bytes.
fn started_characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_tokens_with_one_text_the_likelier_is_told() {
        let mut top = TopLogprobs::default();
        [("a", -0.1), ("b", -2.5), ("a", -7.0)]
            .into_iter()
            .for_each(|(text, logprob)| top.add(text.to_owned(), logprob));
        assert_eq!(serde_json::to_string(&top).unwrap(), r#"{"a":-0.1,"b":-2.5}"#);
    }
}
