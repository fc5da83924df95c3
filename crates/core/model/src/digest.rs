//! `CheckpointDigest`: identifies the files of a model, so that processes which open the same path, on one host or on
//! several, can tell whether they have the same weights.

use std::fmt;

/// A BLAKE3 hash of a model's config.json, of the headers of its files and of samples of its tensors: see
/// [`Checkpoint::digest`](crate::Checkpoint::digest). Displayed as 64 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckpointDigest([u8; 32]);

impl CheckpointDigest {
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn of_manifest(json: &[u8]) -> Self {
        Self(blake3::derive_key("consort 2026 digest of a manifest", json))
    }

    /// `config` is the hash of config.json, where there is one. `hash_files` hashes the headers and the tensors.
    pub(crate) fn new(config: Option<blake3::Hash>, hash_files: impl FnOnce(&mut blake3::Hasher)) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("consort 2026 digest of a checkpoint, sampled");
        hash.update(&config.map_or([0; 32], |config| *config.as_bytes()));
        hash_files(&mut hash);
        Self(hash.finalize().into())
    }
}

impl fmt::Display for CheckpointDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
