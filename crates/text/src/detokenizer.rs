//! Tokens to text, one at a time.
//!
//! A token may end in the middle of a character. Its bytes wait until the next ones complete the character or show
//! that none will come, so that the pieces joined are what `Tokenizer::decode` gives for all tokens at once.

use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::vocab::TokenKind;
use types::TokenId;

/// Gives out text as soon as it is certain.
pub struct Detokenizer {
    tokenizer: Tokenizer,
    special: SpecialTokens,
    /// Control tokens that are shown all the same.
    shown: Vec<TokenId>,
    /// The beginning of a character: at most three bytes between calls.
    pending: Vec<u8>,
    strip_space: bool,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, special: SpecialTokens) -> Self {
        let strip_space = tokenizer.rules.strip_first_space;
        Self { tokenizer, special, shown: Vec::new(), pending: Vec::new(), strip_space }
    }

    /// Says that other text comes before: a first space is part of the text.
    pub fn continuing(mut self) -> Self {
        self.strip_space = false;
        self
    }

    /// Shows these tokens even if it hides control tokens: those that a [`ReplyParser`](crate::ReplyParser) looks for.
    pub fn showing(mut self, ids: Vec<TokenId>) -> Self {
        self.shown = ids;
        self
    }

    /// The text that has become certain with this token; often all of it, sometimes none.
    pub fn push(&mut self, id: TokenId) -> String {
        let vocab = &self.tokenizer.rules.vocab;
        let hidden = self.special == SpecialTokens::Hide && vocab.kind(id.0) == TokenKind::Control;
        if hidden && !self.shown.contains(&id) {
            return String::new();
        }
        let mut bytes = vocab.bytes(id.0);
        if self.strip_space && !bytes.is_empty() {
            self.strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut waiting = 0;
        let mut chunks = self.pending.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            match chunk.invalid() {
                [] => {}
                bytes if chunks.peek().is_none() && may_be_completed(bytes) => waiting = bytes.len(),
                _ => text.push(char::REPLACEMENT_CHARACTER),
            }
        }
        self.pending.drain(..self.pending.len() - waiting);
        text
    }

    /// What is left when no more tokens come.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// True for the beginning of a character that further bytes could complete.
fn may_be_completed(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
