//! Downloads the files of a model that the cache does not have, and links them in the snapshot.

use anyhow::{Context, Result};

use super::cache::RepoCache;
use super::disk;
use super::download::{Source, download, partial};
use super::hub::{Digest, RemoteFile};
use super::observer::{PullObserver, PullProgress};

pub fn fetch(
    cache: &RepoCache,
    source: &Source<'_>,
    files: &[&RemoteFile],
    observer: &mut dyn PullObserver,
) -> Result<()> {
    disk::check(&source.repo.to_string(), missing(cache, files), &cache.folder)?;
    observer.begin(files.iter().map(|file| file.bytes).sum());
    for file in files {
        let _lock = cache.lock(&file.digest)?;
        let blob = cache.blob(&file.digest);
        let mut report = |done| {
            let digest = match &file.digest {
                Digest::Sha256(digest) => Some(digest.clone()),
                Digest::GitBlob(_) => None,
            };
            observer.progress(&PullProgress { file: file.name.to_string(), digest, done, total: file.bytes })
        };
        if is_here(cache, file) {
            // It is complete, so there is nothing to end.
            let _ = report(file.bytes);
        } else {
            download(source, file, &blob, &mut report).with_context(|| format!("download {}", source.repo))?;
        }
    }
    for file in files {
        cache.link(source.commit, &file.name, &file.digest)?;
    }
    Ok(())
}

/// The bytes that are still to be downloaded.
pub fn missing(cache: &RepoCache, files: &[&RemoteFile]) -> u64 {
    let missing = files.iter().filter(|file| !is_here(cache, file)).map(|file| {
        let begun = partial(&cache.blob(&file.digest)).metadata().map_or(0, |part| part.len());
        file.bytes.saturating_sub(begun)
    });
    missing.fold(0, u64::saturating_add)
}

/// Only a blob whose digest was verified has its name.
fn is_here(cache: &RepoCache, file: &RemoteFile) -> bool {
    cache.blob(&file.digest).metadata().is_ok_and(|found| found.len() == file.bytes)
}
