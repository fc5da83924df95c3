//! The digest by which peers of a swarm tell that they have the same model, also if each has only some of its files.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context, Result};
use directory::ModelDigest;
use model::Checkpoint;
use sha2::{Digest as _, Sha256};

use crate::progress;
use crate::store::download::copy_blocks;

/// Of a model with shards: a hash of config.json, and of the names and the SHA-256 hashes of all files that its index lists. The hub
/// gives these hashes, and they are the names of the blobs in its cache; files elsewhere are read. Of another model it is
/// [`Checkpoint::digest`].
///
/// So another model, a fine-tuned one, and one in another format have other digests. It does not show what a peer computes with:
/// one that lies about its digest is found by spot checks only, and a file in the cache that was damaged later is not found.
///
/// `path` is the path that `checkpoint` was opened from.
pub fn model_digest(path: &Path, checkpoint: &Checkpoint) -> Result<ModelDigest> {
    let Some(shards) = checkpoint.shards() else { return Ok(ModelDigest(*checkpoint.digest().as_bytes())) };
    let mut names: Vec<&String> = shards.iter().collect();
    names.sort_unstable();
    let mut hash = Sha256::new_with_prefix("consort 2026 digest of shards");
    hash_with_length(&mut hash, checkpoint.config().unwrap_or_default());
    for name in names {
        let file = path.join(name);
        hash_with_length(&mut hash, name);
        hash.update(match linked_sha256(&file) {
            Some(known) => known,
            None => sha256_of(&file)?,
        });
    }
    Ok(ModelDigest(hash.finalize().into()))
}

/// The SHA-256 of a file of a snapshot, as the hub gave it, whether the file is there or not; `None` if it is not a link to a blob.
fn linked_sha256(file: &Path) -> Option<[u8; 32]> {
    let target = fs::read_link(file).ok()?;
    let is_blob = target.parent()?.file_name() == Some(OsStr::new("blobs"));
    let name = target.file_name()?.to_str().filter(|name| is_blob && name.len() == 64 && name.is_ascii())?;
    let mut hash = [0; 32];
    for (byte, at) in hash.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&name[at..at + 2], 16).ok()?;
    }
    Some(hash)
}

/// Hashes a field so that it cannot be confused with the one after it.
fn hash_with_length(hash: &mut Sha256, field: &str) {
    hash.update((field.len() as u64).to_le_bytes());
    hash.update(field);
}

fn sha256_of(file: &Path) -> Result<[u8; 32]> {
    let spinner = progress::spinner(format!("hashing {}", file.display()));
    let mut hash = Sha256::new();
    let opened = File::open(file);
    let hashed = opened.and_then(|mut opened| {
        copy_blocks(&mut opened, |block| {
            hash.update(block);
            Ok(())
        })
    });
    spinner.finish_and_clear();
    hashed.with_context(|| format!("read {}, whose hash is a part of the model's digest", file.display()))?;
    Ok(hash.finalize().into())
}
