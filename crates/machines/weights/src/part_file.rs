//! `PartFile`: a tensor that is being received. Its file has the tensor's bytes, as far as they have come, and behind them,
//! for each range, how many of its bytes have come (u64, little endian). So a transfer can go on after any interruption.
//! The file is locked while it is written, so there is one writer. It gets the tensor's name when its hash was verified.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::PathBuf;

use rustix::fs::OFlags;

use super::TensorId;
use super::store::{TensorStore, identity_of, remove};
use super::tree_hash::{range_count, range_of};

const COUNT_BYTES: u64 = 8;

#[derive(Debug)]
pub(super) struct PartFile {
    file: File,
    part: PathBuf,
    path: PathBuf,
    id: TensorId,
}

#[derive(Debug)]
pub(super) enum Opened {
    /// The tensor is in the store.
    Present,
    /// Another thread or process receives it.
    Busy,
    /// To be received, and how many bytes of each range have come before.
    Part(PartFile, Vec<u64>),
}

impl PartFile {
    pub fn open(store: &TensorStore, id: TensorId) -> io::Result<Opened> {
        let (part, path) = (store.part_path_of(&id.hash), store.path_of(&id.hash));
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&part)?;
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Ok(Opened::Busy),
                Err(TryLockError::Error(error)) => return Err(error),
                Ok(()) => {}
            }
            // Between the opening and the locking, another writer may have renamed or removed the file.
            let is_same = match fs::symlink_metadata(&part) {
                Err(error) if error.kind() == ErrorKind::NotFound => false,
                found => found?.ino() == file.metadata()?.ino(),
            };
            if !is_same {
                continue;
            }
            let part = Self { file, part, path, id };
            if identity_of(&part.path, id.bytes)?.is_some() {
                part.discard()?;
                return Ok(Opened::Present);
            }
            let counts = part.counts()?;
            return Ok(Opened::Part(part, counts));
        }
    }

    /// How many bytes of each range have come. A file that is not as this code leaves it is emptied.
    fn counts(&self) -> io::Result<Vec<u64>> {
        let ranges = range_count(self.id.bytes);
        if self.file.metadata()?.len() != self.file_bytes() {
            self.clear()?;
        }
        let mut counts = Vec::new();
        for index in 0..ranges {
            let mut count = [0; COUNT_BYTES as usize];
            self.file.read_exact_at(&mut count, self.count_at(index))?;
            let (count, range) = (u64::from_le_bytes(count), range_of(self.id.bytes, index));
            counts.push(if count > range.end - range.start { 0 } else { count });
        }
        Ok(counts)
    }

    /// Forgets all bytes.
    pub fn clear(&self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.set_len(self.file_bytes())
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    pub fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }

    /// Records how many bytes of a range have been written.
    pub fn set_count(&self, index: u64, count: u64) -> io::Result<()> {
        self.file.write_all_at(&count.to_le_bytes(), self.count_at(index))
    }

    /// Gives the file the tensor's name.
    pub fn finish(&self) -> io::Result<()> {
        self.file.set_len(self.id.bytes)?;
        self.file.set_permissions(Permissions::from_mode(0o400))?;
        fs::rename(&self.part, &self.path)
    }

    pub fn discard(&self) -> io::Result<()> {
        remove(&self.part)
    }

    fn count_at(&self, index: u64) -> u64 {
        self.id.bytes + index * COUNT_BYTES
    }

    fn file_bytes(&self) -> u64 {
        self.count_at(range_count(self.id.bytes))
    }
}
