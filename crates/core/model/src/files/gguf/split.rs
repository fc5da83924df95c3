//! Models split into several GGUF files, `NAME-00001-of-00003.gguf` and so on. The first part has the metadata; each part
//! lists its own tensors.

use std::path::{Path, PathBuf};

use super::header::{Header, Metadata};
use super::value::Value;
use crate::files::FileError;
use crate::files::map::FileBytes;
use crate::files::tensors;

/// Opens the file at `path` and the parts that follow it. Returns the files, the metadata of the first and the tensors of
/// all.
pub fn open_parts(path: &Path) -> Result<(Vec<FileBytes>, Header), FileError> {
    let (bytes, Header { metadata, mut tensors }) = open_part(path, 0)?;
    let mut files = vec![bytes];
    let count = count(&metadata);
    if count != 1 {
        match part_number(&metadata) {
            Some(0) => {}
            Some(no) => return Err(FileError::SplitNotFirst { path: path.to_owned(), no, count }),
            None => return Err(FileError::SplitPart { path: path.to_owned(), no: 0, count }),
        }
        for no in 1..count {
            let path = part_path(path, no, count)?;
            let (bytes, part) = open_part(&path, no as u32)?;
            if self::count(&part.metadata) != count || part_number(&part.metadata) != Some(no) {
                return Err(FileError::SplitPart { path, no, count });
            }
            files.push(bytes);
            tensors.extend(part.tensors);
            tensors::limit(tensors.len()).map_err(|source| FileError::Format { path, source })?;
        }
        if let Some(stated) = metadata.get("split.tensors.count").and_then(Value::as_u64)
            && stated != tensors.len() as u64
        {
            return Err(FileError::SplitTensors { path: path.to_owned(), stated, found: tensors.len() });
        }
    }
    Ok((files, Header { metadata, tensors }))
}

/// The number of files of the model.
pub fn count(metadata: &Metadata) -> u64 {
    metadata.get("split.count").and_then(Value::as_u64).unwrap_or(1).max(1)
}

fn part_number(metadata: &Metadata) -> Option<u64> {
    metadata.get("split.no").and_then(Value::as_u64)
}

/// The path of a part, derived from the path of the first.
fn part_path(first: &Path, no: u64, count: u64) -> Result<PathBuf, FileError> {
    /// The most parts that the five digits of a name allow.
    const PARTS_MAX: u64 = 99_999;
    let stem = first
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.strip_suffix(&format!("-00001-of-{count:05}.gguf")))
        .filter(|_| count <= PARTS_MAX)
        .ok_or_else(|| FileError::SplitName { path: first.to_owned(), count })?;
    Ok(first.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", no + 1)))
}

fn open_part(path: &Path, file: u32) -> Result<(FileBytes, Header), FileError> {
    let bytes = FileBytes::map(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
    let header = Header::read(&bytes, file).map_err(|source| FileError::Format { path: path.to_owned(), source })?;
    Ok((bytes, header))
}
