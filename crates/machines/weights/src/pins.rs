//! `PinnedTensors`: tensors that a stage uses or is about to receive. They are listed in a file of the store, which is
//! locked for as long as they are pinned, so that other threads and processes count them and leave them alone. The lock of
//! a process that was killed is gone, and with it its pins.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::TensorId;
use super::error::StoreError;
use super::store::{TensorStore, identity_of, remove};

const EXTENSION: &str = "pins";
/// A hash and a length.
const PIN_BYTES: usize = 40;

/// The only access to the files of a [`TensorStore`]: as long as this exists, none of its tensors is evicted.
#[derive(Debug)]
pub struct PinnedTensors {
    store: TensorStore,
    /// Sorted by hash, each once.
    ids: Vec<TensorId>,
    list: PathBuf,
    /// The list, open for its lock.
    _locked: File,
}

impl PinnedTensors {
    /// To be called with the store's lock.
    pub(super) fn new(store: TensorStore, ids: Vec<TensorId>) -> io::Result<Self> {
        let (list, mut file) = create_list(store.folder())?;
        file.lock()?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| [&id.hash[..], &id.bytes.to_le_bytes()].concat()).collect();
        match file.write_all(&bytes) {
            Ok(()) => Ok(Self { store, ids, list, _locked: file }),
            Err(error) => {
                remove(&list)?;
                Err(error)
            }
        }
    }

    /// Sorted by hash, each once.
    pub fn ids(&self) -> &[TensorId] {
        &self.ids
    }

    /// Hashes what is in the store and was not verified by this process, on `threads` threads, and returns what has to be
    /// received. Damaged files are removed. `progress` gets the number of bytes that were hashed since its last call.
    pub fn verify(&self, threads: usize, progress: &(dyn Fn(u64) + Sync)) -> Result<Vec<TensorId>, StoreError> {
        let is_good = self.store.verify(&self.ids, threads, progress)?;
        Ok(self.ids.iter().zip(is_good).filter(|(_, is_good)| !is_good).map(|(id, _)| *id).collect())
    }

    /// What is not in the store. Nothing is hashed.
    pub fn missing(&self) -> Result<Vec<TensorId>, StoreError> {
        let mut missing = Vec::new();
        for id in &self.ids {
            let found = identity_of(&self.store.path_of(&id.hash), id.bytes);
            if found.map_err(|source| self.store.error(source))?.is_none() {
                missing.push(*id);
            }
        }
        Ok(missing)
    }

    /// The file of a pinned tensor. It is verified first, unless this process has done so and it was not changed since.
    pub fn path(&self, hash: &[u8; 32]) -> Result<PathBuf, StoreError> {
        let at = self.ids.binary_search_by_key(hash, |id| id.hash).map_err(|_| StoreError::Absent(*hash))?;
        let id = self.ids[at];
        let path = self.store.path_of(hash);
        if identity_of(&path, id.bytes).map_err(|source| self.store.error(source))?.is_none() {
            return Err(StoreError::Absent(*hash));
        }
        match self.store.verify(&[id], 1, &|_| {})?[..] {
            [true] => Ok(path),
            _ => Err(StoreError::Damaged(*hash)),
        }
    }

    pub(super) fn store(&self) -> &TensorStore {
        &self.store
    }
}

impl Drop for PinnedTensors {
    fn drop(&mut self) {
        // If it stays, its lock is gone, and whoever reads it removes it.
        let _ = fs::remove_file(&self.list);
    }
}

/// A new file. Its name is of no importance: processes of two containers may have the same number.
fn create_list(folder: &Path) -> io::Result<(PathBuf, File)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Relaxed);
        let list = folder.join(format!("{}.{number}.{EXTENSION}", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&list) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            file => return Ok((list, file?)),
        }
    }
}

/// The lengths of all tensors that are pinned by any process, by hash. To be called with the store's lock.
pub(super) fn read_all(folder: &Path) -> io::Result<HashMap<[u8; 32], u64>> {
    let mut pinned = HashMap::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != EXTENSION) {
            continue;
        }
        let mut file = match OpenOptions::new().read(true).open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            file => file?,
        };
        if file.try_lock().is_ok() {
            remove(&path)?;
            continue;
        }
        let mut list = Vec::new();
        file.read_to_end(&mut list)?;
        pinned.extend(list.chunks_exact(PIN_BYTES).map(parse_pin));
    }
    Ok(pinned)
}

fn parse_pin(pin: &[u8]) -> ([u8; 32], u64) {
    const SPLIT: &str = "a pin has this length";
    let (hash, bytes) = pin.split_at(32);
    (hash.try_into().expect(SPLIT), u64::from_le_bytes(bytes.try_into().expect(SPLIT)))
}
