//! The options for the cluster key, the secret that all machines of a cluster share.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use net::ClusterKey;

use crate::bounded_file;
use crate::usage::UsageError;

/// The maximum size of a key file.
const FILE_BYTES_MAX: u64 = 64 << 10;

#[derive(Args, Clone, Debug, Default)]
pub struct KeyOptions {
    /// Shared secret of the machines in a cluster, at least 16 characters; a file is safer, because process lists show
    /// arguments
    #[arg(long, value_name = "KEY", env = "CONSORT_CLUSTER_KEY", hide_env_values = true)]
    cluster_key: Option<Passphrase>,
    /// File that contains the cluster key
    #[arg(long, value_name = "FILE")]
    cluster_key_file: Option<PathBuf>,
}

#[derive(Clone)]
struct Passphrase(String);

impl From<String> for Passphrase {
    fn from(text: String) -> Self {
        Self(text)
    }
}

/// Does not print the secret.
impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}

impl KeyOptions {
    pub fn key(&self) -> Result<ClusterKey> {
        match &self.cluster_key_file {
            Some(file) => Ok(ClusterKey::from_passphrase(&read(file)?)?),
            None => self.key_from_text(),
        }
    }

    /// Checks that there is a key. A file is not read: it may be a pipe, which gives its content once.
    pub fn check(&self) -> Result<()> {
        match &self.cluster_key_file {
            Some(file) => file.metadata().map(drop).with_context(|| reading(file)),
            None => self.key_from_text().map(drop),
        }
    }

    fn key_from_text(&self) -> Result<ClusterKey> {
        let Some(Passphrase(text)) = &self.cluster_key else {
            let message = "machines that work together share a key: give all of them the same one by \
                           --cluster-key-file, --cluster-key or CONSORT_CLUSTER_KEY";
            return Err(UsageError::new(message).into());
        };
        Ok(ClusterKey::from_passphrase(text)?)
    }
}

fn read(path: &Path) -> Result<String> {
    let bytes = bounded_file::read(path, FILE_BYTES_MAX).with_context(|| reading(path))?;
    String::from_utf8(bytes).with_context(|| reading(path))
}

fn reading(path: &Path) -> String {
    format!("read the cluster's key from {}", path.display())
}
