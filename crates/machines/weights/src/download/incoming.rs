//! A tensor that is being received, by one connection or several.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::super::TensorId;
use super::super::part_file::PartFile;
use super::super::tree_hash::{RangeHash, join, range_of};

#[derive(Debug)]
pub struct IncomingTensor {
    pub id: TensorId,
    pub part: PartFile,
    /// Some of its bytes came in an earlier attempt.
    pub was_resumed: bool,
    /// Bytes of each range that have been written.
    written: Vec<AtomicU64>,
    hashes: Mutex<Vec<Option<RangeHash>>>,
}

/// A range that one connection receives.
#[derive(Clone, Debug)]
pub struct RangeWork {
    pub tensor: Arc<IncomingTensor>,
    pub index: u64,
}

impl IncomingTensor {
    pub fn new(id: TensorId, part: PartFile, counts: &[u64]) -> Self {
        let was_resumed = counts.iter().any(|&count| count > 0);
        let written = counts.iter().map(|&count| AtomicU64::new(count)).collect();
        Self { id, part, was_resumed, written, hashes: Mutex::new(vec![None; counts.len()]) }
    }

    /// The tensor's hash, when all ranges have been hashed.
    pub fn hash(&self) -> [u8; 32] {
        let hashes: Option<Vec<_>> = self.hashes().iter().copied().collect();
        join(&hashes.expect("all ranges have been hashed"))
    }

    fn hashes(&self) -> MutexGuard<'_, Vec<Option<RangeHash>>> {
        self.hashes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RangeWork {
    /// The bytes of the range within the tensor.
    pub fn range(&self) -> Range<u64> {
        range_of(self.tensor.id.bytes, self.index)
    }

    /// The bytes that have not been written.
    pub fn rest(&self) -> Range<u64> {
        let Range { start, end } = self.range();
        start + self.written()..end
    }

    pub fn written(&self) -> u64 {
        self.tensor.written[self.index as usize].load(Relaxed)
    }

    pub fn set_written(&self, bytes: u64) {
        self.tensor.written[self.index as usize].store(bytes, Relaxed);
    }

    /// Returns whether all ranges of the tensor have a hash now.
    pub fn set_hash(&self, hash: RangeHash) -> bool {
        let mut hashes = self.tensor.hashes();
        hashes[self.index as usize] = Some(hash);
        hashes.iter().all(Option::is_some)
    }
}
