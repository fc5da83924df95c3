//! The best token of a row whose logits lie on several ranks. Each sends the best of its own and the first chooses among these: two
//! numbers travel where the row may have a quarter of a million.

use types::TokenId;

use crate::row;
use crate::sampler::SampleError;

/// What a rank sends for a row: its largest logit, and whose that is.
pub const NUMBERS: usize = 2;

/// Larger vocabularies have ids that are no `f32`.
pub const TOKENS_MAX: usize = 1 << f32::MANTISSA_DIGITS;

/// Of more rows, all logits are gathered, piece by piece: what many ranks send of these is within the limit of any exchange.
pub const ROWS_MAX: usize = 256;

/// Of a share of the logits, which are those of `first` and the tokens after it.
pub fn of_share(logits: &[f32], first: usize) -> [f32; NUMBERS] {
    match row::maximum(logits) {
        Ok(best) => [best, (first + row::first(logits, best)) as f32],
        Err(SampleError::NothingAllowed) => [f32::NEG_INFINITY, 0.0],
        Err(SampleError::NotFinite) => [f32::NAN, 0.0],
    }
}

/// Of all ranks, which have sent theirs in the order of their tokens.
pub fn of_ranks(sent: impl IntoIterator<Item = [f32; NUMBERS]>) -> Result<TokenId, SampleError> {
    let mut best = (f32::NEG_INFINITY, Err(SampleError::NothingAllowed));
    for [logit, token] in sent {
        if logit.is_nan() {
            return Err(SampleError::NotFinite);
        }
        if logit > best.0 {
            best = (logit, Ok(TokenId(token as u32)));
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As one rank finds it, and as several do that have the tokens before and after each of `cuts`.
    fn found(logits: &[f32], cuts: &[usize]) -> [Result<TokenId, SampleError>; 2] {
        let whole = row::maximum(logits).map(|best| TokenId(row::first(logits, best) as u32));
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([logits.len()]);
        [whole, of_ranks(starts.zip(ends).map(|(start, end)| of_share(&logits[start..end], start)))]
    }

    #[test]
    fn ranks_choose_what_one_would() {
        let nan = f32::NAN;
        let (least, most) = (f32::NEG_INFINITY, f32::INFINITY);
        let rows: [&[f32]; 9] = [
            &[1.0, 3.0, 2.0, 0.0, -1.0],
            &[-5.0, -4.0, -3.0, -2.0, -1.0],
            &[2.0, 7.0, 7.0, 7.0, 7.0],
            &[0.0, -0.0, 0.0, -0.0, 0.0],
            &[least, least, least, 1.0, least],
            &[least, least, least, least, least],
            &[1.0, 2.0, nan, 4.0, 5.0],
            &[nan, 2.0, 3.0, 4.0, 5.0],
            &[1.0, 2.0, 3.0, 4.0, most],
        ];
        for logits in rows {
            for cuts in [&[][..], &[2], &[4], &[5], &[0, 3], &[1, 1, 4]] {
                let [whole, shared] = found(logits, cuts);
                assert_eq!(whole, shared, "{logits:?} cut at {cuts:?}");
            }
        }
    }

    #[test]
    fn ids_of_the_largest_vocabulary_are_exact() {
        for token in [TOKENS_MAX - 1, TOKENS_MAX - 2, 151_935] {
            assert_eq!(of_ranks([of_share(&[1.0], token)]), Ok(TokenId(token as u32)));
        }
    }
}
