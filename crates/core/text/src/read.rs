//! Reads files with a size limit.

use crate::tokenizer::TextLoadError;
use std::io::Read;
use std::path::Path;

/// Reads a text file of at most `bytes_max`.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<String, TextLoadError> {
    let io = |source| TextLoadError::Io { path: path.to_owned(), source };
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(io)?;
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(io)?;
    if text.len() as u64 > bytes_max {
        return Err(TextLoadError::TooLong { path: path.to_owned(), bytes_max });
    }
    Ok(text)
}
