//! Converts the merges of a vocabulary from text to pairs of ids.

use crate::tokenizer::{Merges, TextLoadError};
use crate::vocab::Vocab;

/// Collects merges in the order of their rank.
pub(crate) struct MergeList<'v> {
    vocab: &'v Vocab,
    spelling: fn(&str, &mut Vec<u8>),
    merges: Merges,
    rank: u32,
    text: Vec<u8>,
}

impl<'v> MergeList<'v> {
    /// `spelling` converts a token from the file's spelling to bytes.
    pub fn new(vocab: &'v Vocab, spelling: fn(&str, &mut Vec<u8>), merges: usize) -> Self {
        Self { vocab, spelling, merges: Merges::with_capacity(merges), rank: 0, text: Vec::new() }
    }

    /// Adds a merge that is written as two tokens with a space between them.
    pub fn push_joined(&mut self, merge: &str) -> Result<(), TextLoadError> {
        // The first token may be a space.
        let space = merge.bytes().skip(1).position(|byte| byte == b' ').map(|index| index + 1);
        let (left, right) = space
            .and_then(|space| Some((merge.get(..space)?, merge.get(space + 1..)?)))
            .ok_or_else(|| TextLoadError::Malformed(format!("merge {merge:?} is not two tokens")))?;
        self.push(left, right);
        Ok(())
    }

    /// Adds a merge. A merge of tokens that are not in the vocabulary never applies, but still uses up a rank.
    pub fn push(&mut self, left: &str, right: &str) {
        let rank = self.rank;
        self.rank += 1;
        self.text.clear();
        (self.spelling)(left, &mut self.text);
        let middle = self.text.len();
        (self.spelling)(right, &mut self.text);
        let (first, second) = self.text.split_at(middle);
        let ids = (self.vocab.find(first), self.vocab.find(second), self.vocab.find(&self.text));
        if let (Some(left), Some(right), Some(token)) = ids {
            self.merges.push(rank, left, right, token);
        }
    }

    pub fn finish(self) -> Merges {
        self.merges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocab::append_spaced;

    #[test]
    fn a_merge_is_two_tokens() {
        let vocab = Vocab::with_capacity(0);
        let mut merges = MergeList::new(&vocab, append_spaced, 0);
        assert!(merges.push_joined("a b").is_ok());
        assert!(merges.push_joined("  b").is_ok());
        for broken in ["", " ", "ab", "é"] {
            assert!(merges.push_joined(broken).is_err(), "{broken:?}");
        }
    }
}
