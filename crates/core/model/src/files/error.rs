//! Errors of the file readers. Names from a file are truncated and escaped, because they may be long and contain anything.

use std::io;
use std::path::PathBuf;

/// A file, or a set of files that belong together, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("read {}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("read {}", path.display())]
    Format { path: PathBuf, source: FormatError },
    #[error("{} was cut short or could not be read while its model was loaded: put a whole copy in its place", path.display())]
    Damaged { path: PathBuf },
    #[error("{} has neither model.safetensors nor model.safetensors.index.json", folder.display())]
    NoWeights { folder: PathBuf },
    #[error("{} names the shard {shard:?}, which is not a file beside it", index.display())]
    ShardName { index: PathBuf, shard: String },
    #[error("{} names the shard {shard:?}, which cannot be opened; was the download complete?", index.display())]
    ShardMissing { index: PathBuf, shard: String, source: io::Error },
    #[error("{} places tensor {tensor:?} in {shard:?}, which does not hold it", index.display())]
    ShardTensor { index: PathBuf, shard: String, tensor: String },
    #[error("{} is part {} of {count} of a split model; open the part that ends in -00001-of-{count:05}.gguf", path.display(), no + 1)]
    SplitNotFirst { path: PathBuf, no: u64, count: u64 },
    #[error("{} is the first of {count} parts, so its name must end in -00001-of-{count:05}.gguf", path.display())]
    SplitName { path: PathBuf, count: u64 },
    #[error("{} does not say that it is part {} of {count}", path.display(), no + 1)]
    SplitPart { path: PathBuf, no: u64, count: u64 },
    #[error("the parts of {} hold {found} tensors, not the {stated} that it states", path.display())]
    SplitTensors { path: PathBuf, stated: u64, found: usize },
    #[error("tensor {tensor:?} is stored as {dtype:?}; supported are F32, F16 and BF16")]
    TensorDType { tensor: String, dtype: String },
}

/// The bytes of one file violate its format or exceed a limit.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    #[error("not a GGUF file: it does not start with \"GGUF\"")]
    Magic,
    #[error("a big-endian GGUF file, which is not supported")]
    BigEndian,
    #[error("GGUF version {0} is not supported; versions 2 and 3 are")]
    Version(u32),
    #[error("the file ends inside {0}")]
    Truncated(&'static str),
    #[error("{found} {what} are more than the limit of {max}")]
    Limit { what: &'static str, found: u64, max: u64 },
    #[error("{0} is not valid UTF-8")]
    Utf8(&'static str),
    #[error("two {what} have the name {name:?}")]
    Duplicate { what: &'static str, name: String },
    #[error("the value of {key:?} has the unknown type {code}")]
    ValueType { key: String, code: u32 },
    #[error("the value of {key:?} is an array of arrays, which is not supported")]
    NestedArray { key: String },
    #[error("the value of {key:?} is out of range")]
    ValueRange { key: String },
    #[error("the alignment {0} is not a power of two")]
    Alignment(u64),
    #[error("part of a model that is split over {0} files; open it by the path of its first part")]
    Split(u64),
    #[error("tensor {tensor:?} has the unsupported type number {code}")]
    TensorType { tensor: String, code: u32 },
    #[error("tensor {tensor:?} has {rank} dimensions; the limit is {max}")]
    Rank { tensor: String, rank: u32, max: usize },
    #[error("tensor {tensor:?} has the impossible shape {shape:?} for its format")]
    Shape { tensor: String, shape: Vec<usize> },
    #[error("tensor {tensor:?} starts at {offset}, which is not a multiple of the alignment {alignment}")]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    #[error("tensor {tensor:?} ends past the end of the file; was the download complete?")]
    OutOfBounds { tensor: String },
    #[error("tensors {first:?} and {second:?} overlap")]
    Overlap { first: String, second: String },
    #[error("tensor {tensor:?} has {found} bytes; its shape and format make {expected}")]
    Length { tensor: String, found: usize, expected: usize },
    #[error("the tensors cover {covered} of the {present} bytes of data; all must be covered")]
    Gap { covered: usize, present: usize },
    #[error("the header is not valid")]
    Header(#[source] serde_json::Error),
}

/// Truncates a name for use in an error message.
pub(crate) fn shown(name: &str) -> String {
    const CHARS_MAX: usize = 120;
    match name.char_indices().nth(CHARS_MAX) {
        None => name.to_owned(),
        Some((cut, _)) => format!("{}…", &name[..cut]),
    }
}
