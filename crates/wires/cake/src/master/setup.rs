//! The set-up of a worker from the master's side: layers are assigned, and the model's files are sent if the worker asks
//! for them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value as Json;
use types::LayerRange;

use super::super::auth::{CakeKey, short_hash};
use super::super::connection::{CakeConnection, CakeConnectionError};
use super::super::layer_name::{CakeLayerPrefix, excerpt};
use super::super::wire::{CakeChunk, CakeChunkCheck, CakeMessage, CakeVariant, CakeWireError};
use super::{ANSWER_BYTES_MAX, connect};

/// How long a worker may take to look for weights, and to load them.
pub(super) const SETUP_WAIT: Duration = Duration::from_secs(15 * 60);
const CHUNK_BYTES: usize = 16 << 20;
const INDEX: &str = "model.safetensors.index.json";

#[derive(Debug, thiserror::Error)]
pub enum CakeSetupError {
    #[error(transparent)]
    Connection(#[from] CakeConnectionError),
    #[error("the worker takes no assignment of layers")]
    NotTaken,
    #[error("the worker reported: {0}")]
    Worker(String),
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{0} changed while it was sent")]
    Changed(PathBuf),
    #[error("{path} is not an index of weights: {why}")]
    Index { path: PathBuf, why: String },
}

impl From<CakeWireError> for CakeSetupError {
    fn from(error: CakeWireError) -> Self {
        Self::Connection(error.into())
    }
}

/// What a worker is sent for its layers.
#[derive(Clone, Debug)]
pub struct SetupFiles {
    layers: Vec<String>,
    config: String,
    /// In the order in which they are sent: small ones first.
    files: Vec<(String, Source)>,
}

#[derive(Clone, Debug)]
enum Source {
    Text(String),
    File(PathBuf),
}

impl SetupFiles {
    /// The files of a model's folder that contain tensors of these layers.
    pub fn of_folder(folder: &Path, layers: LayerRange, prefix: CakeLayerPrefix) -> Result<Self, CakeSetupError> {
        let layers: Vec<String> = layers.iter().map(|layer| prefix.name(layer)).collect();
        let read = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(|source| CakeSetupError::File { path, source })
        };
        let config = read("config.json")?;
        let mut files = vec![("config.json".to_owned(), Source::Text(config.clone()))];
        if folder.join("tokenizer.json").exists() {
            files.push(("tokenizer.json".to_owned(), Source::File(folder.join("tokenizer.json"))));
        }
        if folder.join(INDEX).exists() {
            let (index, shards) = filter_index(&folder.join(INDEX), &read(INDEX)?, &layers)?;
            files.push((INDEX.to_owned(), Source::Text(index)));
            files.extend(shards.into_iter().map(|shard| (shard.clone(), Source::File(folder.join(shard)))));
        } else {
            files.push(("model.safetensors".to_owned(), Source::File(folder.join("model.safetensors"))));
        }
        Ok(Self { layers, config, files })
    }

    /// The bytes of all files.
    fn bytes(&self) -> Result<u64, CakeSetupError> {
        let sizes = self.files.iter().map(|(_, source)| match source {
            Source::Text(text) => Ok(text.len() as u64),
            Source::File(path) => match fs::metadata(path) {
                Ok(found) => Ok(found.len()),
                Err(source) => Err(CakeSetupError::File { path: path.clone(), source }),
            },
        });
        sizes.sum()
    }
}

/// The index of the tensors of these layers, and the names of the files that have them.
fn filter_index(path: &Path, text: &str, layers: &[String]) -> Result<(String, BTreeSet<String>), CakeSetupError> {
    let failed = |why: &str| CakeSetupError::Index { path: path.to_owned(), why: why.to_owned() };
    let mut index: Json = serde_json::from_str(text).map_err(|error| failed(&error.to_string()))?;
    let map =
        index.get_mut("weight_map").and_then(Json::as_object_mut).ok_or_else(|| failed("it has no weight_map"))?;
    let is_needed = |tensor: &str| {
        layers.iter().any(|layer| tensor.strip_prefix(layer.as_str()).is_some_and(|rest| rest.starts_with('.')))
    };
    map.retain(|tensor, _| is_needed(tensor));
    let shards = map.values().map(|shard| {
        let shard = shard.as_str().filter(|name| Path::new(name).file_name().is_some_and(|plain| plain == *name));
        shard.map(str::to_owned).ok_or_else(|| failed("it names a file elsewhere"))
    });
    let shards = shards.collect::<Result<BTreeSet<_>, _>>()?;
    if shards.is_empty() {
        return Err(failed("it has no tensor of the layers"));
    }
    Ok((index.to_string(), shards))
}

/// Assigns layers to a worker. [`CakeSetupError::NotTaken`] means that it runs already and expects a hello. `progress` gets
/// the number of bytes that were sent, and of all. Workers of the older variant of the protocol need files in that form, and
/// nothing tells beforehand which one a worker speaks.
pub fn set_up_worker(
    address: SocketAddr,
    key: &CakeKey,
    files: &SetupFiles,
    variant: CakeVariant,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), CakeSetupError> {
    let connection = connect(address, Some(key))?;
    let layers = files.layers.iter().map(String::as_str).collect();
    let model_hash = &short_hash(files.config.as_bytes());
    connection.send(&CakeMessage::LayerAssignment { layers, model_hash }, variant)?;
    let acknowledged = answer(&connection, |message| match message {
        CakeMessage::LayerAssignmentAck { needs_data } => Some(*needs_data),
        _ => None,
    });
    let needs_data = acknowledged.map_err(|error| match error {
        CakeSetupError::Connection(CakeConnectionError::Closed) => CakeSetupError::NotTaken,
        error => error,
    })?;
    if needs_data {
        let (mut sent, total) = (0, files.bytes()?);
        for (name, source) in &files.files {
            send_file(&connection, name, source, variant, &mut |bytes| {
                sent += bytes;
                progress(sent, total);
            })?;
        }
        connection.send(&CakeMessage::ModelDataDone, variant)?;
    }
    answer(&connection, |message| matches!(message, CakeMessage::WorkerReady).then_some(()))
}

/// Waits for the message that `expected` accepts.
fn answer<T>(
    connection: &CakeConnection,
    expected: impl FnOnce(&CakeMessage<'_>) -> Option<T>,
) -> Result<T, CakeSetupError> {
    let payload = connection.receive(ANSWER_BYTES_MAX, Some(SETUP_WAIT))?;
    let message = payload.message(CakeVariant::Head)?;
    if let CakeMessage::WorkerError { message } = message {
        return Err(CakeSetupError::Worker(excerpt(message)));
    }
    expected(&message).ok_or_else(|| CakeConnectionError::Unexpected.into())
}

fn send_file(
    connection: &CakeConnection,
    name: &str,
    source: &Source,
    variant: CakeVariant,
    progress: &mut dyn FnMut(u64),
) -> Result<(), CakeSetupError> {
    let (mut text, mut file);
    let (reader, total, path): (&mut dyn Read, u64, PathBuf) = match source {
        Source::Text(content) => {
            text = content.as_bytes();
            (&mut text, content.len() as u64, PathBuf::from(name))
        }
        Source::File(path) => {
            let opened = File::open(path).and_then(|file| Ok((file.metadata()?.len(), file)));
            let (total, opened) = opened.map_err(|source| CakeSetupError::File { path: path.clone(), source })?;
            file = opened;
            (&mut file, total, path.clone())
        }
    };
    let mut data = vec![0; CHUNK_BYTES.min(usize::try_from(total).unwrap_or(CHUNK_BYTES))];
    let mut offset = 0;
    while offset < total {
        let count = data.len().min(usize::try_from(total - offset).unwrap_or(data.len()));
        reader.read_exact(&mut data[..count]).map_err(|source| match source.kind() {
            io::ErrorKind::UnexpectedEof => CakeSetupError::Changed(path.clone()),
            _ => CakeSetupError::File { path: path.clone(), source },
        })?;
        let data = &data[..count];
        let check = CakeChunkCheck { is_compressed: false, crc: crc32fast::hash(data) };
        let check = (variant == CakeVariant::Head).then_some(check);
        let chunk = CakeChunk { file: name, offset, total_bytes: total, check, data };
        if let Err(error) = connection.send(&CakeMessage::ModelDataChunk(chunk), variant) {
            return Err(refusal(connection).unwrap_or(error.into()));
        }
        offset += count as u64;
        progress(count as u64);
    }
    Ok(())
}

/// Why a worker closed the connection while it was being sent files, if it said so.
fn refusal(connection: &CakeConnection) -> Option<CakeSetupError> {
    let payload = connection.receive(ANSWER_BYTES_MAX, Some(Duration::from_secs(1))).ok()?;
    match payload.message(CakeVariant::Head).ok()? {
        CakeMessage::WorkerError { message } => Some(CakeSetupError::Worker(excerpt(message))),
        _ => None,
    }
}
