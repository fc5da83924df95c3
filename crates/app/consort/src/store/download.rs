//! Downloads one file from the hub into one blob of the cache. Resumes an earlier attempt, verifies the digest, and renames
//! the file only when it is right.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};
use ureq::http::StatusCode;

use super::hub::{Digest, Hub, HubError, RemoteFile};
use super::name::{FileName, RepoId};

/// A download fails after this many attempts in a row that each bring fewer than `PROGRESS_BYTES_MIN` bytes.
const STALLED_ATTEMPTS_MAX: u32 = 3;
const PROGRESS_BYTES_MIN: u64 = 64 << 10;
const PAUSE: Duration = Duration::from_millis(300);
const READ_BYTES: usize = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error("the connection broke after {got} of {want} bytes of {name}; the next pull goes on from there ({reason})")]
    Broken { name: FileName, got: u64, want: u64, reason: String },
    #[error("the hub sent only {got} of {want} bytes of {name}; the next pull goes on from there")]
    Short { name: FileName, got: u64, want: u64 },
    #[error("the hub sent more than the {want} bytes that {name} has")]
    Long { name: FileName, want: u64 },
    #[error("the hub answered for {name} with other bytes than were asked for")]
    WrongRange { name: FileName },
    #[error("{name} does not match its checksum, so it was deleted: expected {want}, got {got}")]
    Checksum { name: FileName, want: String, got: String },
    #[error("the download of {name} was stopped at {got} of {want} bytes; the next pull goes on from there")]
    Cancelled { name: FileName, got: u64, want: u64 },
    #[error("write {path}", path = .path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl DownloadError {
    fn is_retryable(&self) -> bool {
        match self {
            Self::Hub(error) => error.is_retryable(),
            Self::Broken { .. } | Self::Short { .. } => true,
            _ => false,
        }
    }
}

/// The hub, repository and commit that files are downloaded from.
pub struct Source<'a> {
    pub hub: &'a Hub,
    pub repo: &'a RepoId,
    pub commit: &'a str,
}

/// Told of the bytes of a file that are here, including those of an earlier attempt. `Break` ends the download.
pub type Report<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// Downloads `file` to the path `blob`.
pub fn download(
    source: &Source<'_>,
    file: &RemoteFile,
    blob: &Path,
    report: &mut Report<'_>,
) -> Result<(), DownloadError> {
    let path = partial(blob);
    loop {
        let mut part = Partial::open(file, &path)?;
        let resumed = part.len > 0;
        part.report(report)?;
        part.fill(source, report)?;
        match part.finish(blob) {
            // The bytes of the earlier attempt may be the wrong ones, so the download starts again.
            Err(DownloadError::Checksum { .. }) if resumed => {}
            done => return done,
        }
    }
}

/// Where the beginning of a blob is until all of it is here.
pub fn partial(blob: &Path) -> PathBuf {
    blob.with_extension("incomplete")
}

/// The downloaded beginning of a file, with its running hash.
struct Partial<'a> {
    file: &'a RemoteFile,
    path: &'a Path,
    out: File,
    hash: Hash,
    len: u64,
}

impl<'a> Partial<'a> {
    fn open(file: &'a RemoteFile, path: &'a Path) -> Result<Self, DownloadError> {
        let open = || {
            let mut out = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            let mut hash = Hash::new(file);
            let mut len = 0;
            if out.metadata()?.len() <= file.bytes {
                len = copy_blocks(&mut out, |block| {
                    hash.update(block);
                    Ok(())
                })?;
            } else {
                out.set_len(0)?;
            }
            Ok(Self { file, path, out, hash, len })
        };
        open().map_err(|source| DownloadError::Write { path: path.to_owned(), source })
    }

    /// Sends requests until no bytes are missing.
    fn fill(&mut self, source: &Source<'_>, report: &mut Report<'_>) -> Result<(), DownloadError> {
        let mut fruitless = 0;
        while self.len < self.file.bytes {
            let before = self.len;
            let Err(error) = self.receive(source, report) else { break };
            fruitless = if self.len >= before + PROGRESS_BYTES_MIN { 1 } else { fruitless + 1 };
            if !error.is_retryable() || fruitless == STALLED_ATTEMPTS_MAX {
                return Err(error);
            }
            thread::sleep(PAUSE * fruitless);
        }
        Ok(())
    }

    /// Sends one request for all missing bytes.
    fn receive(&mut self, source: &Source<'_>, report: &mut Report<'_>) -> Result<(), DownloadError> {
        let want = self.file.bytes;
        let response = source.hub.file(source.repo, source.commit, &self.file.name, self.len)?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let range = response.headers().get("content-range").and_then(|value| value.to_str().ok());
                if range != Some(&format!("bytes {}-{}/{want}", self.len, want - 1)) {
                    return Err(DownloadError::WrongRange { name: self.file.name.clone() });
                }
            }
            // The server does not support ranges and sends the whole file: starts again.
            StatusCode::OK => {
                self.restart().map_err(|source| DownloadError::Write { path: self.path.to_owned(), source })?;
            }
            _ => return Err(DownloadError::WrongRange { name: self.file.name.clone() }),
        }
        let mut body = response.into_body().into_reader();
        let mut block = vec![0; READ_BYTES];
        loop {
            let got = match body.read(&mut block) {
                Ok(0) if self.len == want => return Ok(()),
                Ok(0) => return Err(DownloadError::Short { name: self.file.name.clone(), got: self.len, want }),
                Ok(got) => got,
                Err(error) => {
                    let (name, reason) = (self.file.name.clone(), error.to_string());
                    return Err(DownloadError::Broken { name, got: self.len, want, reason });
                }
            };
            if got as u64 > want - self.len {
                self.delete();
                return Err(DownloadError::Long { name: self.file.name.clone(), want });
            }
            let written = self.out.write_all(&block[..got]);
            written.map_err(|source| DownloadError::Write { path: self.path.to_owned(), source })?;
            self.hash.update(&block[..got]);
            self.len += got as u64;
            self.report(report)?;
        }
    }

    fn report(&self, report: &mut Report<'_>) -> Result<(), DownloadError> {
        match report(self.len) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => {
                Err(DownloadError::Cancelled { name: self.file.name.clone(), got: self.len, want: self.file.bytes })
            }
        }
    }

    fn restart(&mut self) -> io::Result<()> {
        self.out.set_len(0)?;
        self.out.rewind()?;
        self.hash = Hash::new(self.file);
        self.len = 0;
        Ok(())
    }

    /// Renames the file to `blob`, or deletes it if its digest is wrong.
    fn finish(self, blob: &Path) -> Result<(), DownloadError> {
        let want = self.file.digest.hex();
        let got = self.hash.clone().hex();
        if got != want {
            self.delete();
            return Err(DownloadError::Checksum { name: self.file.name.clone(), want: want.to_owned(), got });
        }
        let kept = self.out.sync_data().and_then(|()| fs::rename(self.path, blob));
        kept.map_err(|source| DownloadError::Write { path: blob.to_owned(), source })
    }

    /// Best effort: the caller reports another error already.
    fn delete(&self) {
        let _ = fs::remove_file(self.path);
    }
}

/// A running hash, of the kind that the listing gives for the file.
#[derive(Clone)]
enum Hash {
    Sha256(Sha256),
    GitBlob(Sha1),
}

impl Hash {
    fn new(file: &RemoteFile) -> Self {
        match file.digest {
            Digest::Sha256(_) => Self::Sha256(Sha256::new()),
            // Git hashes a header before the bytes.
            Digest::GitBlob(_) => Self::GitBlob(Sha1::new().chain_update(format!("blob {}\0", file.bytes))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hash) => hash.update(bytes),
            Self::GitBlob(hash) => hash.update(bytes),
        }
    }

    fn hex(self) -> String {
        match self {
            Self::Sha256(hash) => hex(&hash.finalize()),
            Self::GitBlob(hash) => hex(&hash.finalize()),
        }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads to the end, one block at a time, and returns the number of bytes.
pub fn copy_blocks(from: &mut impl Read, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<u64> {
    let mut block = vec![0; READ_BYTES];
    let mut total = 0;
    loop {
        match from.read(&mut block) {
            Ok(0) => return Ok(total),
            Ok(got) => {
                each(&block[..got])?;
                total += got as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
