//! Parts of models with shards: only the shards with a part's tensors are downloaded. The others are linked to blobs that are
//! missing. The names of these are their hashes, by which machines with different shards can tell that they have the same model.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use model::{Checkpoint, ModelPart};

use super::cache::{INDEX, RepoCache};
use super::download::Source;
use super::hub::{Digest, RemoteFile};

/// Whether a model has shards that can be left out: the hub has to say what their SHA-256 is, and links have to be symbolic.
pub fn has_shards(files: &[&RemoteFile]) -> bool {
    let is_hashed = |file: &&RemoteFile| matches!(file.digest, Digest::Sha256(_));
    let has_index = files.iter().any(|file| file.name.as_str() == INDEX);
    cfg!(unix) && has_index && files.iter().filter(|file| is_shard(file)).all(is_hashed)
}

/// Downloads the files of a model, of its shards only those that the part needs.
pub fn fetch_part(cache: &RepoCache, source: &Source<'_>, files: &[&RemoteFile], part: ModelPart) -> Result<()> {
    let (shards, others): (Vec<_>, Vec<_>) = files.iter().partition(|file| is_shard(file));
    super::fetch(cache, source, &others)?;
    for shard in &shards {
        cache.link(source.commit, &shard.name, &shard.digest)?;
    }
    let checkpoint = Checkpoint::open(&cache.snapshot_folder(source.commit)).context("open the model")?;
    let missing = checkpoint.missing_files(part)?;
    drop(checkpoint);
    let needed: Vec<_> =
        shards.into_iter().filter(|shard| missing.iter().any(|name| name == shard.name.as_str())).collect();
    ensure!(needed.len() == missing.len(), "{} does not have all of {}", source.repo, missing.join(", "));
    super::fetch(cache, source, &needed)
}

/// The SHA-256 of a file of a snapshot, as the hub gave it, whether the file is there or not; `None` if it is not a link to a blob.
pub fn linked_sha256(file: &Path) -> Option<[u8; 32]> {
    let target = fs::read_link(file).ok()?;
    let is_blob = target.parent()?.file_name() == Some(OsStr::new("blobs"));
    let name = target.file_name()?.to_str().filter(|name| is_blob && name.len() == 64 && name.is_ascii())?;
    let mut hash = [0; 32];
    for (byte, at) in hash.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&name[at..at + 2], 16).ok()?;
    }
    Some(hash)
}

fn is_shard(file: &RemoteFile) -> bool {
    file.name.as_str().ends_with(".safetensors")
}
