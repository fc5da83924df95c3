//! The options for the cluster key. What they name is read in [`cluster_key`](crate::cluster_key).

use std::fmt;
use std::path::PathBuf;

use clap::Args;

use super::heading;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::CLUSTER)]
pub struct KeyOptions {
    /// Shared secret of the machines in a cluster, at least 16 characters and hard to guess. Process lists show arguments, so a file is safer, or
    /// the key that `consort cluster invite` makes and `consort join` gets
    #[arg(long, value_name = "KEY", env = "CONSORT_CLUSTER_KEY", hide_env_values = true)]
    pub cluster_key: Option<Passphrase>,
    /// File that contains the cluster key
    #[arg(long, value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,
}

#[derive(Clone)]
pub struct Passphrase(pub String);

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
