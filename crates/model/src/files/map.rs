//! The bytes of one file: mapped, or held in memory for tests and fuzzing. The only unsafe code of this crate.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::{Advice, Mmap, UncheckedAdvice};

pub enum FileBytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl FileBytes {
    /// Maps a regular file. Anything else is refused before it is opened: opening a pipe would wait for a writer.
    pub fn map(path: &Path) -> io::Result<Self> {
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        // SAFETY: the map is private and read-only, and nothing in this process writes to the files it opens here. That
        // no other process changes the file meanwhile is the contract that `files` states.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self::Mapped(map))
    }

    /// Gives the pages back to the system. A later read fetches them from the file again.
    pub fn release(&self) {
        if let Self::Mapped(map) = self {
            // SAFETY: the map is file-backed and was never written, so dropped pages come back with the same bytes.
            let advised = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // Advice that the system does not take costs memory, not correctness.
            advised.ok();
        }
    }

    /// Asks the system to start reading `range`, which is in bounds, before it is needed.
    pub fn prefetch(&self, range: Range<usize>) {
        if let Self::Mapped(map) = self {
            map.advise_range(Advice::WillNeed, range.start, range.len()).ok();
        }
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}
