//! `TensorStore`: a folder of tensors, one file each, named by their hashes.
//!
//! | file | contents |
//! |---|---|
//! | `HASH` | a tensor whose hash was verified when it was written |
//! | `HASH.part` | a tensor that is being received ([`PartFile`](super::part_file)) |
//! | `PROCESS.NUMBER.pins` | tensors in use or about to be received ([`PinnedTensors`]) |
//! | `lock` | held while pins and files are counted |
//!
//! Other files are left alone. Several processes can share a store. A tensor's use is kept as the time of last access of
//! its file. Files are not flushed to the disk: what a loss of power leaves is found when it is verified.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tracing::debug;

use super::error::StoreError;
use super::eviction::{Room, Shortage, StoredFile, plan_eviction};
use super::file_identity::FileIdentity;
use super::pins::{self, PinnedTensors};
use super::tree_hash::{FileRange, hash_files};
use super::{Hex, TensorId};

/// Only the owner may look into a folder that is made here.
const FOLDER_MODE: u32 = 0o700;
/// What the mode of a folder may not let everybody do: they could put links where files are written.
const OTHERS_WRITE: u32 = 0o002;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// The most bytes of all tensors.
    pub bytes_max: u64,
    /// What stays free on the disk.
    pub free_bytes_min: u64,
}

/// Clones share one store.
#[derive(Clone, Debug)]
pub struct TensorStore(Arc<Store>);

#[derive(Debug)]
struct Store {
    folder: PathBuf,
    limits: StoreLimits,
    /// Files whose hash this process has verified.
    verified: Mutex<HashMap<[u8; 32], FileIdentity>>,
}

impl TensorStore {
    /// Makes the folder if there is none, closed to other users. One that is there stays as it is; it has to be a folder of this
    /// user that not everybody may write to.
    pub fn open(folder: &Path, limits: StoreLimits) -> Result<Self, StoreError> {
        let unusable = |source| StoreError::new(folder, source);
        if let Err(error) = DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
            // A symbolic link that leads nowhere: it is refused below.
            && error.kind() != ErrorKind::AlreadyExists
        {
            return Err(unusable(error));
        }
        // Without a slash at its end, which would lead through a link.
        let found = fs::symlink_metadata(folder.components().collect::<PathBuf>()).map_err(unusable)?;
        let folder_of = || folder.to_owned();
        if found.is_symlink() {
            return Err(StoreError::Link { folder: folder_of() });
        }
        if !found.is_dir() {
            return Err(unusable(ErrorKind::NotADirectory.into()));
        }
        if found.uid() != rustix::process::geteuid().as_raw() {
            return Err(StoreError::NotOurs { folder: folder_of() });
        }
        if found.mode() & OTHERS_WRITE != 0 {
            return Err(StoreError::Writable { folder: folder_of() });
        }
        let verified = Mutex::default();
        let store = Self(Arc::new(Store { folder: folder.to_owned(), limits, verified }));
        store.lock().map_err(unusable)?;
        Ok(store)
    }

    pub fn folder(&self) -> &Path {
        &self.0.folder
    }

    /// Keeps these tensors in the store, those that are in it and those that will be received, until the result is
    /// dropped. Removes the tensors used least recently if there is not enough room.
    pub fn pin(&self, ids: &[TensorId]) -> Result<PinnedTensors, StoreError> {
        self.pin_at(ids, SystemTime::now())
    }

    pub(super) fn pin_at(&self, ids: &[TensorId], now: SystemTime) -> Result<PinnedTensors, StoreError> {
        let mut wanted = HashMap::with_capacity(ids.len());
        if let Some(id) = ids.iter().find(|id| wanted.insert(id.hash, id.bytes).is_some_and(|bytes| bytes != id.bytes))
        {
            return Err(StoreError::TwoLengths(id.hash));
        }
        let unusable = |source| self.error(source);
        let lock = self.lock().map_err(unusable)?;
        self.make_room(&wanted)?;
        let mut ids: Vec<_> = wanted.into_iter().map(|(hash, bytes)| TensorId { hash, bytes }).collect();
        ids.sort_by_key(|id| id.hash);
        let pinned = PinnedTensors::new(self.clone(), ids).map_err(unusable)?;
        drop(lock);
        pinned.ids().iter().for_each(|id| touch(&self.path_of(&id.hash), now));
        Ok(pinned)
    }

    /// Bytes of all files, and of the tensors that are to be received.
    pub fn used_bytes(&self) -> Result<u64, StoreError> {
        let unusable = |source| self.error(source);
        let _lock = self.lock().map_err(unusable)?;
        let pinned = pins::read_all(self.folder()).map_err(unusable)?;
        let others = self.files().map_err(unusable)?.into_iter().filter(|file| !pinned.contains_key(&file.hash));
        Ok(pinned.values().sum::<u64>() + others.map(|file| file.bytes).sum::<u64>())
    }

    /// Evicts what has to go so that there is room for `wanted` beside what is pinned.
    fn make_room(&self, wanted: &HashMap<[u8; 32], u64>) -> Result<(), StoreError> {
        let unusable = |source| self.error(source);
        let mut pinned = pins::read_all(self.folder()).map_err(unusable)?;
        pinned.extend(wanted);
        let files = self.files().map_err(unusable)?;
        let disk = rustix::fs::statvfs(self.folder()).map_err(|errno| unusable(errno.into()))?;
        let StoreLimits { bytes_max, free_bytes_min } = self.0.limits;
        let disk_free = (disk.f_bavail * disk.f_frsize).saturating_sub(free_bytes_min);
        let evicted = plan_eviction(&files, &pinned, Room { bytes_max, disk_free }).map_err(|shortage| {
            let folder = self.folder().to_owned();
            match shortage {
                Shortage::Limit { needed } => StoreError::Limit { folder, needed, bytes_max },
                Shortage::Disk { needed, free } => StoreError::NoSpace { folder, needed, free },
            }
        })?;
        for StoredFile { hash, is_part, .. } in evicted.into_iter().map(|at| &files[at]) {
            debug!(tensor = %Hex(hash), is_part, "evicted from the tensor store");
            remove(&if *is_part { self.part_path_of(hash) } else { self.path_of(hash) }).map_err(unusable)?;
        }
        Ok(())
    }

    fn files(&self) -> io::Result<Vec<StoredFile>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(self.folder())? {
            let entry = entry?;
            let Some((hash, is_part)) = parse_name(&entry.file_name()) else { continue };
            let found = match entry.metadata() {
                // Another process may have given it its name, or given it up.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                found => found?,
            };
            let used_at = found.accessed()?.max(found.modified()?);
            let disk_bytes = found.blocks() * 512;
            files.push(StoredFile { hash, is_part, bytes: found.len(), disk_bytes, used_at });
        }
        Ok(files)
    }

    /// Which of these are in the store with their hash, by position. Those that are damaged are removed. `progress` gets
    /// the bytes that were hashed since its last call.
    pub(super) fn verify(
        &self,
        ids: &[TensorId],
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Vec<bool>, StoreError> {
        let paths: Vec<_> = ids.iter().map(|id| self.path_of(&id.hash)).collect();
        let mut is_good = vec![false; ids.len()];
        let mut unknown = Vec::new();
        for (at, (id, path)) in ids.iter().zip(&paths).enumerate() {
            let Some(identity) = identity_of(path, id.bytes).map_err(|source| self.error(source))? else { continue };
            match self.verified().get(&id.hash) == Some(&identity) {
                true => is_good[at] = true,
                false => unknown.push((at, identity)),
            }
        }
        let part = |&(at, _): &(usize, _)| FileRange { path: &paths[at], start: 0, bytes: ids[at].bytes };
        let hashes = hash_files(&unknown.iter().map(part).collect::<Vec<_>>(), threads, progress);
        for ((at, identity), hash) in unknown.into_iter().zip(hashes) {
            match hash {
                Ok(hash) if hash == ids[at].hash => {
                    self.verified().insert(hash, identity);
                    is_good[at] = true;
                }
                Ok(_) => self.remove_damaged(&ids[at].hash).map_err(|source| self.error(source))?,
                // A bad disk may not even return the bytes; then they have to be received again too.
                Err(error) => {
                    debug!(tensor = %Hex(&ids[at].hash), %error, "cannot be read");
                    self.remove_damaged(&ids[at].hash).map_err(|source| self.error(source))?;
                }
            }
        }
        Ok(is_good)
    }

    fn remove_damaged(&self, hash: &[u8; 32]) -> io::Result<()> {
        tracing::warn!(tensor = %Hex(hash), "damaged in the tensor store: it is removed");
        self.verified().remove(hash);
        remove(&self.path_of(hash))
    }

    /// Remembers that a file was verified while it was written.
    pub(super) fn set_verified(&self, id: &TensorId) -> io::Result<()> {
        if let Some(identity) = identity_of(&self.path_of(&id.hash), id.bytes)? {
            self.verified().insert(id.hash, identity);
        }
        Ok(())
    }

    fn verified(&self) -> MutexGuard<'_, HashMap<[u8; 32], FileIdentity>> {
        self.0.verified.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other thread or process counts pins and files. The result holds the lock.
    fn lock(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let lock = options.create(true).truncate(false).write(true).mode(0o600).open(self.folder().join("lock"))?;
        lock.lock()?;
        Ok(lock)
    }

    pub(super) fn path_of(&self, hash: &[u8; 32]) -> PathBuf {
        self.folder().join(Hex(hash).to_string())
    }

    pub(super) fn part_path_of(&self, hash: &[u8; 32]) -> PathBuf {
        self.folder().join(format!("{}.part", Hex(hash)))
    }

    pub(super) fn error(&self, source: io::Error) -> StoreError {
        StoreError::new(self.folder(), source)
    }
}

/// The identity of a tensor's file; `None` if there is none of its length.
pub(super) fn identity_of(path: &Path, bytes: u64) -> io::Result<Option<FileIdentity>> {
    match fs::symlink_metadata(path) {
        Ok(found) => Ok((found.is_file() && found.len() == bytes).then(|| FileIdentity::of(&found))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sets the time of last access. It only orders evictions, so a failure is ignored.
fn touch(path: &Path, now: SystemTime) {
    let _ = File::open(path).and_then(|file| file.set_times(fs::FileTimes::new().set_accessed(now)));
}

/// Removes a file that may be gone already.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// The hash in the name of a tensor's file, and whether it is a part.
fn parse_name(name: &OsStr) -> Option<([u8; 32], bool)> {
    let name = name.to_str()?;
    let (digits, is_part) = name.strip_suffix(".part").map_or((name, false), |digits| (digits, true));
    let hash = blake3::Hash::from_hex(digits).ok()?;
    // Only lower case is ours.
    (hash.to_hex().as_str() == digits).then(|| (hash.into(), is_part))
}
