//! The options for the cluster key, the secret that all machines of a cluster share.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use cluster::tcp::ClusterKey;

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
        let key = match (&self.cluster_key_file, &self.cluster_key) {
            (Some(file), _) => ClusterKey::from_passphrase(&read(file)?),
            (None, Some(Passphrase(text))) => ClusterKey::from_passphrase(text),
            (None, None) => {
                return Err(UsageError::new(
                    "machines that work together share a key: give all of them the same one by --cluster-key-file, \
                 --cluster-key or CONSORT_CLUSTER_KEY",
                )
                .into());
            }
        };
        Ok(key?)
    }
}

fn read(path: &Path) -> Result<String> {
    let context = || format!("read the cluster's key from {}", path.display());
    let bytes = bounded_file::read(path, FILE_BYTES_MAX).with_context(context)?;
    String::from_utf8(bytes).with_context(context)
}
