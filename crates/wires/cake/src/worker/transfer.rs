//! `Transfer`: the files of a model as a master sends them, in chunks.
//!
//! Names from the network select what a file is for; they never become paths. A file comes whole and in order, is checked
//! chunk by chunk, and has exactly the size that was announced. The worker reads tensors from the headers of the weights,
//! so the index and the tokenizer are checked and dropped.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use ruzstd::decoding::StreamingDecoder;

use super::super::layer_name::excerpt;
use super::super::wire::CakeChunk;

/// Far more than any config.json, tokenizer.json or index.
const JSON_BYTES_MAX: u64 = 64 << 20;
/// Files of the largest model, with room.
const FILES_MAX: usize = 4096;
const NAME_BYTES_MAX: usize = 128;
const COPY_BYTES: usize = 64 << 10;
/// The memory that decompression may use. The level at which chunks are compressed needs less.
const WINDOW_BYTES_MAX: u64 = 8 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CakeTransferError {
    #[error("{0:?} is not the name of a model's file")]
    Name(String),
    #[error("{0:?} was sent twice")]
    Twice(String),
    #[error("more than {FILES_MAX} files were sent")]
    TooManyFiles,
    #[error("{name:?} of {bytes} bytes is too large, the limit is {max}")]
    TooLarge { name: String, bytes: u64, max: u64 },
    #[error("there is no room for {name:?} of {bytes} bytes")]
    NoRoom { name: String, bytes: u64 },
    #[error("a chunk of {name:?} begins at byte {found}, byte {expected} of {total} was due")]
    Order { name: String, found: u64, expected: u64, total: u64 },
    #[error("a chunk of {0:?} is damaged: its checksum differs")]
    Checksum(String),
    #[error("a chunk of {0:?} is empty")]
    Empty(String),
    #[error("a chunk of {0:?} is more than the rest of the file")]
    TooLong(String),
    #[error("a chunk of {name:?} cannot be decompressed: {why}")]
    Compression { name: String, why: String },
    #[error("{name:?} is cut off after {bytes} of {total} bytes")]
    CutOff { name: String, bytes: u64, total: u64 },
    #[error("no {0} was sent")]
    Missing(&'static str),
    #[error("write the model's files")]
    Io(#[from] io::Error),
}

/// Makes room for a file of this size. False if that cannot be done.
pub(super) type MakeRoom = dyn Fn(u64) -> io::Result<bool> + Send;

pub(super) struct Transfer {
    /// Exists, is empty, and belongs to this transfer.
    folder: PathBuf,
    /// Bytes that may still be written.
    bytes_left: u64,
    make_room: Box<MakeRoom>,
    current: Option<Current>,
    names: HashSet<String>,
    has_config: bool,
    weights: usize,
}

/// The file that is being received.
struct Current {
    name: String,
    written: u64,
    total: u64,
    /// `None`: what comes is dropped.
    file: Option<File>,
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Config,
    Weights,
    Unused,
}

impl Purpose {
    fn of(name: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        match name {
            "config.json" => Some(Self::Config),
            "tokenizer.json" | "model.safetensors.index.json" => Some(Self::Unused),
            _ if name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && name.bytes().all(is_plain) => {
                name.ends_with(".safetensors").then_some(Self::Weights)
            }
            _ => None,
        }
    }
}

/// The path of config.json in a folder of received files.
pub(super) fn config_path(folder: &Path) -> PathBuf {
    folder.join("config.json")
}

/// The path of a file with weights in a folder of received files. The number counts from 0, in the order of arrival.
pub(super) fn weights_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("weights-{number:05}.safetensors"))
}

impl Transfer {
    pub fn new(folder: PathBuf, bytes_max: u64, make_room: Box<MakeRoom>) -> Self {
        Self {
            folder,
            bytes_left: bytes_max,
            make_room,
            current: None,
            names: HashSet::new(),
            has_config: false,
            weights: 0,
        }
    }

    pub fn receive(&mut self, chunk: &CakeChunk<'_>) -> Result<(), CakeTransferError> {
        let name = || excerpt(chunk.file);
        if self.current.as_ref().is_none_or(|current| current.name != chunk.file) {
            self.begin(chunk)?;
        }
        let current = self.current.as_mut().ok_or_else(|| CakeTransferError::Name(name()))?;
        if (chunk.offset, chunk.total_bytes) != (current.written, current.total) || current.is_complete() {
            let (found, expected, total) = (chunk.offset, current.written, current.total);
            return Err(CakeTransferError::Order { name: name(), found, expected, total });
        }
        let is_damaged = chunk.check.is_some_and(|check| crc32fast::hash(chunk.data) != check.crc);
        if is_damaged {
            return Err(CakeTransferError::Checksum(name()));
        }
        match chunk.check {
            Some(check) if check.is_compressed => current.decompress(chunk.data),
            _ => current.write(chunk.data),
        }
    }

    /// Finishes the current file and begins the one that a chunk names.
    fn begin(&mut self, chunk: &CakeChunk<'_>) -> Result<(), CakeTransferError> {
        self.end()?;
        let (name, total) = (chunk.file, chunk.total_bytes);
        let purpose = Purpose::of(name).ok_or_else(|| CakeTransferError::Name(excerpt(name)))?;
        if self.names.len() == FILES_MAX {
            return Err(CakeTransferError::TooManyFiles);
        }
        if !self.names.insert(name.to_owned()) {
            return Err(CakeTransferError::Twice(name.to_owned()));
        }
        let max = if purpose == Purpose::Weights { self.bytes_left } else { JSON_BYTES_MAX.min(self.bytes_left) };
        self.bytes_left = self
            .bytes_left
            .checked_sub(total)
            .filter(|_| total <= max)
            .ok_or_else(|| CakeTransferError::TooLarge { name: name.to_owned(), bytes: total, max })?;
        if purpose != Purpose::Unused && !(self.make_room)(total)? {
            return Err(CakeTransferError::NoRoom { name: name.to_owned(), bytes: total });
        }
        let file = match purpose {
            Purpose::Config => Some(config_path(&self.folder)),
            Purpose::Weights => Some(weights_path(&self.folder, self.weights)),
            Purpose::Unused => None,
        };
        let file = file.map(File::create_new).transpose()?;
        self.has_config |= purpose == Purpose::Config;
        self.weights += usize::from(purpose == Purpose::Weights);
        self.current = Some(Current { name: name.to_owned(), written: 0, total, file });
        Ok(())
    }

    /// Checks that the current file is complete, and closes it.
    fn end(&mut self) -> Result<(), CakeTransferError> {
        let Some(Current { name, written, total, file }) = self.current.take() else { return Ok(()) };
        if written != total {
            return Err(CakeTransferError::CutOff { name, bytes: written, total });
        }
        Ok(file.map_or(Ok(()), |file| file.sync_all())?)
    }

    /// All files were sent: returns the folder, which has a config.json and weights.
    pub fn finish(mut self) -> Result<PathBuf, CakeTransferError> {
        self.end()?;
        if !self.has_config {
            return Err(CakeTransferError::Missing("config.json"));
        }
        if self.weights == 0 {
            return Err(CakeTransferError::Missing("weights"));
        }
        Ok(self.folder)
    }
}

impl Current {
    fn is_complete(&self) -> bool {
        self.written == self.total
    }

    fn write(&mut self, data: &[u8]) -> Result<(), CakeTransferError> {
        if data.is_empty() {
            return Err(CakeTransferError::Empty(self.name.clone()));
        }
        let written = self.written + data.len() as u64;
        if written > self.total {
            return Err(CakeTransferError::TooLong(self.name.clone()));
        }
        self.written = written;
        Ok(self.file.as_mut().map_or(Ok(()), |file| file.write_all(data))?)
    }

    /// Decompresses piece by piece, and stops at the end of the file, whatever more would come.
    fn decompress(&mut self, data: &[u8]) -> Result<(), CakeTransferError> {
        let failed = |name: &str, why: String| CakeTransferError::Compression { name: name.to_owned(), why };
        let mut decoder = StreamingDecoder::new_with_max_window_size(data, WINDOW_BYTES_MAX)
            .map_err(|error| failed(&self.name, error.to_string()))?;
        let mut bytes = vec![0; COPY_BYTES];
        let before = self.written;
        loop {
            let count = decoder.read(&mut bytes).map_err(|error| failed(&self.name, error.to_string()))?;
            if count == 0 {
                break;
            }
            self.write(&bytes[..count])?;
        }
        if !decoder.get_ref().is_empty() {
            return Err(failed(&self.name, "bytes follow the compressed ones".to_owned()));
        }
        if self.written == before { Err(CakeTransferError::Empty(self.name.clone())) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests;
