//! `Manifest`: what another machine needs to know of a checkpoint to load a part of it: what its description is read from, and
//! the name, format, shape, length and hash of every tensor. The tensors themselves travel on their own, and are stored as one
//! file each.
//!
//! A manifest comes from the network. Reading one checks all of it, so every `Manifest` is sound: counts and lengths are within
//! named limits, names are unique, lengths match shapes, and there is a valid description. Names are never used as paths.

mod files;
mod wire;

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

use serde::{Deserialize, Serialize};
use types::DType;

pub(crate) use self::files::ManifestTensors;
use self::wire::WireManifest;
use crate::description::{Description, DescriptionError};
use crate::digest::CheckpointDigest;
use crate::files::{RANK_MAX, TENSORS_MAX, Value, shown, stored_bytes};
use crate::load::LoadError;
use crate::metadata::GgufSource;
use crate::part::ModelPart;
use crate::tensor_names::TensorNames;

/// The most bytes of a manifest as JSON: some hundred thousand tensors.
pub const MANIFEST_BYTES_MAX: usize = 64 << 20;
/// The most bytes of its config.json. Known ones have less than a tenth of it.
const CONFIG_BYTES_MAX: usize = 1 << 20;
/// The most bytes of a tensor's name or of a metadata key. Known names have less than a tenth of it.
const NAME_BYTES_MAX: usize = 1 << 10;
/// The most metadata values, and the most entries or bytes of one of them.
const METADATA_MAX: usize = 1 << 10;
const VALUE_ENTRIES_MAX: usize = 1 << 14;

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("the manifest is not valid")]
    Syntax(#[from] serde_json::Error),
    /// With its cause in its text, because a manifest within another message has no other way to report it.
    #[error("config.json in the manifest is not valid JSON: {0}")]
    Config(serde_json::Error),
    #[error("{found} {what} are more than the limit of {max} in a manifest")]
    Limit { what: &'static str, found: usize, max: usize },
    #[error("two {what} in the manifest have the name {name:?}")]
    Duplicate { what: &'static str, name: String },
    #[error("tensor {tensor:?} has the impossible shape {shape:?} for its format in the manifest")]
    Shape { tensor: String, shape: Vec<usize> },
    #[error("tensor {tensor:?} has {found} bytes in the manifest; its shape and format make {expected}")]
    Length { tensor: String, found: u64, expected: u64 },
    #[error("the tensors in the manifest are larger than any memory")]
    TooLarge,
    #[error(transparent)]
    Description(#[from] DescriptionError),
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    pub dtype: DType,
    /// Outermost dimension first.
    #[serde(deserialize_with = "wire::bounded::<_, _, RANK_MAX>")]
    pub shape: Vec<usize>,
    pub bytes: u64,
    /// BLAKE3 of its bytes, once somebody has computed it.
    #[serde(default, with = "wire::hex", skip_serializing_if = "Option::is_none")]
    pub hash: Option<[u8; 32]>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "WireManifest", into = "WireManifest")]
pub struct Manifest {
    source: Source,
    /// Sorted by name.
    tensors: Vec<TensorEntry>,
    names: TensorNames,
    description: Description,
}

/// What the description is read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Source {
    /// The text of config.json.
    Config(String),
    /// The metadata of the architecture, sorted by key, and the values of `rope_freqs.weight`.
    Gguf { metadata: Vec<(String, Value)>, rope_divisors: Option<Vec<f32>> },
}

impl Manifest {
    /// Checks everything. The order of tensors and of metadata does not matter.
    pub(crate) fn new(mut source: Source, mut tensors: Vec<TensorEntry>) -> Result<Self, ManifestError> {
        check_source(&mut source)?;
        limit("tensors", tensors.len(), TENSORS_MAX)?;
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(ManifestError::Duplicate { what: "tensors", name: shown(&pair[0].name) });
        }
        let mut total: u64 = 0;
        for tensor in &tensors {
            tensor.check()?;
            total =
                total.checked_add(tensor.bytes).filter(|&sum| sum <= i64::MAX as u64).ok_or(ManifestError::TooLarge)?;
        }
        let (names, description) = match &source {
            Source::Config(text) => {
                let config = serde_json::from_str(text).map_err(ManifestError::Config)?;
                let names = TensorNames::hugging_face(|| tensors.iter().map(|tensor| &*tensor.name));
                (names, Description::from_config(&config)?)
            }
            Source::Gguf { metadata, rope_divisors } => {
                let source = GgufManifest { metadata, rope_divisors, tensors: &tensors };
                (TensorNames::Gguf, Description::from_gguf_source(&source)?)
            }
        };
        Ok(Self { source, tensors, names, description })
    }

    /// Reads what [`Manifest::to_json`] wrote.
    pub fn from_json(json: &[u8]) -> Result<Self, ManifestError> {
        limit("bytes", json.len(), MANIFEST_BYTES_MAX)?;
        let wire: WireManifest = serde_json::from_slice(json)?;
        Self::try_from(wire)
    }

    /// Reads a file that [`Manifest::to_json`] was written to.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let open = |source| LoadError::Open { path: path.to_owned(), source };
        if !fs::metadata(path).map_err(open)?.is_file() {
            return Err(open(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let mut json = Vec::new();
        let file = File::open(path).map_err(open)?;
        file.take(MANIFEST_BYTES_MAX as u64 + 1).read_to_end(&mut json).map_err(open)?;
        Ok(Self::from_json(&json)?)
    }

    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("it has no map with keys other than text")
    }

    pub fn description(&self) -> &Description {
        &self.description
    }

    /// All tensors, sorted by name. Elsewhere they are known by their index in this list.
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// Sets the hash of a tensor.
    ///
    /// # Panics
    ///
    /// If there is no such tensor.
    pub fn set_hash(&mut self, index: usize, hash: [u8; 32]) {
        self.tensors[index].hash = Some(hash);
    }

    /// The indices of the tensors that a part needs, in rising order. Fails if one of them is missing, or if the model does not
    /// have these layers.
    pub fn tensors_of(&self, part: ModelPart) -> Result<Vec<usize>, LoadError> {
        let mut indices = Vec::new();
        self.names.needed(&self.description, part, &mut |tensor| match self.index_of(&tensor) {
            Some(index) => {
                indices.push(index);
                Ok(())
            }
            None => Err(LoadError::Missing { tensor }),
        })?;
        indices.sort_unstable();
        Ok(indices)
    }

    pub(crate) fn names(&self) -> TensorNames {
        self.names
    }

    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        index_of(&self.tensors, name)
    }

    /// Identifies the manifest, and with all hashes set also the weights.
    pub(crate) fn digest(&self) -> CheckpointDigest {
        CheckpointDigest::of_manifest(&self.to_json())
    }
}

impl TensorEntry {
    /// The name of its file in a folder of tensors: the digits of its hash.
    pub fn file_name(&self) -> Option<String> {
        self.hash.map(|hash| blake3::Hash::from_bytes(hash).to_hex().to_string())
    }

    fn check(&self) -> Result<(), ManifestError> {
        limit("bytes of a tensor's name", self.name.len(), NAME_BYTES_MAX)?;
        let tensor = || shown(&self.name);
        if self.shape.len() > RANK_MAX {
            return Err(ManifestError::Limit {
                what: "dimensions of a tensor",
                found: self.shape.len(),
                max: RANK_MAX,
            });
        }
        let expected = stored_bytes(self.dtype, &self.shape)
            .ok_or_else(|| ManifestError::Shape { tensor: tensor(), shape: self.shape.clone() })?
            as u64;
        match self.bytes == expected {
            true => Ok(()),
            false => Err(ManifestError::Length { tensor: tensor(), found: self.bytes, expected }),
        }
    }
}

/// Whether a tensor of this name can be in a manifest. A longer name is none that a model needs.
pub(crate) fn can_list(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX
}

/// Checks limits, and sorts the metadata.
fn check_source(source: &mut Source) -> Result<(), ManifestError> {
    let (metadata, rope_divisors) = match source {
        Source::Config(text) => return limit("bytes of config.json", text.len(), CONFIG_BYTES_MAX),
        Source::Gguf { metadata, rope_divisors } => (metadata, rope_divisors),
    };
    limit("metadata values", metadata.len(), METADATA_MAX)?;
    limit("divisors of rope", rope_divisors.as_ref().map_or(0, Vec::len), VALUE_ENTRIES_MAX)?;
    for (key, value) in &*metadata {
        limit("bytes of a metadata key", key.len(), NAME_BYTES_MAX)?;
        let entries = match value {
            Value::String(text) => text.len(),
            Value::Ints(values) => values.len(),
            Value::Floats(values) => values.len(),
            Value::Bools(values) => values.len(),
            Value::Strings(values) => values.len(),
            Value::U64(_) | Value::I64(_) | Value::F64(_) | Value::Bool(_) => 1,
        };
        limit("entries of a metadata value", entries, VALUE_ENTRIES_MAX)?;
    }
    metadata.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    match metadata.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(ManifestError::Duplicate { what: "metadata values", name: shown(&pair[0].0) }),
        None => Ok(()),
    }
}

fn limit(what: &'static str, found: usize, max: usize) -> Result<(), ManifestError> {
    if found <= max { Ok(()) } else { Err(ManifestError::Limit { what, found, max }) }
}

fn index_of(tensors: &[TensorEntry], name: &str) -> Option<usize> {
    tensors.binary_search_by(|tensor| tensor.name.as_str().cmp(name)).ok()
}

struct GgufManifest<'a> {
    metadata: &'a [(String, Value)],
    rope_divisors: &'a Option<Vec<f32>>,
    tensors: &'a [TensorEntry],
}

impl GgufSource for GgufManifest<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        let at = self.metadata.binary_search_by(|(other, _)| other.as_str().cmp(key)).ok()?;
        Some(&self.metadata[at].1)
    }

    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        Some(&self.tensors[index_of(self.tensors, tensor)?].shape)
    }

    fn rope_divisors(&self) -> Result<Option<Vec<f32>>, DescriptionError> {
        Ok(self.rope_divisors.clone())
    }
}
