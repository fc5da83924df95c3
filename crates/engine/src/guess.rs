//! Guesses of what a sequence says next, from what it has said before: answers often repeat their prompt, or themselves.
//!
//! A guess costs a row in a step that runs anyway. It never changes an answer: it is kept only if it is what the sampler
//! chooses in its place.

use types::TokenId;

/// The longest and the shortest run of last tokens that is looked for.
const PATTERN_MAX: usize = 4;
const PATTERN_MIN: usize = 2;
/// Tokens that are searched, from the end on: what one step may spend on guessing is bounded.
const WINDOW: usize = 1 << 14;

/// Finds the latest place where the last tokens occurred before, the longest run of them that did, and fills `guesses` with
/// `max` tokens that followed there; where these reach the end, they go on with what was guessed.
pub(crate) fn continue_as_before(tokens: &[TokenId], max: usize, guesses: &mut Vec<TokenId>) {
    if max == 0 {
        return;
    }
    let tokens = &tokens[tokens.len().saturating_sub(WINDOW)..];
    for length in (PATTERN_MIN..=PATTERN_MAX.min(tokens.len().saturating_sub(1))).rev() {
        let pattern = &tokens[tokens.len() - length..];
        let earlier = &tokens[..tokens.len() - 1];
        if let Some(place) = earlier.windows(length).rposition(|window| window == pattern) {
            for at in place + length..place + length + max {
                guesses.push(if at < tokens.len() { tokens[at] } else { guesses[at - tokens.len()] });
            }
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[u32], max: usize, want: &[u32]) {
        let tokens: Vec<_> = tokens.iter().copied().map(TokenId).collect();
        let mut found = Vec::new();
        continue_as_before(&tokens, max, &mut found);
        assert_eq!(found.iter().map(|token| token.0).collect::<Vec<_>>(), want);
    }

    #[test]
    fn what_followed_the_same_tokens_is_guessed() {
        check(&[1, 2, 3, 4, 5, 1, 2], 3, &[3, 4, 5]);
        check(&[1, 2, 3, 4, 5, 1, 2], 7, &[3, 4, 5, 1, 2, 3, 4]);
        check(&[1, 2, 3, 4, 5, 1, 2], 1, &[3]);
        check(&[1, 2, 3, 4, 5, 1, 2], 0, &[]);
    }

    #[test]
    fn the_longest_run_wins_and_then_the_latest_place() {
        check(&[9, 1, 2, 7, 1, 2, 8, 9, 1, 2], 1, &[7]);
        check(&[1, 2, 7, 1, 2, 8, 5, 1, 2], 1, &[8]);
    }

    #[test]
    fn a_repetition_may_overlap_itself() {
        check(&[5, 5, 5], 4, &[5, 5, 5, 5]);
        check(&[1, 2, 1, 2, 1, 2], 5, &[1, 2, 1, 2, 1]);
    }

    #[test]
    fn nothing_is_guessed_where_nothing_repeats() {
        check(&[], 4, &[]);
        check(&[1], 4, &[]);
        check(&[1, 2, 3, 2, 4], 4, &[]);
    }
}
