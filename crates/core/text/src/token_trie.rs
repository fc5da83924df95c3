//! The vocabulary in llguidance's format: a trie of every token's bytes.
//!
//! Control tokens get a prefix that no UTF-8 text contains, so that no grammar matches them as text. A grammar refers to a
//! control token by its id.
//!
//! The model may choose any tokenization of the text that a grammar requires. llguidance could force the tokenizer's own,
//! but would have to look ahead to the end of the forced text, which is far in a grammar like `a{1000000000}`.

use crate::tokenizer::Tokenizer;
use crate::vocab::TokenKind;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};
use std::sync::Arc;
use types::TokenId;

pub(crate) fn token_trie(tokenizer: &Tokenizer) -> TokEnv {
    let size = u32::try_from(tokenizer.vocab_size()).expect("loaders bound the size of a vocabulary");
    let words: Vec<Vec<u8>> = (0..size).map(|id| word(tokenizer, TokenId(id))).collect();
    let ends: Vec<u32> = tokenizer.eos_ids().iter().map(|id| id.0).filter(|&id| id < size).collect();
    let trie = TokTrie::from(&TokRxInfo::new(size, INVALID_TOKEN), &words);
    Arc::new(ApproximateTokEnv::new(if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) }))
}

/// The bytes that the token adds to a text; empty if it must not occur in text.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    match tokenizer.rules.vocab.kind(id.0) {
        TokenKind::Unused => Vec::new(),
        TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        _ if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
        _ => bytes.to_vec(),
    }
}
