//! Safetensors: one file, a folder with `model.safetensors`, or the shards listed in `model.safetensors.index.json`.
//!
//! The `safetensors` crate refuses a whole file if one tensor has an unknown number format, and keeps the last of two
//! tensors with the same name. Here an unknown format is an error only for the tensor that is requested, and duplicate names
//! are an error.
//!
//! Shards that an index lists may be missing: who needs a part of a model fetches only the files with its tensors. Asking for a tensor
//! of such a file is an error that names the file.

mod header;
mod index;

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use types::DType;

use self::index::Index;
use super::error::shown;
use super::map::FileBytes;
use super::sample::hash_sampled;
use super::tensors::{Table, Tensor};
use super::{FileError, FormatError, TensorView};

/// A supported number format, or the name of an unsupported one.
type Stored = Result<DType, Box<str>>;

/// An open safetensors model. All tensor views are in bounds: `open` checks them.
pub struct SafeTensors {
    /// Those that are there.
    files: Vec<FileBytes>,
    tensors: Table<Stored>,
    shards: Option<Shards>,
}

/// The shards that an index lists.
struct Shards {
    index: PathBuf,
    names: Vec<String>,
    /// The tensors of the shards that are missing, by name, with the positions of their shards in `names`.
    missing: Vec<(String, usize)>,
}

impl SafeTensors {
    /// Opens a `.safetensors` file, an index with the shards in its folder, or a folder that contains either. If a folder
    /// contains both, the single file is used, as in transformers.
    pub fn open(path: &Path) -> Result<Self, FileError> {
        const SINGLE: &str = "model.safetensors";
        const INDEX: &str = "model.safetensors.index.json";
        if path.is_dir() {
            let (single, index) = (path.join(SINGLE), path.join(INDEX));
            return match (single.exists(), index.exists()) {
                (true, _) => Self::open_single(&single),
                (false, true) => Self::open_shards(&index),
                (false, false) => Err(FileError::NoWeights { folder: path.to_owned() }),
            };
        }
        match path.extension().is_some_and(|extension| extension == "json") {
            true => Self::open_shards(path),
            false => Self::open_single(path),
        }
    }

    /// Opens the files of one model. The model has the tensors of all files.
    pub fn open_all(paths: &[PathBuf]) -> Result<Self, FileError> {
        let format = |path: &Path, source| FileError::Format { path: path.to_owned(), source };
        let (mut files, mut tensors) = (Vec::with_capacity(paths.len()), Vec::new());
        for (file, path) in paths.iter().enumerate() {
            let bytes = FileBytes::map(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
            tensors.extend(header::read(&bytes, file as u32).map_err(|error| format(path, error))?);
            files.push(bytes);
        }
        let last = paths.last().map_or(Path::new(""), PathBuf::as_path);
        let tensors = Table::new(tensors).map_err(|error| format(last, error))?;
        Ok(Self { files, tensors, shards: None })
    }

    /// Reads a single file from memory.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, FormatError> {
        Self::new(FileBytes::Owned(bytes))
    }

    /// A view of a tensor; `None` if there is no such tensor, an error if its number format is not supported or its file is
    /// missing.
    pub fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, FileError> {
        let Some(tensor) = self.tensors.get(name) else {
            return self.shards.as_ref().map_or(Ok(None), |shards| shards.missing_error(name).map_or(Ok(None), Err));
        };
        let dtype = match &tensor.dtype {
            Ok(dtype) => *dtype,
            Err(other) => return Err(FileError::TensorDType { tensor: shown(name), dtype: shown(other) }),
        };
        let bytes = &self.files[tensor.file as usize][tensor.range.clone()];
        Ok(Some(TensorView { dtype, shape: tensor.shape.dims(), bytes }))
    }

    /// The file that holds a tensor, and the tensor's bytes in it. `None` if there is no such tensor, or if the model was read
    /// from memory.
    pub fn location(&self, name: &str) -> Option<(&Path, Range<usize>)> {
        let tensor = self.tensors.get(name)?;
        Some((self.files[tensor.file as usize].path()?, tensor.range.clone()))
    }

    /// The names of the tensors whose files are there, sorted.
    pub fn tensor_names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.names()
    }

    /// The names of the tensors whose files are missing, sorted.
    pub fn missing_names(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().flat_map(|shards| shards.missing.iter().map(|(name, _)| &**name))
    }

    /// The file of a tensor, if it is missing.
    pub fn missing_file(&self, name: &str) -> Option<&str> {
        self.shards.as_ref()?.missing_file(name)
    }

    /// The names of the files that the index lists, if the model was opened by one. Some may be missing.
    pub fn shards(&self) -> Option<&[String]> {
        self.shards.as_ref().map(|shards| &*shards.names)
    }

    /// Asks the operating system to start reading a tensor that will be needed soon.
    pub fn prefetch(&self, name: &str) {
        if let Some(tensor) = self.tensors.get(name) {
            self.files[tensor.file as usize].prefetch(tensor.range.clone());
        }
    }

    /// Drops the files' pages from this process's memory, after the weights have been packed. Views stay valid; reading one
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

    fn new(bytes: FileBytes) -> Result<Self, FormatError> {
        let tensors = Table::new(header::read(&bytes, 0)?)?;
        Ok(Self { files: vec![bytes], tensors, shards: None })
    }

    fn open_single(path: &Path) -> Result<Self, FileError> {
        let bytes = FileBytes::map(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
        Self::new(bytes).map_err(|source| FileError::Format { path: path.to_owned(), source })
    }

    /// Opens the shards of an index that are there. Tensors that are not listed in the index are ignored.
    fn open_shards(path: &Path) -> Result<Self, FileError> {
        let index = Index::read(path)?;
        let format = |path: &Path, source| FileError::Format { path: path.to_owned(), source };
        let mut files = Vec::with_capacity(index.shards.len());
        let mut tensors: Vec<Tensor<Stored>> = Vec::with_capacity(index.tensors.len());
        let mut missing = Vec::new();
        for (number, shard) in index.shards.iter().enumerate() {
            let shard_path = path.with_file_name(shard);
            let bytes = match FileBytes::map(&shard_path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    missing.extend(index.tensors_of(number).map(|name| (name.to_owned(), number)));
                    continue;
                }
                bytes => bytes.map_err(|source| FileError::ShardMissing {
                    index: path.to_owned(),
                    shard: shown(shard),
                    source,
                })?,
            };
            let file = files.len() as u32;
            let held = header::read(&bytes, file).and_then(Table::new).map_err(|e| format(&shard_path, e))?;
            for name in index.tensors_of(number) {
                let tensor = held.get(name).ok_or_else(|| FileError::ShardTensor {
                    index: path.to_owned(),
                    shard: shown(shard),
                    tensor: shown(name),
                })?;
                tensors.push(tensor.clone());
            }
            files.push(bytes);
        }
        let tensors = Table::new(tensors).map_err(|e| format(path, e))?;
        let mut known: BTreeSet<&str> = tensors.names().collect();
        if let Some((name, _)) = missing.iter().find(|(name, _)| !known.insert(name)) {
            return Err(format(path, FormatError::Duplicate { what: "tensors", name: shown(name) }));
        }
        missing.sort_unstable();
        let shards = Shards { index: path.to_owned(), names: index.shards, missing };
        Ok(Self { files, tensors, shards: Some(shards) })
    }
}

impl Shards {
    fn missing_file(&self, tensor: &str) -> Option<&str> {
        let at = self.missing.binary_search_by(|(name, _)| (**name).cmp(tensor)).ok()?;
        Some(&self.names[self.missing[at].1])
    }

    /// The error of whoever needs a tensor whose file is missing.
    fn missing_error(&self, tensor: &str) -> Option<FileError> {
        let shard = shown(self.missing_file(tensor)?);
        Some(FileError::ShardMissing { index: self.index.clone(), shard, source: io::ErrorKind::NotFound.into() })
    }
}
