//! What an `error` reply says: a kind from a closed list, which decisions are taken on, and a message for people.

use serde::{Deserialize, Serialize};

/// The longest message of an `error`, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 512;

/// Letters and digits in a row, from which on they are taken for a key and not for a word.
const KEY_CHARS_MIN: usize = 20;

/// What stands where something was left out.
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
    /// The group was stopped while the work ran.
    Aborted,
    /// The request belongs to an epoch of the group that is over.
    Stale,
}

/// A message that can go into a log: on one line, without what looks like a key, and not longer than
/// [`MESSAGE_BYTES_MAX`].
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

/// Also the separators of lines and paragraphs that are no control characters, and what turns the direction of text.
fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
