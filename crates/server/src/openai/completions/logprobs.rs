//! Log probabilities in the form of the older API: four lists, one entry for each token.

use serde::Serialize;
use serde_json::{Map, Value};
use text::Tokenizer;
use types::TokenId;
use utoipa::ToSchema;

use crate::answer::Token;

#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// Null for the first token of a prompt: nothing comes before it
    pub token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<std::collections::HashMap<String, f32>>>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each token begins in the text, in characters
    pub text_offset: Vec<usize>,
}

/// How far the text is.
#[derive(Debug, Default)]
pub struct Offsets {
    characters: usize,
}

impl CompletionLogprobs {
    pub fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[Token], offsets: &mut Offsets) {
        for Token { id, logprobs } in tokens {
            let text = spelled(tokenizer, *id);
            self.text_offset.push(offsets.characters);
            offsets.characters += started_characters(tokenizer.token_bytes(*id));
            self.token_logprobs.push(logprobs.as_ref().map(|logprobs| logprobs.chosen));
            self.top_logprobs.push(logprobs.as_ref().map(|logprobs| {
                // The chosen token is always among them, as OpenAI's is: a reader can see whether it was the likeliest.
                let chosen = (text.clone(), logprobs.chosen.into());
                let top = logprobs.top.iter().map(|&(id, logprob)| (spelled(tokenizer, id), logprob.into()));
                top.chain([chosen]).collect()
            }));
            self.tokens.push(text);
        }
    }
}

/// A token as text; one that is no text by itself as its bytes, so that two such tokens stay apart.
fn spelled(tokenizer: &Tokenizer, id: TokenId) -> String {
    let bytes = tokenizer.token_bytes(id);
    match str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

/// Characters that begin in these bytes.
fn started_characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte & 0xc0 != 0x80).count()
}
