//! Limits of the values in a message. Larger values are rejected before anything is made from them. The executor checks
//! what depends on the loaded model, such as free pages.

use engine::{SESSIONS_MAX, SamplingParamsError};

/// Sequences of one step.
pub const ENTRIES_MAX: usize = SESSIONS_MAX;
/// Tokens of one step.
pub const ROWS_MAX: usize = 1 << 18;
/// Tokens of one session.
pub const POSITIONS_MAX: usize = 1 << 24;
/// Tokens of a vocabulary.
pub const VOCAB_MAX: usize = 1 << 20;
/// Files of one model.
pub const FILES_MAX: usize = 1 << 12;
/// Ranks of one group.
pub const RANKS_MAX: usize = 1 << 10;
/// Images of one prompt.
pub const IMAGES_MAX: usize = 1 << 10;
/// Values of one embedding.
pub const EMBEDDING_VALUES_MAX: usize = 1 << 20;
/// Logits of one step: as many as fit into a line.
pub const LOGIT_VALUES_MAX: usize = 10 << 20;
/// Activations of one step, and hidden states that it returns: as many as fit into a line.
pub const STATE_VALUES_MAX: usize = 10 << 20;
/// Threads of one rank.
pub const THREADS_MAX: usize = 1 << 12;
/// Milliseconds of a wait.
pub const WAIT_MS_MAX: usize = 1 << 28;
/// Pages of the KV cache, and tokens of each.
pub const PAGES_MAX: usize = 1 << 32;
pub const PAGE_TOKENS_MAX: usize = 1 << 16;

/// A well-formed message with an invalid value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LimitError {
    #[error("{what} is {found}, the limit is {max}")]
    TooLarge { what: &'static str, found: u64, max: u64 },
    #[error("{what} is zero")]
    Zero { what: &'static str },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error("{bytes} bytes of {what} are not a whole number of values")]
    IncompleteValue { what: &'static str, bytes: usize },
    #[error("{what} has {found} values, {expected} were expected")]
    Shape { what: &'static str, found: usize, expected: usize },
    #[error("session {session} wants {logit_rows} rows of the {rows} that it runs")]
    RowsMissing { session: u64, logit_rows: usize, rows: usize },
    #[error("session {session}: all entries of a step have tokens, or none has")]
    MixedRows { session: u64 },
    #[error("session {session} is out of order: generated tokens come first, what is pooled comes last")]
    OutOfOrder { session: u64 },
    #[error("{what} of session {session} was not asked for, or not in this place")]
    NotRequested { what: &'static str, session: u64 },
    #[error("unknown number format")]
    Format,
    #[error(transparent)]
    Sampling(#[from] SamplingParamsError),
}

/// `value` as a count, if it is at most `max`.
pub(super) fn count(what: &'static str, value: u64, max: usize) -> Result<usize, LimitError> {
    let too_large = LimitError::TooLarge { what, found: value, max: max as u64 };
    usize::try_from(value).ok().filter(|&count| count <= max).ok_or(too_large)
}

/// Checks that `found` is at most `max`.
pub(super) fn at_most(what: &'static str, found: usize, max: usize) -> Result<(), LimitError> {
    count(what, found as u64, max).map(drop)
}

/// Checks that all of `tokens` are in the vocabulary.
pub(super) fn in_vocab(tokens: impl IntoIterator<Item = u32>, vocab: usize) -> Result<(), LimitError> {
    match tokens.into_iter().find(|&token| token as usize >= vocab) {
        Some(token) => Err(LimitError::TokenOutOfRange { token, vocab }),
        None => Ok(()),
    }
}
