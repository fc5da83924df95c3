//! `Constraint`: which tokens an answer may continue with. The caller implements it: a grammar, a schema, a list of
//! labels.
//!
//! A constraint fills a [`TokenMask`] before each token and gets the token that was sampled. The step's plan carries the
//! mask to the sampler.

use std::panic::{self, AssertUnwindSafe};

use types::TokenId;

/// Follows one answer. Runs on the engine's thread.
pub trait Constraint: Send {
    /// Sets the bit of every token that may come next, and clears all others. The mask stays the same until a token is
    /// accepted. The end-of-sequence ids are tokens like others: allowed where the answer may end.
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<(), ConstraintError>;

    /// The answer continues with `token`.
    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError>;

    /// Whether no token may follow: the answer ends here.
    fn is_complete(&self) -> bool;
}

/// Calls a constraint and catches panics. Constraints run clients' grammars in a third-party library: a panic ends only
/// its own request, not the engine's thread.
pub(crate) fn catch_panic<T>(call: impl FnOnce() -> Result<T, ConstraintError>) -> Result<T, ConstraintError> {
    // After a panic the sequence ends, so the constraint is never called again.
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    result.unwrap_or_else(|_| Err(ConstraintError("the constraint panicked".to_owned())))
}

/// A constraint that failed. Ends its own request only.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);

/// One bit for each token of the vocabulary: whether it may be sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask {
    /// Bit `id % 32` of word `id / 32`. Bits beyond the vocabulary are ignored.
    words: Vec<u32>,
    vocab: usize,
}

impl TokenMask {
    /// Allows no token.
    pub fn new(vocab: usize) -> Self {
        Self { words: vec![0; vocab.div_ceil(32)], vocab }
    }

    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Tokens outside the vocabulary are ignored.
    pub fn allow(&mut self, token: TokenId) {
        if (token.0 as usize) < self.vocab {
            self.words[token.0 as usize / 32] |= 1 << (token.0 % 32);
        }
    }

    pub fn forbid(&mut self, token: TokenId) {
        if (token.0 as usize) < self.vocab {
            self.words[token.0 as usize / 32] &= !(1 << (token.0 % 32));
        }
    }

    pub fn allows(&self, token: TokenId) -> bool {
        (token.0 as usize) < self.vocab && self.words[token.0 as usize / 32] >> (token.0 % 32) & 1 == 1
    }

    /// Forbids `tokens`, unless no other token is allowed.
    pub fn forbid_unless_last(&mut self, tokens: &[TokenId]) {
        let others = (0..self.vocab as u32).map(TokenId).any(|token| self.allows(token) && !tokens.contains(&token));
        if others {
            tokens.iter().for_each(|&token| self.forbid(token));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_knows_its_own_tokens_only() {
        let mut mask = TokenMask::new(40);
        assert_eq!((mask.words().len(), mask.vocab()), (2, 40));
        for id in [0, 31, 32, 39, 40, 63, 64, u32::MAX] {
            assert!(!mask.allows(TokenId(id)));
            mask.allow(TokenId(id));
            assert_eq!(mask.allows(TokenId(id)), id < 40, "{id}");
        }
        mask.forbid(TokenId(32));
        mask.forbid(TokenId(99));
        assert_eq!(mask.words(), [1 << 31 | 1, 1 << 7]);
        mask.clear();
        assert_eq!(mask, TokenMask::new(40));
    }

    #[test]
    fn the_last_tokens_allowed_are_never_forbidden() {
        let (mut mask, ends) = (TokenMask::new(40), [TokenId(3), TokenId(70)]);
        mask.allow(TokenId(3));
        mask.words_mut()[1] |= 1 << 20; // beyond the vocabulary: no other token
        mask.forbid_unless_last(&ends);
        assert!(mask.allows(TokenId(3)));
        mask.allow(TokenId(5));
        mask.forbid_unless_last(&ends);
        assert!(!mask.allows(TokenId(3)) && mask.allows(TokenId(5)));
    }
}
