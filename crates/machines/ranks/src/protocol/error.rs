//! The contents of an `error` reply: a kind from a closed list, for decisions, and a message for people.

use serde::{Deserialize, Serialize};

/// The longest message of an `error`, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 512;

/// Length from which a run of letters and digits is taken for a key and not for a word.
const KEY_CHARS_MIN: usize = 20;

/// Replaces what was left out.
const LEFT_OUT: char = '…';

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    BadRequest,
    UnknownOp,
    CudaFeatureNotEnabled,
    CudaUnavailable,
    NcclInitFailed,
    NcclNotInitialised,
    NcclSanityFailed,
    AlreadyLoaded,
    LoadFailed,
    UnsupportedArch,
    ModelNotLoaded,
    ForwardFailed,
    SnapshotNotFound,
    SnapshotFailed,
    RestoreFailed,
    AssembleFailed,
    ExtractFailed,
    VramQueryFailed,
    InsufficientMemory,
    /// The group was aborted while the request ran.
    Aborted,
    /// The request belongs to an epoch of the group that is over.
    Stale,
}

/// A message that can be logged: on one line, without anything that looks like a key, and at most [`MESSAGE_BYTES_MAX`]
/// long.
///
/// What looks like a key is a long run of letters and digits, with a digit among them. Slashes, dots and hyphens end a
/// run, so that paths and names of models stay readable.
pub fn clean(message: &str) -> String {
    let mut cleaned = String::new();
    let mut rest = message;
    while let Some(first) = rest.chars().next() {
        let run = rest.find(|c| !is_key_char(c)).unwrap_or(rest.len());
        if run == 0 {
            let shown = if is_unprintable(first) { ' ' } else { first };
            if !(shown == ' ' && (cleaned.is_empty() || cleaned.ends_with(' '))) {
                cleaned.push(shown);
            }
            rest = &rest[first.len_utf8()..];
        } else {
            let (word, after) = rest.split_at(run);
            if word.len() >= KEY_CHARS_MIN && word.contains(|c: char| c.is_ascii_digit()) {
                cleaned.push(LEFT_OUT);
            } else {
                cleaned.push_str(word);
            }
            rest = after;
        }
        if cleaned.len() > MESSAGE_BYTES_MAX {
            cleaned.truncate(cleaned.floor_char_boundary(MESSAGE_BYTES_MAX - LEFT_OUT.len_utf8()));
            cleaned.push(LEFT_OUT);
            break;
        }
    }
    cleaned.truncate(cleaned.trim_end().len());
    cleaned
}

fn is_key_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '+' | '=')
}

/// Control characters, Unicode's line and paragraph separators, and the characters that change the direction of text.
fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
