//! `Checkpoint`: the opened files of a model, and its `Description`. Only this file knows the file format and the names of
//! tensors in it.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value as Json;

use types::DType;

use crate::architecture::Tensor;
use crate::description::Description;
use crate::digest::CheckpointDigest;
use crate::files::{Gguf, SafeTensors, TensorView};
use crate::load::LoadError;

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
    files: Files,
    description: Description,
    embedding_as_stored: bool,
    digest: OnceLock<CheckpointDigest>,
}

enum Files {
    /// `prefix` precedes `layers.0.…`, `embed_tokens.weight` and `norm.weight`.
    Folder {
        tensors: SafeTensors,
        prefix: &'static str,
        /// The hash of config.json.
        config: blake3::Hash,
    },
    Gguf(Gguf),
}

/// The tensors that are not part of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Embedding,
    Norm,
    Head,
}

impl Checkpoint {
    /// Opens a folder with config.json and safetensors, or a .gguf file.
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
        let hash = blake3::hash(config.as_bytes());
        let config = serde_json::from_str(config).map_err(|source| LoadError::ConfigSyntax { path: path(), source })?;
        Ok(Self::new(Description::from_config(&config)?, SafeTensors::open_all(files)?, hash))
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
        match &self.files {
            Files::Gguf(file) => Some(file),
            Files::Folder { .. } => None,
        }
    }

    /// Whether any tensor is stored in a format for which `format` returns true.
    pub fn has(&self, format: impl Fn(DType) -> bool) -> bool {
        self.tensors().any(|tensor| format(tensor.dtype))
    }

    /// The formats in which tensors are stored, the one with most bytes first.
    pub fn stored_formats(&self) -> Vec<StoredFormat> {
        let mut formats: Vec<StoredFormat> = Vec::new();
        for TensorView { dtype, shape, bytes } in self.tensors() {
            let at = formats.iter().position(|format| format.dtype == dtype).unwrap_or_else(|| {
                formats.push(StoredFormat { dtype, tensors: 0, elements: 0, bytes: 0 });
                formats.len() - 1
            });
            formats[at].tensors += 1;
            formats[at].elements += shape.iter().map(|&dim| dim as u64).product::<u64>();
            formats[at].bytes += bytes.len() as u64;
        }
        formats.sort_by_key(|format| std::cmp::Reverse(format.bytes));
        formats
    }

    /// All tensors, except those in formats that are not supported.
    fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        let names: Box<dyn Iterator<Item = &str>> = match &self.files {
            Files::Folder { tensors, .. } => Box::new(tensors.tensor_names()),
            Files::Gguf(file) => Box::new(file.tensor_names()),
        };
        names.filter_map(|name| self.tensor(name).ok().flatten())
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
    /// Computed once; the first call reads the files.
    pub fn digest(&self) -> CheckpointDigest {
        *self.digest.get_or_init(|| match &self.files {
            Files::Folder { tensors, config, .. } => {
                CheckpointDigest::new(Some(*config), |hash| tensors.hash_sampled(hash))
            }
            Files::Gguf(file) => CheckpointDigest::new(None, |hash| file.hash_sampled(hash)),
        })
    }

    /// Drops the files' pages from memory, after the weights have been packed.
    pub fn release(&self) {
        match &self.files {
            Files::Folder { tensors, .. } => tensors.release(),
            Files::Gguf(file) => file.release(),
        }
    }

    pub(crate) fn tensor(&self, name: &str) -> Result<Option<TensorView<'_>>, LoadError> {
        match &self.files {
            Files::Folder { tensors, .. } => Ok(tensors.tensor(name)?),
            Files::Gguf(file) => Ok(file.tensor(name)),
        }
    }

    /// The name of a layer's tensor in this file, with `{}` for the expert if each expert has its own tensor.
    pub(crate) fn layer_name(&self, layer: usize, tensor: &Tensor) -> String {
        match &self.files {
            Files::Folder { prefix, .. } => format!("{prefix}layers.{layer}.{}", tensor.hf),
            Files::Gguf(_) => format!("blk.{layer}.{}", tensor.gguf),
        }
    }

    pub(crate) fn global_name(&self, end: End) -> String {
        match (&self.files, end) {
            (Files::Gguf(_), End::Embedding) => "token_embd.weight".into(),
            (Files::Gguf(_), End::Norm) => "output_norm.weight".into(),
            (Files::Gguf(_), End::Head) => "output.weight".into(),
            (Files::Folder { prefix, .. }, End::Embedding) => format!("{prefix}embed_tokens.weight"),
            (Files::Folder { prefix, .. }, End::Norm) => format!("{prefix}norm.weight"),
            (Files::Folder { prefix: NESTED, .. }, End::Head) => "language_model.lm_head.weight".into(),
            (Files::Folder { .. }, End::Head) => "lm_head.weight".into(),
        }
    }

    fn open_folder(folder: &Path) -> Result<Self, LoadError> {
        let config = folder.join("config.json");
        if !config.exists() {
            return Err(match gguf_within(folder) {
                Some(file) => LoadError::FolderOfGguf { folder: folder.to_owned(), file },
                None => LoadError::NoConfig { folder: folder.to_owned() },
            });
        }
        let (config, hash) = read_config(&config)?;
        Ok(Self::new(Description::from_config(&config)?, SafeTensors::open(folder)?, hash))
    }

    fn new(description: Description, tensors: SafeTensors, config: blake3::Hash) -> Self {
        let prefix = prefix_of(&tensors);
        let files = Files::Folder { tensors, prefix, config };
        Self { files, description, embedding_as_stored: false, digest: OnceLock::new() }
    }

    fn open_file(path: &Path) -> Result<Self, LoadError> {
        if path.extension().is_some_and(|extension| extension == "safetensors" || extension == "json") {
            return Err(LoadError::FileOfFolder { path: path.to_owned() });
        }
        let file = Gguf::open(path)?;
        let description = Description::from_gguf(&file)?;
        Ok(Self { files: Files::Gguf(file), description, embedding_as_stored: false, digest: OnceLock::new() })
    }
}

/// Gemma 3's prefix in the hub's files of the multimodal models.
const NESTED: &str = "language_model.model.";

/// The prefix of the text model's tensors. Multimodal checkpoints nest it one level deeper.
fn prefix_of(tensors: &SafeTensors) -> &'static str {
    let holds = |prefix: &&str| tensors.tensor_names().any(|name| name.starts_with(&format!("{prefix}layers.")));
    ["model.", "model.language_model.", NESTED, ""].into_iter().find(holds).unwrap_or("model.")
}

/// The value of a config.json, and the hash of its bytes.
fn read_config(path: &Path) -> Result<(Json, blake3::Hash), LoadError> {
    let io = |source| LoadError::Open { path: path.to_owned(), source };
    let mut text = Vec::new();
    fs::File::open(path).map_err(io)?.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(LoadError::ConfigTooLarge { path: path.to_owned() });
    }
    let config = serde_json::from_slice(&text);
    let config = config.map_err(|source| LoadError::ConfigSyntax { path: path.to_owned(), source })?;
    Ok((config, blake3::hash(&text)))
}

fn gguf_within(folder: &Path) -> Option<String> {
    let mut names: Vec<_> = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    names.iter().filter_map(|name| name.to_str()).find(|name| name.ends_with(".gguf")).map(str::to_owned)
}
