//! `Checkpoint`: the opened files of a model, and its `Description`. Only this file knows the format of the files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value as Json;

use types::DType;

use crate::architecture::Tensor;
use crate::description::Description;
use crate::digest::CheckpointDigest;
use crate::files::map::FileBytes;
use crate::files::{FileError, Gguf, SafeTensors, TensorView, Value};
use crate::load::LoadError;
use crate::manifest::{Manifest, ManifestTensors, Source, TensorEntry, can_list};
use crate::metadata::GgufSource as _;
use crate::part::ModelPart;
use crate::tensor_names::{End, TensorNames};

/// Far more than any config.json, which has a few kilobytes.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// The tensors of a model that are stored in one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredFormat {
    pub dtype: DType,
    pub tensors: usize,
    pub elements: u64,
    pub bytes: u64,
}

pub struct Checkpoint {
    tensors: StoredTensors,
    names: TensorNames,
    /// The text of config.json, if it has one.
    config: Option<String>,
    description: Description,
    embedding_as_stored: bool,
    digest: OnceLock<CheckpointDigest>,
}

enum StoredTensors {
    SafeTensors(SafeTensors),
    Gguf(Gguf),
    /// One file for each tensor.
    Manifest(ManifestTensors),
}

/// What is known of a tensor without reading it.
struct TensorFacts<'a> {
    name: &'a str,
    dtype: DType,
    shape: &'a [usize],
    bytes: u64,
}

impl Checkpoint {
    /// Opens a folder with config.json and safetensors, or a .gguf file. Shards may be missing ([`Self::missing_files`]).
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let kind = fs::metadata(path).map_err(|source| LoadError::Open { path: path.to_owned(), source })?;
        if kind.is_dir() { Self::open_folder(path) } else { Self::open_file(path) }
    }

    /// Opens a model from the text of a config.json and the paths of its safetensors files.
    pub fn from_parts(config: &str, files: &[PathBuf]) -> Result<Self, LoadError> {
        let path = || PathBuf::from("config.json");
        if config.len() as u64 > CONFIG_BYTES_MAX {
            return Err(LoadError::ConfigTooLarge { path: path() });
        }
        let json = serde_json::from_str(config).map_err(|source| LoadError::ConfigSyntax { path: path(), source })?;
        Ok(Self::new(Description::from_config(&json)?, SafeTensors::open_all(files)?, config.to_owned()))
    }

    /// Opens the part of a model that a manifest describes. `open` returns the path of the file that holds a tensor and nothing
    /// else; it is called for the tensors that the part needs ([`Manifest::tensors_of`]). Whether the bytes have the hash that the
    /// manifest states is for the caller to check, before or in `open`.
    pub fn from_manifest(
        manifest: &Manifest,
        part: ModelPart,
        open: impl FnMut(usize, &TensorEntry) -> io::Result<PathBuf>,
    ) -> Result<Self, LoadError> {
        let config = match manifest.source() {
            Source::Config(text) => Some(text.clone()),
            Source::Gguf { .. } => None,
        };
        Ok(Self {
            tensors: StoredTensors::Manifest(ManifestTensors::open(manifest, part, open)?),
            names: manifest.names(),
            config,
            description: manifest.description().clone(),
            embedding_as_stored: false,
            digest: OnceLock::new(),
        })
    }

    /// The same with a folder in which each tensor is a file that is named by its hash ([`TensorEntry::file_name`]).
    pub fn from_tensor_folder(manifest: &Manifest, part: ModelPart, folder: &Path) -> Result<Self, LoadError> {
        Self::from_manifest(manifest, part, |_, tensor| match tensor.file_name() {
            Some(name) => Ok(folder.join(name)),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, "the manifest does not state its hash")),
        })
    }

    /// What another machine needs to load a part of this model, without hashes. Fails if the model has more tensors, or a longer
    /// description, than a manifest may have. Tensors in formats that are not supported are left out.
    pub fn manifest(&self) -> Result<Manifest, LoadError> {
        let source = match &self.tensors {
            StoredTensors::Manifest(tensors) => return Ok(tensors.manifest().clone()),
            StoredTensors::SafeTensors(_) => Source::Config(self.config.clone().unwrap_or_default()),
            StoredTensors::Gguf(file) => gguf_source(file)?,
        };
        let listed = self.tensors().filter(|tensor| can_list(tensor.name));
        let entry = |TensorFacts { name, dtype, shape, bytes }: TensorFacts<'_>| TensorEntry {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            bytes,
            hash: None,
        };
        Ok(Manifest::new(source, listed.map(entry).collect())?)
    }

    /// The bytes of a tensor that the manifest of this checkpoint lists. Fails if its file is known to have lost bytes.
    pub fn tensor_bytes(&self, tensor: &TensorEntry) -> Result<&[u8], LoadError> {
        let view = self.tensor(&tensor.name)?.ok_or_else(|| LoadError::Missing { tensor: tensor.name.clone() })?;
        self.check_of([view.bytes])?;
        Ok(view.bytes)
    }

    /// The file that holds a tensor, and the tensor's bytes in it.
    pub fn tensor_location(&self, tensor: &TensorEntry) -> Option<(&Path, Range<usize>)> {
        match &self.tensors {
            StoredTensors::SafeTensors(tensors) => tensors.location(&tensor.name),
            StoredTensors::Gguf(file) => file.location(&tensor.name),
            StoredTensors::Manifest(tensors) => tensors.location(&tensor.name),
        }
    }

    /// Keeps the embedding, and a head that is tied to it, in the stored format, regardless of
    /// [`LoadOptions::keep`](crate::LoadOptions::keep).
    pub fn with_embedding_as_stored(self) -> Self {
        Self { embedding_as_stored: true, ..self }
    }

    pub(crate) fn has_embedding_as_stored(&self) -> bool {
        self.embedding_as_stored
    }

    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The GGUF file, which also contains the tokenizer and the chat template.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.tensors {
            StoredTensors::Gguf(file) => Some(file),
            StoredTensors::SafeTensors(_) | StoredTensors::Manifest(_) => None,
        }
    }

    /// Whether any tensor is stored in a format for which `format` returns true.
    pub fn has(&self, format: impl Fn(DType) -> bool) -> bool {
        self.tensors().any(|tensor| format(tensor.dtype))
    }

    /// The formats in which tensors are stored, the one with most bytes first.
    pub fn stored_formats(&self) -> Vec<StoredFormat> {
        let mut formats: Vec<StoredFormat> = Vec::new();
        for TensorFacts { dtype, shape, bytes, .. } in self.tensors() {
            let at = formats.iter().position(|format| format.dtype == dtype).unwrap_or_else(|| {
                formats.push(StoredFormat { dtype, tensors: 0, elements: 0, bytes: 0 });
                formats.len() - 1
            });
            formats[at].tensors += 1;
            formats[at].elements += shape.iter().map(|&dim| dim as u64).product::<u64>();
            formats[at].bytes += bytes;
        }
        formats.sort_by_key(|format| std::cmp::Reverse(format.bytes));
        formats
    }

    /// All tensors, except those in formats that are not supported and those whose files are missing.
    fn tensors(&self) -> Box<dyn Iterator<Item = TensorFacts<'_>> + '_> {
        fn facts<'a>(name: &'a str, TensorView { dtype, shape, bytes }: TensorView<'a>) -> TensorFacts<'a> {
            TensorFacts { name, dtype, shape, bytes: bytes.len() as u64 }
        }
        match &self.tensors {
            StoredTensors::SafeTensors(tensors) => {
                Box::new(tensors.tensor_names().filter_map(|name| Some(facts(name, tensors.tensor(name).ok()??))))
            }
            StoredTensors::Gguf(file) => {
                Box::new(file.tensor_names().filter_map(|name| Some(facts(name, file.tensor(name)?))))
            }
            StoredTensors::Manifest(tensors) => Box::new(tensors.manifest().tensors().iter().map(|tensor| {
                let TensorEntry { name, dtype, shape, bytes, .. } = tensor;
                TensorFacts { name, dtype: *dtype, shape, bytes: *bytes }
            })),
        }
    }

    /// Identifies the model's files: copies have the same digest. It covers config.json, the headers of the files (the names,
    /// formats, shapes and positions of tensors, and all metadata of GGUF) and samples of every tensor: a few kilobytes at its
    /// start, at its end and at even distances between. So it takes milliseconds, whatever the size of the model.
    ///
    /// It tells other weights from these: another model, a fine-tuned, merged or newly quantised one, a file that was replaced
    /// or is incomplete. It misses a change that lies between the samples alone, as a flipped bit of a bad disk or the work of
    /// somebody who knows the samples. Against these, whole files have to be hashed. It also differs if the same weights are
    /// stored in other files.
    ///
    /// Of a model with shards it covers those that are there. Of a checkpoint that was opened from a manifest, it identifies the manifest with the hashes in it, not the files.
    ///
    /// Computed once; the first call reads the files.
    pub fn digest(&self) -> CheckpointDigest {
        *self.digest.get_or_init(|| match &self.tensors {
            StoredTensors::SafeTensors(tensors) => {
                let config = self.config.as_ref().map(|text| blake3::hash(text.as_bytes()));
                CheckpointDigest::new(config, |hash| tensors.hash_sampled(hash))
            }
            StoredTensors::Gguf(file) => CheckpointDigest::new(None, |hash| file.hash_sampled(hash)),
            StoredTensors::Manifest(tensors) => tensors.manifest().digest(),
        })
    }

    /// Drops the files' pages from memory, after the weights have been packed.
    pub fn release(&self) {
        match &self.tensors {
            StoredTensors::SafeTensors(tensors) => tensors.release(),
            StoredTensors::Gguf(file) => file.release(),
            StoredTensors::Manifest(tensors) => tensors.release(),
        }
    }

    /// Drops at least the pages of these tensors, or parts of tensors, from memory.
    pub(crate) fn release_of<'a>(&self, views: impl Iterator<Item = &'a [u8]>) {
        match &self.tensors {
            // It may have thousands of files.
            StoredTensors::Manifest(tensors) => tensors.release_of(views),
            _ => self.release(),
        }
    }

    /// Fails if a file that holds one of these tensors, or parts of tensors, lost bytes before they were read.
    pub(crate) fn check_of<'a>(&self, views: impl IntoIterator<Item = &'a [u8]>) -> Result<(), FileError> {
        for view in views {
            let file = match &self.tensors {
                StoredTensors::SafeTensors(tensors) => tensors.file_of(view),
                StoredTensors::Gguf(file) => file.file_of(view),
                StoredTensors::Manifest(tensors) => tensors.file_of(view),
            };
            file.map_or(Ok(()), FileBytes::check)?;
        }
        Ok(())
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        match &self.tensors {
            StoredTensors::SafeTensors(tensors) => Ok(tensors.tensor(name)?),
            StoredTensors::Gguf(file) => Ok(file.tensor(name)),
            StoredTensors::Manifest(tensors) => tensors.tensor(name),
        }
    }

    /// The format of a tensor, also of one that was not opened; `None` if the model does not have it, or its file is missing.
    pub(crate) fn dtype(&self, name: &str) -> Result<Option<DType>, LoadError> {
        match &self.tensors {
            StoredTensors::Manifest(tensors) => Ok(tensors.dtype(name)),
            StoredTensors::SafeTensors(tensors) if tensors.missing_file(name).is_some() => Ok(None),
            _ => Ok(self.tensor(name)?.map(|view| view.dtype)),
        }
    }

    /// Whether the model has a tensor, be its file missing or not.
    pub(crate) fn has_tensor(&self, name: &str) -> Result<bool, LoadError> {
        let is_missing =
            || matches!(&self.tensors, StoredTensors::SafeTensors(tensors) if tensors.missing_file(name).is_some());
        Ok(self.dtype(name)?.is_some() || is_missing())
    }

    /// The files, of those that the model's index lists, which a part needs and which are missing; sorted.
    pub fn missing_files(&self, part: ModelPart) -> Result<Vec<String>, LoadError> {
        let StoredTensors::SafeTensors(tensors) = &self.tensors else { return Ok(Vec::new()) };
        let mut files = BTreeSet::new();
        self.names.needed(&self.description, part, &mut |name| {
            files.extend(tensors.missing_file(&name).map(str::to_owned));
            Ok(())
        })?;
        Ok(files.into_iter().collect())
    }

    /// The files that the model's index lists, missing ones too; `None` if it has no index.
    pub fn shards(&self) -> Option<&[String]> {
        match &self.tensors {
            StoredTensors::SafeTensors(tensors) => tensors.shards(),
            StoredTensors::Gguf(_) | StoredTensors::Manifest(_) => None,
        }
    }

    /// The text of config.json, if the model has one.
    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }

    /// The name of a layer's tensor in this file, with `{}` for the expert if each expert has its own tensor.
    pub(crate) fn layer_name(&self, layer: usize, tensor: &Tensor) -> String {
        self.names.layer(layer, tensor)
    }

    pub(crate) fn global_name(&self, end: End) -> String {
        self.names.global(end)
    }

    fn open_folder(folder: &Path) -> Result<Self, LoadError> {
        let config = folder.join("config.json");
        if !config.exists() {
            return Err(match gguf_within(folder) {
                Some(file) => LoadError::FolderOfGguf { folder: folder.to_owned(), file },
                None => LoadError::NoConfig { folder: folder.to_owned() },
            });
        }
        let (config, text) = read_config(&config)?;
        Ok(Self::new(Description::from_config(&config)?, SafeTensors::open(folder)?, text))
    }

    fn new(description: Description, tensors: SafeTensors, config: String) -> Self {
        Self {
            names: TensorNames::hugging_face(|| tensors.tensor_names().chain(tensors.missing_names())),
            tensors: StoredTensors::SafeTensors(tensors),
            config: Some(config),
            description,
            embedding_as_stored: false,
            digest: OnceLock::new(),
        }
    }

    fn open_file(path: &Path) -> Result<Self, LoadError> {
        if path.extension().is_some_and(|extension| extension == "safetensors" || extension == "json") {
            return Err(LoadError::FileOfFolder { path: path.to_owned() });
        }
        let file = Gguf::open(path)?;
        let description = Description::from_gguf(&file)?;
        Ok(Self {
            tensors: StoredTensors::Gguf(file),
            names: TensorNames::Gguf,
            config: None,
            description,
            embedding_as_stored: false,
            digest: OnceLock::new(),
        })
    }
}

/// What a description is read from: the metadata of the architecture, and the values of one tensor.
fn gguf_source(file: &Gguf) -> Result<Source, LoadError> {
    const ARCHITECTURE: &str = "general.architecture";
    let prefix = file.get(ARCHITECTURE).and_then(Value::as_str).map(|name| format!("{name}."));
    let is_read = |key: &str| key == ARCHITECTURE || prefix.as_ref().is_some_and(|prefix| key.starts_with(prefix));
    let metadata = file.metadata().filter(|(key, value)| is_read(key) && value.as_strings().is_none());
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value.clone())).collect();
    Ok(Source::Gguf { metadata, rope_divisors: file.rope_divisors()? })
}

/// The value of a config.json, and its text.
fn read_config(path: &Path) -> Result<(Json, String), LoadError> {
    let open = |source| LoadError::Open { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    fs::File::open(path).map_err(open)?.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(open)?;
    if bytes.len() as u64 > CONFIG_BYTES_MAX {
        return Err(LoadError::ConfigTooLarge { path: path.to_owned() });
    }
    let text = String::from_utf8(bytes).map_err(|error| open(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    let config = serde_json::from_str(&text);
    let config = config.map_err(|source| LoadError::ConfigSyntax { path: path.to_owned(), source })?;
    Ok((config, text))
}

fn gguf_within(folder: &Path) -> Option<String> {
    let mut names: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    names.iter().filter_map(|name| name.to_str()).find(|name| name.ends_with(".gguf")).map(str::to_owned)
}
