//! `StoreSpace`: keeps the models that masters have sent within a limit of bytes. Those that were used least recently are
//! removed first.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// How much of a disk received models may take.
#[derive(Clone, Copy, Debug)]
pub struct CakeStoreLimits {
    pub bytes_max: u64,
    /// What stays free on the file system.
    pub free_bytes_min: u64,
}

/// The room for a model that is being received.
#[derive(Debug)]
pub(super) struct StoreSpace {
    pub folder: PathBuf,
    /// Where the model is received. It is never removed.
    pub receiving: PathBuf,
    pub limits: CakeStoreLimits,
}

struct KeptModel {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

impl StoreSpace {
    /// Removes other models until there is room for a file of this size. False, and nothing is removed, if that would not
    /// suffice.
    pub fn make_room(&self, bytes: u64) -> io::Result<bool> {
        let CakeStoreLimits { bytes_max, free_bytes_min } = self.limits;
        let mut others = self.others()?;
        let removable: u64 = others.iter().map(|model| model.bytes).sum();
        let mut used = folder_bytes(&self.receiving)?.saturating_add(removable);
        let mut free = free_bytes(&self.folder)?;
        let needed = bytes.saturating_add(free_bytes_min);
        let fits = |used: u64, free: u64| used.saturating_add(bytes) <= bytes_max && needed <= free;
        if !fits(used - removable, free.saturating_add(removable)) {
            return Ok(false);
        }
        others.sort_by_key(|model| model.used);
        for model in others {
            if fits(used, free) {
                break;
            }
            remove_folder(&model.path)?;
            used -= model.bytes;
            free = free_bytes(&self.folder)?;
        }
        Ok(fits(used, free))
    }

    fn others(&self) -> io::Result<Vec<KeptModel>> {
        let mut others = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path != self.receiving && is_model(&path) && !is_being_received(&path) {
                let used = fs::metadata(path.join(VARIANT_FILE)).or_else(|_| fs::metadata(&path))?.modified()?;
                others.push(KeptModel { bytes: folder_bytes(&path)?, path, used });
            }
        }
        Ok(others)
    }
}

/// The file that is written last into a model's folder. When it changed is when the model was used last.
pub(super) const VARIANT_FILE: &str = "wire-variant";

/// Notes that a model is used.
pub(super) fn mark_used(folder: &Path) {
    let marked = File::options().append(true).open(folder.join(VARIANT_FILE));
    // It only decides which model is removed first.
    let _ = marked.and_then(|file| file.set_modified(SystemTime::now()));
}

/// Whether a path is a folder of [`CakeStore`](super::store::CakeStore), complete or not: the hashes that it is named by.
fn is_model(path: &Path) -> bool {
    let is_hash = |text: &str| text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let name = name.strip_suffix(".partial").unwrap_or(name);
    path.is_dir() && name.split('-').count() <= 2 && name.split('-').all(is_hash)
}

/// Whether a process receives a model into this folder. One that was left by a process that has ended is not locked.
fn is_being_received(path: &Path) -> bool {
    let is_partial = path.extension().is_some_and(|extension| extension == "partial");
    is_partial && File::open(path.with_extension("lock")).is_ok_and(|lock| lock.try_lock().is_err())
}

/// The bytes of the files in a folder.
fn folder_bytes(folder: &Path) -> io::Result<u64> {
    let mut bytes: u64 = 0;
    for entry in fs::read_dir(folder)? {
        bytes = bytes.saturating_add(entry?.metadata()?.len());
    }
    Ok(bytes)
}

pub(super) fn remove_folder(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Room on the file system of a folder.
fn free_bytes(folder: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tempfile::tempdir;

    use super::*;

    /// A folder with a file of 100 bytes that was used this many seconds after the epoch.
    fn model(folder: &Path, name: &str, used: u64) -> PathBuf {
        let path = folder.join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("weights"), [0; 96]).unwrap();
        fs::write(path.join(VARIANT_FILE), "head").unwrap();
        let file = File::options().append(true).open(path.join(VARIANT_FILE)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(used)).unwrap();
        path
    }

    #[test]
    fn models_that_were_used_least_recently_make_room() {
        let folder = tempdir().unwrap();
        let [old, older, new] = [("aaaaaaaa-00000001", 20), ("aaaaaaaa-00000002", 10), ("bbbbbbbb", 30)]
            .map(|(name, used)| model(folder.path(), name, used));
        let receiving = model(folder.path(), "aaaaaaaa-00000003.partial", 0);
        let stranger = model(folder.path(), "photos", 0);
        let limits = CakeStoreLimits { bytes_max: 500, free_bytes_min: 0 };
        let space = StoreSpace { folder: folder.path().to_owned(), receiving: receiving.clone(), limits };
        assert!(space.make_room(100).unwrap() && older.exists());
        // More than the store may hold beside what was received already: nothing is removed for it.
        assert!(!space.make_room(401).unwrap() && older.exists());
        assert!(space.make_room(150).unwrap());
        assert!(!older.exists() && old.exists() && new.exists());
        mark_used(&old);
        assert!(space.make_room(250).unwrap());
        assert!(!new.exists() && old.exists());
        assert!(space.make_room(400).unwrap());
        assert!(!old.exists() && receiving.exists() && stranger.exists());
    }

    #[test]
    fn what_a_process_is_receiving_stays() {
        let folder = tempdir().unwrap();
        let [locked, left] = ["aaaaaaaa.partial", "bbbbbbbb.partial"].map(|name| model(folder.path(), name, 0));
        let lock = File::create(folder.path().join("aaaaaaaa.lock")).unwrap();
        lock.try_lock().unwrap();
        let receiving = model(folder.path(), "cccccccc.partial", 0);
        let limits = CakeStoreLimits { bytes_max: 250, free_bytes_min: 0 };
        let space = StoreSpace { folder: folder.path().to_owned(), receiving, limits };
        assert!(space.make_room(120).unwrap());
        assert!(locked.exists() && !left.exists());
        let limits = CakeStoreLimits { free_bytes_min: u64::MAX, ..limits };
        assert!(!StoreSpace { limits, ..space }.make_room(1).unwrap());
    }
}
