//! `HashCache`: the hashes of the tensors of model files. They are kept in a folder, one file for each model file, so that
//! a model is hashed once. An entry is valid as long as its model file has the same [identity](FileIdentity).

use std::collections::HashMap;
use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Hex;
use super::file_identity::{FileIdentity, IDENTITY_BYTES};
use super::tree_hash::{FileRange, hash_files};

const MAGIC: &[u8; 16] = b"consort hashes 1";
/// Start, length and hash of a tensor.
const ENTRY_BYTES: usize = 48;
/// The most entries of a file: as many as a model may have tensors.
const ENTRIES_MAX: usize = 1 << 20;
const HASH_BYTES: usize = 32;

/// The hash of each known range of a file, by start and end.
type Hashes = HashMap<(u64, u64), [u8; 32]>;

#[derive(Debug)]
pub struct HashCache {
    folder: PathBuf,
}

impl HashCache {
    /// The folder is made when something is written to it.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The hashes of ranges of a file, in their order. What is not in the cache is read and hashed on `threads` threads;
    /// `progress` gets the number of bytes that were hashed since its last call.
    pub fn hashes(
        &self,
        path: &Path,
        ranges: &[Range<u64>],
        threads: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> io::Result<Vec<[u8; 32]>> {
        let path = fs::canonicalize(path)?;
        let identity = FileIdentity::of(&fs::metadata(&path)?);
        let mut known = self.read(&path, &identity);
        let unknown: Vec<_> = ranges.iter().filter(|range| !known.contains_key(&(range.start, range.end))).collect();
        if !unknown.is_empty() {
            let part = |range: &&Range<u64>| {
                let bytes = range.end.checked_sub(range.start).ok_or(ErrorKind::InvalidInput)?;
                Ok(FileRange { path: &path, start: range.start, bytes })
            };
            let parts = unknown.iter().map(part).collect::<io::Result<Vec<_>>>()?;
            for (range, hash) in unknown.into_iter().zip(hash_files(&parts, threads, progress)) {
                known.insert((range.start, range.end), hash?);
            }
            if FileIdentity::of(&fs::metadata(&path)?) != identity {
                return Err(io::Error::other("the file was changed while it was read"));
            }
            if identity.is_settled(SystemTime::now())
                && let Err(error) = self.write(&path, &identity, &known)
            {
                tracing::warn!(folder = %self.folder.display(), %error, "hashes of tensors cannot be kept");
            }
        }
        Ok(ranges.iter().map(|range| known[&(range.start, range.end)]).collect())
    }

    fn entry(&self, path: &Path) -> PathBuf {
        self.folder.join(format!("{}.hashes", Hex(blake3::hash(path.as_os_str().as_bytes()).as_bytes())))
    }

    /// Nothing, if there is no valid entry.
    fn read(&self, path: &Path, identity: &FileIdentity) -> Hashes {
        let read = || {
            let mut bytes = Vec::new();
            let limit = MAGIC.len() + IDENTITY_BYTES + ENTRIES_MAX * ENTRY_BYTES + HASH_BYTES;
            fs::File::open(self.entry(path))?.take(limit as u64).read_to_end(&mut bytes)?;
            Ok::<_, io::Error>(bytes)
        };
        read().ok().and_then(|bytes| decode(&bytes, identity)).unwrap_or_default()
    }

    fn write(&self, path: &Path, identity: &FileIdentity, hashes: &Hashes) -> io::Result<()> {
        if hashes.len() > ENTRIES_MAX {
            return Ok(());
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let entry = self.entry(path);
        // One name for each process: the last to finish wins.
        let draft = entry.with_extension(format!("{}.draft", std::process::id()));
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        let written = file.write_all(&encode(identity, hashes)).and_then(|()| fs::rename(&draft, &entry));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written
    }
}

fn encode(identity: &FileIdentity, hashes: &Hashes) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &identity.to_bytes()].concat();
    let mut hashes: Vec<_> = hashes.iter().collect();
    hashes.sort();
    for ((start, end), hash) in hashes {
        bytes.extend([&start.to_le_bytes()[..], &end.to_le_bytes(), hash].concat());
    }
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    bytes
}

/// `None` if it is damaged, or of a file that has been changed.
fn decode(bytes: &[u8], identity: &FileIdentity) -> Option<Hashes> {
    let (bytes, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
    if blake3::hash(bytes).as_bytes() != hash {
        return None;
    }
    let entries = bytes.strip_prefix(MAGIC)?.strip_prefix(&identity.to_bytes())?;
    let (entries, []) = entries.as_chunks::<ENTRY_BYTES>() else { return None };
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    entries
        .iter()
        .map(|entry| {
            let ((start, end), hash) = (entry[..16].split_at(8), &entry[16..]);
            Some(((number(start)?, number(end)?), hash.try_into().ok()?))
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn write_old(path: &Path, bytes: &[u8], age_s: u64) {
        fs::write(path, bytes).unwrap();
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
    }

    /// The hashes of three ranges of `path`, and how many bytes were hashed for them.
    fn check(cache: &HashCache, path: &Path, bytes: &[u8]) -> u64 {
        let hashed = Mutex::new(0);
        let ranges = [0..10, 5..1000, 7..7];
        let hashes = cache.hashes(path, &ranges, 2, &|bytes| *hashed.lock().unwrap() += bytes).unwrap();
        for (range, hash) in ranges.iter().zip(hashes) {
            assert_eq!(hash, *blake3::hash(&bytes[range.start as usize..range.end as usize]).as_bytes());
        }
        hashed.into_inner().unwrap()
    }

    #[test]
    fn a_file_is_hashed_once_and_again_when_it_was_changed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, cache) = (folder.path().join("model"), HashCache::new(&folder.path().join("cache")));
        let (first, second) = (vec![1; 2000], vec![2; 2000]);
        write_old(&path, &first, 1000);
        assert_eq!(check(&cache, &path, &first), 1005);
        assert_eq!(check(&cache, &path, &first), 0);
        assert_eq!(cache.hashes(&path, &[0..10, 0..11], 1, &|bytes| assert_eq!(bytes, 11)).unwrap().len(), 2);
        assert_eq!(check(&cache, &path, &first), 0);
        write_old(&path, &second, 500);
        assert_eq!(check(&cache, &path, &second), 1005);
        assert_eq!(check(&cache, &path, &second), 0);
    }

    #[test]
    fn a_file_that_was_changed_just_now_is_not_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (path, cache) = (folder.path().join("model"), HashCache::new(&folder.path().join("cache")));
        write_old(&path, &[1; 2000], 0);
        assert_eq!(check(&cache, &path, &[1; 2000]), 1005);
        assert_eq!(check(&cache, &path, &[1; 2000]), 1005);
    }

    #[test]
    fn a_damaged_entry_is_not_used_and_a_folder_that_cannot_be_written_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let (path, cache) = (folder.path().join("model"), HashCache::new(&folder.path().join("cache")));
        write_old(&path, &[1; 2000], 1000);
        assert_eq!(check(&cache, &path, &[1; 2000]), 1005);
        let entry = cache.entry(&fs::canonicalize(&path).unwrap());
        let mut bytes = fs::read(&entry).unwrap();
        bytes[MAGIC.len() + IDENTITY_BYTES + 20] ^= 1;
        fs::write(&entry, bytes).unwrap();
        assert_eq!(check(&cache, &path, &[1; 2000]), 1005);
        assert_eq!(check(&HashCache::new(&path.join("not a folder")), &path, &[1; 2000]), 1005);
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (path, cache) = (folder.path().join("model"), HashCache::new(folder.path()));
        assert_eq!(cache.hashes(&path, &[], 1, &|_| {}).unwrap_err().kind(), ErrorKind::NotFound);
        fs::write(&path, [0; 10]).unwrap();
        let (start, end) = (6, 5);
        for (range, kind) in [(5..11, ErrorKind::UnexpectedEof), (start..end, ErrorKind::InvalidInput)] {
            assert_eq!(cache.hashes(&path, &[0..1, range], 1, &|_| {}).unwrap_err().kind(), kind);
        }
    }

    proptest! {
        #[test]
        fn an_entry_reads_back_and_any_other_bytes_do_not(
            hashes in prop::collection::hash_map((any::<u64>(), any::<u64>()), any::<[u8; 32]>(), 0..5),
            at: prop::sample::Index, flip in 1_u8.., cut: prop::sample::Index,
        ) {
            let identity = FileIdentity::of(&fs::metadata(".").unwrap());
            let bytes = encode(&identity, &hashes);
            prop_assert_eq!(decode(&bytes, &identity), Some(hashes));
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= flip;
            prop_assert_eq!(decode(&other, &identity), None);
            prop_assert_eq!(decode(&bytes[..cut.index(bytes.len())], &identity), None);
        }
    }
}
