//! BLAKE3 of a tensor in parts. A tensor is cut into ranges, each a whole subtree of BLAKE3's tree, so that ranges can be
//! hashed in any order and on several threads. The result is the ordinary BLAKE3 hash of the bytes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;

use blake3::Hasher;
use blake3::hazmat::{ChainingValue, HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};

/// Bytes of a range, except a tensor's last one. A power of two of BLAKE3's chunks.
pub(super) const RANGE_BYTES: u64 = 16 << 20;

/// Bytes read from a file and hashed at once. They fit into a core's cache.
const READ_BYTES: usize = 256 << 10;

/// How many ranges a tensor has. An empty tensor has one, which is empty.
pub(super) fn range_count(tensor_bytes: u64) -> u64 {
    tensor_bytes.div_ceil(RANGE_BYTES).max(1)
}

/// The bytes of a range within its tensor.
pub(super) fn range_of(tensor_bytes: u64, index: u64) -> Range<u64> {
    let start = index * RANGE_BYTES;
    start..(start + RANGE_BYTES).min(tensor_bytes)
}

/// Hashes one range of a tensor.
pub(super) struct RangeHasher {
    hasher: Hasher,
    /// The range is all of the tensor, so its hash is the root of the tree.
    is_root: bool,
}

/// The hash of a range: a node of its tensor's tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeHash(ChainingValue);

impl RangeHasher {
    pub fn new(tensor_bytes: u64, index: u64) -> Self {
        let mut hasher = Hasher::new();
        let is_root = range_count(tensor_bytes) == 1;
        if !is_root {
            hasher.set_input_offset(index * RANGE_BYTES);
        }
        Self { hasher, is_root }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes);
    }

    /// Hashes bytes of a file.
    pub fn update_from(&mut self, file: &File, mut range: Range<u64>, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.resize(READ_BYTES, 0);
        while !range.is_empty() {
            let bytes = (range.end - range.start).min(READ_BYTES as u64);
            file.read_exact_at(&mut buffer[..bytes as usize], range.start)?;
            self.update(&buffer[..bytes as usize]);
            range.start += bytes;
        }
        Ok(())
    }

    /// To be called after all bytes of the range.
    pub fn finish(&self) -> RangeHash {
        RangeHash(if self.is_root { self.hasher.finalize().into() } else { self.hasher.finalize_non_root() })
    }
}

/// The hash of a tensor from those of all its ranges, in their order.
pub(super) fn join(ranges: &[RangeHash]) -> [u8; 32] {
    match ranges {
        [RangeHash(root)] => *root,
        ranges => {
            let (left, right) = halves(ranges);
            merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash).into()
        }
    }
}

fn subtree(ranges: &[RangeHash]) -> ChainingValue {
    match ranges {
        [RangeHash(hash)] => *hash,
        ranges => {
            let (left, right) = halves(ranges);
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// BLAKE3's left subtree has the largest power of two of chunks that leaves some for the right one.
fn halves(ranges: &[RangeHash]) -> (&[RangeHash], &[RangeHash]) {
    ranges.split_at(ranges.len().next_power_of_two() / 2)
}

/// Bytes of a file.
#[derive(Clone, Debug)]
pub(super) struct FileRange<'a> {
    pub path: &'a Path,
    pub start: u64,
    pub bytes: u64,
}

/// The hashes of parts of files, computed by several threads. `progress` gets the number of bytes that were hashed since
/// its last call.
pub(super) fn hash_files(
    parts: &[FileRange<'_>],
    threads: usize,
    progress: &(dyn Fn(u64) + Sync),
) -> Vec<io::Result<[u8; 32]>> {
    let ranges: Vec<(usize, u64)> =
        (0..parts.len()).flat_map(|part| (0..range_count(parts[part].bytes)).map(move |range| (part, range))).collect();
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![None; ranges.len()]);
    let errors = Mutex::new(Vec::new());
    let work = || {
        let mut buffer = Vec::new();
        loop {
            let at = next.fetch_add(1, Relaxed);
            let Some(&(part, range)) = ranges.get(at) else { return };
            match hash_range(&parts[part], range, &mut buffer, progress) {
                Ok(hash) => found.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(hash),
                Err(error) => errors.lock().unwrap_or_else(PoisonError::into_inner).push((part, error)),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(ranges.len()) {
            // A thread that cannot be started is not needed: this one does what is left.
            let _ = thread::Builder::new().name("consort-hash".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut errors = errors.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut found = found.into_iter();
    parts
        .iter()
        .enumerate()
        .map(|(part, FileRange { bytes, .. })| {
            let ranges: Option<Vec<_>> =
                found.by_ref().take(range_count(*bytes) as usize).collect::<Vec<_>>().into_iter().collect();
            match ranges {
                Some(ranges) => Ok(join(&ranges)),
                None => {
                    let at = errors.iter().position(|(failed, _)| *failed == part);
                    Err(at.map_or_else(|| io::ErrorKind::Other.into(), |at| errors.swap_remove(at).1))
                }
            }
        })
        .collect()
}

fn hash_range(
    part: &FileRange<'_>,
    index: u64,
    buffer: &mut Vec<u8>,
    progress: &(dyn Fn(u64) + Sync),
) -> io::Result<RangeHash> {
    let mut hasher = RangeHasher::new(part.bytes, index);
    let Range { start, end } = range_of(part.bytes, index);
    hasher.update_from(&File::open(part.path)?, part.start + start..part.start + end, buffer)?;
    progress(end - start);
    Ok(hasher.finish())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn noise(bytes: u64) -> Vec<u8> {
        let mut state = 1_u64;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(bytes as usize).collect()
    }

    #[test]
    fn the_hash_of_the_ranges_is_the_hash_of_the_bytes() {
        let bytes = noise(5 * RANGE_BYTES + 1);
        let lengths = [0, 1, 1024, 1025, RANGE_BYTES - 1];
        let around = (1..=5).flat_map(|count| [count * RANGE_BYTES, count * RANGE_BYTES + 1]);
        for length in lengths.into_iter().chain(around) {
            let bytes = &bytes[..length as usize];
            let hash = |index| {
                let Range { start, end } = range_of(length, index);
                let mut hasher = RangeHasher::new(length, index);
                bytes[start as usize..end as usize].chunks(700_001).for_each(|piece| hasher.update(piece));
                hasher.finish()
            };
            let ranges: Vec<_> = (0..range_count(length)).map(hash).collect();
            assert_eq!(join(&ranges), *blake3::hash(bytes).as_bytes(), "{length} bytes");
        }
    }

    #[test]
    fn parts_of_files_are_hashed_by_any_number_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        let (first, absent) = (folder.path().join("first"), folder.path().join("absent"));
        let bytes = noise(2 * RANGE_BYTES + 100);
        std::fs::write(&first, &bytes).unwrap();
        let all = bytes.len() as u64;
        let part = |path, start, bytes| FileRange { path, start, bytes };
        let parts = [
            part(&first, 0, all),
            part(&absent, 0, 5),
            part(&first, 7, 0),
            part(&first, 33, all - 33),
            part(&first, 1, all),
        ];
        for threads in [0, 1, 3] {
            let hashed = Mutex::new(0);
            let hashes = hash_files(&parts, threads, &|bytes| *hashed.lock().unwrap() += bytes);
            let [whole, missing, empty, tail, beyond] = &hashes[..] else { panic!("{} hashes", hashes.len()) };
            assert_eq!(whole.as_ref().unwrap(), blake3::hash(&bytes).as_bytes());
            assert_eq!(missing.as_ref().unwrap_err().kind(), io::ErrorKind::NotFound);
            assert_eq!(empty.as_ref().unwrap(), blake3::hash(&[]).as_bytes());
            assert_eq!(tail.as_ref().unwrap(), blake3::hash(&bytes[33..]).as_bytes());
            assert_eq!(beyond.as_ref().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            assert!(*hashed.lock().unwrap() >= all + all - 33);
        }
    }
}
