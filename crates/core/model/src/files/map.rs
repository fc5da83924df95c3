//! The bytes of one file: memory-mapped, or owned for tests and fuzzing. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, UncheckedAdvice};

pub enum FileBytes {
    Mapped { map: Mmap, path: PathBuf },
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps a regular file. Other files are refused before they are opened, because opening a pipe would block.
    pub fn map(path: &Path) -> io::Result<Self> {
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        // SAFETY: the map is private and read-only, and nothing in this process writes to the files that it opens here. The
        // contract of `files` is that no other process changes the file while it is open.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self::Mapped { map, path: path.to_owned() })
    }

    /// The file, if it is mapped.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Mapped { path, .. } => Some(path),
            Self::Owned(_) => None,
        }
    }

    /// Returns the pages to the operating system. A later access reads them from the file again.
    pub fn release(&self) {
        if let Self::Mapped { map, .. } = self {
            // SAFETY: the map is file-backed and was never written, so dropped pages are read again with the same bytes.
            let advised = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // If the advice fails, memory use is higher but results are correct, so the error is ignored.
            advised.ok();
        }
    }

    /// Asks the operating system to start reading `range`, which must be in bounds.
    pub fn prefetch(&self, range: Range<usize>) {
        if let Self::Mapped { map, .. } = self {
            map.advise_range(Advice::WillNeed, range.start, range.len()).ok();
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped { map, .. } => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
