//! Converts tokens to text, one at a time.
//!
//! A token may end in the middle of a character. Its bytes are held back until further bytes complete the character or show
//! that it is invalid, so the concatenated pieces are equal to `Tokenizer::decode` of all tokens.

use crate::tokenizer::{SpecialTokens, Tokenizer};
use crate::vocab::TokenKind;
use types::TokenId;

/// Returns text as soon as it is final.
pub struct Detokenizer {
    tokenizer: Tokenizer,
    special: SpecialTokens,
    /// Control tokens that are shown even if the others are hidden.
    shown: Vec<TokenId>,
    /// The first bytes of a character: at most three between calls.
    pending: Vec<u8>,
    strip_space: bool,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Tokenizer, special: SpecialTokens) -> Self {
        let strip_space = tokenizer.rules.strip_first_space;
        Self { tokenizer, special, shown: Vec::new(), pending: Vec::new(), strip_space }
    }

    /// Use if other text precedes the tokens: a leading space is kept.
    pub fn continuing(mut self) -> Self {
        self.strip_space = false;
        self
    }

    /// Shows these tokens even if control tokens are hidden: the markers that a [`ReplyParser`](crate::ReplyParser) needs.
    pub fn with_shown_tokens(mut self, ids: Vec<TokenId>) -> Self {
        self.shown = ids;
        self
    }

    /// The text that is final after this token. May be empty.
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

    /// The remaining text, after the last token.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// True for the first bytes of a character that further bytes can complete.
fn may_be_completed(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
