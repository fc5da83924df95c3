//! `CakeStore`: the models that masters have sent, one folder for each. A folder is complete: files are received beside it
//! and moved there at the end.

use std::error::Error;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::iter::successors;
use std::path::{Path, PathBuf};

use model::Checkpoint;

use super::super::auth::{CakeKey, short_hash};
use super::super::wire::CakeVariant;
use super::space::{CakeStoreLimits, StoreSpace, VARIANT_FILE, mark_used, remove_folder};
use super::transfer::{CakeTransferError, Transfer, config_path, weights_path};

/// Far more than any config.json.
const CONFIG_BYTES_MAX: u64 = 64 << 20;

/// How a master names a model: the beginning of the hash of its config.json, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelHash(Option<u32>);

impl ModelHash {
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(None));
        }
        let is_hash = text.len() == 8 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        is_hash.then(|| u32::from_str_radix(text, 16).ok()).flatten().map(|hash| Self(Some(hash)))
    }

    pub fn is_of(self, config: &str) -> bool {
        self.0.is_none_or(|hash| short_hash(config.as_bytes()) == format!("{hash:08x}"))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CakeStoreError {
    #[error("another process receives this model")]
    Locked,
    #[error("config.json is not the one whose hash was announced")]
    OtherModel,
    #[error(transparent)]
    Transfer(#[from] CakeTransferError),
    /// Without the path, since the master is told.
    #[error("the weights cannot be read: {0}")]
    Weights(String),
    #[error("use the folder for models from cake masters")]
    Io(#[from] io::Error),
}

#[derive(Debug)]
pub(super) struct CakeStore {
    folder: PathBuf,
    limits: CakeStoreLimits,
    cluster_hash: String,
}

/// The files of a model.
#[derive(Debug)]
pub(super) struct StoredModel {
    pub config: String,
    weights: Vec<PathBuf>,
    pub variant: CakeVariant,
}

/// A model that is being received. No other process receives it.
pub(super) struct IncomingModel {
    hash: ModelHash,
    complete: PathBuf,
    partial: PathBuf,
    pub transfer: Transfer,
    _lock: File,
}

impl CakeStore {
    pub fn new(folder: PathBuf, limits: CakeStoreLimits, key: &CakeKey) -> Self {
        Self { folder, limits, cluster_hash: key.cluster_hash() }
    }

    fn path(&self, hash: ModelHash, suffix: &str) -> PathBuf {
        let model = hash.0.map_or(String::new(), |hash| format!("-{hash:08x}"));
        self.folder.join(format!("{}{model}{suffix}", self.cluster_hash))
    }

    /// A model that was received before.
    pub fn find(&self, hash: ModelHash) -> Result<Option<StoredModel>, CakeStoreError> {
        let folder = self.path(hash, "");
        mark_used(&folder);
        StoredModel::open(&folder, hash)
    }

    /// Begins to receive a model, of which an earlier copy remains until this one is complete.
    pub fn begin(&self, hash: ModelHash) -> Result<IncomingModel, CakeStoreError> {
        fs::create_dir_all(&self.folder)?;
        let lock = File::create(self.path(hash, ".lock"))?;
        lock.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => CakeStoreError::Locked,
            TryLockError::Error(error) => error.into(),
        })?;
        let partial = self.path(hash, ".partial");
        remove_folder(&partial)?;
        fs::create_dir(&partial)?;
        let space = StoreSpace { folder: self.folder.clone(), receiving: partial.clone(), limits: self.limits };
        let make_room = Box::new(move |bytes| space.make_room(bytes));
        let transfer = Transfer::new(partial.clone(), self.limits.bytes_max, make_room);
        Ok(IncomingModel { hash, complete: self.path(hash, ""), partial, transfer, _lock: lock })
    }
}

impl IncomingModel {
    /// All files were sent: checks them and keeps them.
    pub fn finish(self, variant: CakeVariant) -> Result<StoredModel, CakeStoreError> {
        let Self { hash, complete, partial, transfer, _lock } = self;
        let result = transfer.finish().map_err(CakeStoreError::from).and_then(|folder| {
            // Its next assignment does not tell which variant the master speaks.
            let text = if variant == CakeVariant::Older { "older" } else { "head" };
            fs::write(folder.join(VARIANT_FILE), text)?;
            // Opening checks the sizes in the headers of the weights.
            StoredModel::open(&folder, hash)?.ok_or(CakeTransferError::Missing("config.json"))?.checkpoint()?;
            remove_folder(&complete)?;
            fs::rename(&folder, &complete)?;
            StoredModel::open(&complete, hash)?.ok_or(CakeTransferError::Missing("config.json").into())
        });
        if result.is_err() {
            // What is left is removed before the next transfer, so the error is ignored.
            let _ = remove_folder(&partial);
        }
        result
    }

    pub fn abandon(self) {
        // As above.
        let _ = remove_folder(&self.partial);
    }
}

impl StoredModel {
    fn open(folder: &Path, hash: ModelHash) -> Result<Option<Self>, CakeStoreError> {
        let config = match fs::metadata(config_path(folder)) {
            Ok(found) if found.len() <= CONFIG_BYTES_MAX => fs::read_to_string(config_path(folder))?,
            Ok(_) => return Err(CakeStoreError::OtherModel),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        if !hash.is_of(&config) {
            return Err(CakeStoreError::OtherModel);
        }
        let weights = (0..).map(|number| weights_path(folder, number)).take_while(|path| path.exists()).collect();
        let is_older = fs::read(folder.join(VARIANT_FILE)).is_ok_and(|text| text == b"older");
        let variant = if is_older { CakeVariant::Older } else { CakeVariant::Head };
        Ok(Some(Self { config, weights, variant }))
    }

    pub fn checkpoint(&self) -> Result<Checkpoint, CakeStoreError> {
        let opened = Checkpoint::from_parts(&self.config, &self.weights);
        opened.map_err(|error| CakeStoreError::Weights(root_cause(&error)))
    }
}

fn root_cause(error: &(dyn Error + 'static)) -> String {
    let causes = successors(Some(error), |&error| error.source());
    causes.last().map_or(String::new(), ToString::to_string)
}
