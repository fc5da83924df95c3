//! The bytes of one file: memory-mapped, or owned for tests and fuzzing. The only unsafe code of this crate.
//!
//! If a file becomes shorter while it is mapped, or its disk fails, the system answers an access to the lost pages with
//! SIGBUS, which ends a process. The handler here puts zeros in their place instead, and notes it. So whoever has read a part
//! of a file has to [`check`](FileBytes::check) it before the result is used.
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use memmap2::{Advice, Mmap, UncheckedAdvice};

use super::FileError;

pub enum FileBytes {
    Mapped(Mapped),
    Owned(Vec<u8>),
}

pub struct Mapped {
    // Dropped before the map, whose addresses it has.
    watched: Watched,
    map: Mmap,
    path: PathBuf,
    /// Device and inode, because the path may name another file later.
    id: (u64, u64),
}

impl FileBytes {
    /// Maps a regular file. Other files are refused before they are opened, because opening a pipe would block.
    pub fn map(path: &Path) -> io::Result<Self> {
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        // SAFETY: the map is private and read-only, and nothing in this process writes to the files that it opens here. The
        // contract of `files` is that no other process writes to the file while it is open; one that is truncated is watched.
        let map = unsafe { Mmap::map(&file) }?;
        let watched = Watched::new(map.as_ptr_range());
        Ok(Self::Mapped(Mapped { watched, map, path: path.to_owned(), id: (metadata.dev(), metadata.ino()) }))
    }

    /// The file, if it is mapped.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Mapped(file) => Some(&file.path),
            Self::Owned(_) => None,
        }
    }

    /// Fails if what was read so far may not be what the file had when it was opened.
    pub fn check(&self) -> Result<(), FileError> {
        match self {
            Self::Mapped(file) if file.is_damaged() => Err(FileError::Damaged { path: file.path.clone() }),
            _ => Ok(()),
        }
    }

    /// Whether a view is one of these bytes.
    pub fn holds(&self, view: &[u8]) -> bool {
        self.as_ptr_range().contains(&view.as_ptr())
    }

    /// Returns the pages to the operating system. A later access reads them from the file again.
    pub fn release(&self) {
        if let Self::Mapped(file) = self {
            // SAFETY: the map is file-backed and was never written, so dropped pages are read again with the same bytes.
            let advised = unsafe { file.map.unchecked_advise(UncheckedAdvice::DontNeed) };
            // If the advice fails, memory use is higher but results are correct, so the error is ignored.
            advised.ok();
        }
    }

    /// Asks the operating system to start reading `range`, which must be in bounds.
    pub fn prefetch(&self, range: Range<usize>) {
        if let Self::Mapped(file) = self {
            file.map.advise_range(Advice::WillNeed, range.start, range.len()).ok();
        }
    }
}

impl Mapped {
    fn is_damaged(&self) -> bool {
        // The rest of the last page reads as zeros without a signal, so the length counts too. A file that was removed, or
        // replaced by another one, stays whole in this map.
        let is_shorter = || {
            let now = fs::metadata(&self.path);
            now.is_ok_and(|now| (now.dev(), now.ino()) == self.id && now.len() < self.map.len() as u64)
        };
        self.watched.0.damaged.load(Ordering::Acquire) || is_shorter()
    }
}

impl Deref for FileBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Mapped(file) => &file.map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// The addresses of a map, which the handler of SIGBUS knows as long as this value lives.
struct Watched(&'static Entry);

/// An entry of a list that only grows, so that a signal handler can read it. Entries are used again.
struct Entry {
    start: AtomicUsize,
    /// Zero while the entry is not used.
    end: AtomicUsize,
    damaged: AtomicBool,
    next: OnceLock<&'static Entry>,
}

static FIRST: Entry = Entry::new();
/// The entries that are not used, and the last of the list.
static ENTRIES: Mutex<(Vec<&'static Entry>, &'static Entry)> = Mutex::new((Vec::new(), &FIRST));

impl Watched {
    fn new(Range { start, end }: Range<*const u8>) -> Self {
        install_handler();
        let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.0.pop().unwrap_or_else(|| {
            let entry: &'static Entry = Box::leak(Box::new(Entry::new()));
            // The lock is held, so nobody else has set it.
            let _ = entries.1.next.set(entry);
            entries.1 = entry;
            entry
        });
        entry.damaged.store(false, Ordering::Relaxed);
        // The handler makes pages out of the addresses.
        entry.start.store(start.expose_provenance(), Ordering::Relaxed);
        entry.end.store(end.expose_provenance(), Ordering::Release);
        Self(entry)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Release);
        ENTRIES.lock().unwrap_or_else(PoisonError::into_inner).0.push(self.0);
    }
}

impl Entry {
    const fn new() -> Self {
        let (start, end) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { start, end, damaged: AtomicBool::new(false), next: OnceLock::new() }
    }

    /// The end of the map that has this address. Called by a signal handler.
    fn end_if_within(&self, address: usize) -> Option<usize> {
        let end = self.end.load(Ordering::Acquire);
        (self.start.load(Ordering::Relaxed)..end).contains(&address).then_some(end)
    }
}

/// What handled SIGBUS before.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

fn install_handler() {
    PREVIOUS.get_or_init(|| {
        let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: `sysconf` only reads; `sigaction` without a new action writes the current one to `previous`, for which
        // zeros are a valid value.
        let previous = unsafe {
            PAGE_BYTES.store(libc::sysconf(libc::_SC_PAGESIZE).cast_unsigned() as usize, Ordering::Release);
            libc::sigaction(libc::SIGBUS, ptr::null(), previous.as_mut_ptr());
            previous.assume_init()
        };
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = replace_lost_pages;
        let mut action = previous;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the signature that SA_SIGINFO asks for, and does only what a signal handler may do. If it
        // cannot be installed, the signal ends the process, as it does without it.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
        previous
    });
}

/// Handles SIGBUS: replaces the pages of a map from the lost one to the end by zeros. Reads atomics and calls the system, and
/// does nothing else, because it may interrupt any code.
extern "C" fn replace_lost_pages(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system passes a valid `siginfo_t`, which has an address for this signal.
    let address = unsafe { (*info).si_addr() }.addr();
    let page_bytes = PAGE_BYTES.load(Ordering::Acquire);
    let mut entry = Some(&FIRST);
    while let Some(here) = entry {
        if let Some(end) = here.end_if_within(address) {
            here.damaged.store(true, Ordering::Release);
            let start = address - address % page_bytes;
            // SAFETY: the pages belong to a map that is being read, so it is not unmapped meanwhile. They stay readable, and
            // what was read of them is not used, because the file is damaged.
            let mapped = unsafe {
                libc::mmap(
                    ptr::with_exposed_provenance_mut(start),
                    end - start,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            if mapped != libc::MAP_FAILED {
                return;
            }
        }
        entry = here.next.get().copied();
    }
    // No page of a model: the access is repeated, and what handled the signal before handles it.
    let previous = PREVIOUS.get().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the action is the one that `sigaction` returned. While `PREVIOUS` is not set yet, the pointer is null, which
    // changes nothing.
    unsafe { libc::sigaction(signal, previous, ptr::null_mut()) };
}
