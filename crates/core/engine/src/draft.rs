//! Draft tokens for speculative decoding, by prompt lookup: an answer often repeats a part of its prompt, or of itself.
//!
//! A draft token costs a row in a step that runs anyway. It never changes an answer: it is accepted only if the sampler
//! chooses the same token for its position.

use types::TokenId;

/// The longest and the shortest n-gram of last tokens that is looked up.
const NGRAM_MAX: usize = 4;
const NGRAM_MIN: usize = 2;
/// Only so many of the last tokens are searched: this bounds the time that a step spends on drafts.
const WINDOW: usize = 1 << 14;

/// Finds the latest earlier occurrence of the longest n-gram that ends `tokens`, and fills `draft` with the `count` tokens
/// that followed it. Where these reach the end of `tokens`, the draft continues with its own beginning.
pub(crate) fn propose(tokens: &[TokenId], count: usize, draft: &mut Vec<TokenId>) {
    if count == 0 {
        return;
    }
    let tokens = &tokens[tokens.len().saturating_sub(WINDOW)..];
    for length in (NGRAM_MIN..=NGRAM_MAX.min(tokens.len().saturating_sub(1))).rev() {
        let ngram = &tokens[tokens.len() - length..];
        let earlier = &tokens[..tokens.len() - 1];
        if let Some(start) = earlier.windows(length).rposition(|window| window == ngram) {
            let next = start + length;
            for index in next..next + count {
                draft.push(if index < tokens.len() { tokens[index] } else { draft[index - tokens.len()] });
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[u32], count: usize, want: &[u32]) {
        let tokens: Vec<_> = tokens.iter().copied().map(TokenId).collect();
        let mut draft = Vec::new();
        propose(&tokens, count, &mut draft);
        assert_eq!(draft.iter().map(|token| token.0).collect::<Vec<_>>(), want);
    }

    #[test]
    fn what_followed_the_same_tokens_is_proposed() {
        check(&[1, 2, 3, 4, 5, 1, 2], 3, &[3, 4, 5]);
        check(&[1, 2, 3, 4, 5, 1, 2], 7, &[3, 4, 5, 1, 2, 3, 4]);
        check(&[1, 2, 3, 4, 5, 1, 2], 1, &[3]);
        check(&[1, 2, 3, 4, 5, 1, 2], 0, &[]);
    }

    #[test]
    fn the_longest_ngram_wins_and_then_its_latest_occurrence() {
        check(&[9, 1, 2, 7, 1, 2, 8, 9, 1, 2], 1, &[7]);
        check(&[1, 2, 7, 1, 2, 8, 5, 1, 2], 1, &[8]);
    }

    #[test]
    fn a_repetition_may_overlap_itself() {
        check(&[5, 5, 5], 4, &[5, 5, 5, 5]);
        check(&[1, 2, 1, 2, 1, 2], 5, &[1, 2, 1, 2, 1]);
    }

    #[test]
    fn nothing_is_proposed_where_nothing_repeats() {
        check(&[], 4, &[]);
        check(&[1], 4, &[]);
        check(&[1, 2, 3, 2, 4], 4, &[]);
    }
}
