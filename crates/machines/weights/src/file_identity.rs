//! `FileIdentity`: tells without reading a file whether it is the one that was read before, unchanged.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime};

/// A change shortly after another may leave the time of change as it was.
const TIME_RESOLUTION: Duration = Duration::from_secs(2);

pub(super) const IDENTITY_BYTES: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileIdentity {
    device: u64,
    inode: u64,
    bytes: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl FileIdentity {
    pub fn of(file: &Metadata) -> Self {
        let (changed_s, changed_ns) = (file.mtime(), file.mtime_nsec());
        Self { device: file.dev(), inode: file.ino(), bytes: file.size(), changed_s, changed_ns }
    }

    /// Whether a change after `now` is sure to change the identity.
    pub fn is_settled(&self, now: SystemTime) -> bool {
        let changed = u64::try_from(self.changed_s).map(|s| SystemTime::UNIX_EPOCH + Duration::from_secs(s));
        changed.is_ok_and(|changed| now.duration_since(changed).is_ok_and(|age| age > TIME_RESOLUTION))
    }

    pub fn to_bytes(self) -> [u8; IDENTITY_BYTES] {
        let words = [self.device, self.inode, self.bytes, self.changed_s as u64, self.changed_ns as u64];
        let mut bytes = [0; IDENTITY_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}
