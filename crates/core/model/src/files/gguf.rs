//! GGUF: metadata and tensors in one file, or in several parts in the same folder. Little-endian, versions 2 and 3, with
//! the tensor types of [`DType`].

mod cursor;
mod header;
mod split;
mod value;

pub use value::{Strings, Value};

use std::ops::Range;
use std::path::Path;

use types::DType;

use self::header::{Header, Metadata};
use super::map::FileBytes;
use super::sample::hash_sampled;
use super::tensors::Table;
use super::{FileError, FormatError, TensorView};

/// An open GGUF model. All tensor views are in bounds: `open` checks them.
pub struct Gguf {
    files: Vec<FileBytes>,
    metadata: Metadata,
    tensors: Table<DType>,
}

impl Gguf {
    /// Opens a file. For the first part of a split model, also opens the other parts, in the same folder.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let (files, Header { metadata, tensors }) = split::open_parts(path)?;
        let tensors = Table::new(tensors).map_err(|source| FileError::Format { path: path.to_owned(), source })?;
        Ok(Self { files, metadata, tensors })
    }

    /// Reads a file from memory. A part of a split model is refused.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, FormatError> {
        let Header { metadata, tensors } = Header::read(&bytes, 0)?;
        match split::count(&metadata) {
            1 => Ok(Self { files: vec![FileBytes::Owned(bytes)], metadata, tensors: Table::new(tensors)? }),
            count => Err(FormatError::Split(count)),
        }
    }

    /// A metadata value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// All metadata, sorted by key.
    pub fn metadata(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.metadata.iter()
    }

    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let tensor = self.tensors.get(name)?;
        let bytes = &self.files[tensor.file as usize][tensor.range.clone()];
        Some(TensorView { dtype: tensor.dtype, shape: tensor.shape.dims(), bytes })
    }

    /// The file that holds a tensor, and the tensor's bytes in it. `None` if there is no such tensor, or if the model was read
    /// from memory.
    pub fn location(&self, name: &str) -> Option<(&Path, Range<usize>)> {
        let tensor = self.tensors.get(name)?;
        Some((self.files[tensor.file as usize].path()?, tensor.range.clone()))
    }

    /// The names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.names()
    }

    /// Asks the operating system to start reading a tensor that will be needed soon.
    pub fn prefetch(&self, name: &str) {
        if let Some(tensor) = self.tensors.get(name) {
            self.files[tensor.file as usize].prefetch(tensor.range.clone());
        }
    }

    /// Drops the file's pages from this process's memory, after the weights have been packed. Views stay valid; reading one
    /// reads its pages from the file again.
    pub fn release(&self) {
        self.files.iter().for_each(FileBytes::release);
    }

    /// The file that holds a view of a tensor.
    pub(crate) fn file_of(&self, view: &[u8]) -> Option<&FileBytes> {
        self.files.iter().find(|file| file.holds(view))
    }

    /// Hashes the headers and samples of the tensors.
    pub(crate) fn hash_sampled(&self, hash: &mut blake3::Hasher) {
        hash_sampled(hash, &self.files, &self.tensors);
    }
}
