//! Parts of models with shards: only the shards with a part's tensors are downloaded. The others are linked to blobs that are
//! missing. The names of these are their hashes, by which machines with different shards can tell that they have the same model.

use anyhow::{Context, Result, ensure};
use model::{Checkpoint, ModelPart};

use super::cache::{INDEX, RepoCache};
use super::download::Source;
use super::fetch::fetch;
use super::hub::{Digest, RemoteFile};
use super::observer::PullObserver;

/// Whether a model has shards that can be left out: the hub has to say what their SHA-256 is, and links have to be symbolic.
pub fn has_shards(files: &[&RemoteFile]) -> bool {
    let is_hashed = |file: &&RemoteFile| matches!(file.digest, Digest::Sha256(_));
    let has_index = files.iter().any(|file| file.name.as_str() == INDEX);
    cfg!(unix) && has_index && files.iter().filter(|file| is_shard(file)).all(is_hashed)
}

/// Downloads the files of a model, of its shards only those that the part needs.
pub fn fetch_part(
    cache: &RepoCache,
    source: &Source<'_>,
    files: &[&RemoteFile],
    part: ModelPart,
    observer: &mut dyn PullObserver,
) -> Result<()> {
    let (shards, others): (Vec<_>, Vec<_>) = files.iter().partition(|file| is_shard(file));
    fetch(cache, source, &others, observer)?;
    for shard in &shards {
        cache.link(source.commit, &shard.name, &shard.digest)?;
    }
    let checkpoint = Checkpoint::open(&cache.snapshot_folder(source.commit)).context("open the model")?;
    let missing = checkpoint.missing_files(part)?;
    drop(checkpoint);
    let needed: Vec<_> =
        shards.into_iter().filter(|shard| missing.iter().any(|name| name == shard.name.as_str())).collect();
    ensure!(needed.len() == missing.len(), "{} does not have all of {}", source.repo, missing.join(", "));
    fetch(cache, source, &needed, observer)
}

fn is_shard(file: &RemoteFile) -> bool {
    file.name.as_str().ends_with(".safetensors")
}
