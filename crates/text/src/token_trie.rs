//! The vocabulary as llguidance wants it: a trie of every token's bytes.
//!
//! Control tokens get a marker that no UTF-8 text contains, so that no grammar takes them for text. A grammar that means
//! one names it by its id.
//!
//! The model chooses among all spellings of what a grammar demands. llguidance could force the tokenizer's own, but would
//! look ahead for it to the end of what is certain, and in a grammar like `a{1000000000}` that is far.

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

/// What the token adds to a text; nothing if it can stand in none.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id);
    match tokenizer.rules.vocab.kind(id.0) {
        TokenKind::Unused => Vec::new(),
        TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        _ if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
        _ => bytes.to_vec(),
    }
}
