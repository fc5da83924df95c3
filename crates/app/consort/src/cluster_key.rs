//! The cluster key, the secret that all machines of a cluster share: given by [`KeyOptions`], or saved on this machine.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use net::ClusterKey;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::bounded_file;
use crate::options::{KeyOptions, Passphrase};
use crate::store::Settings;
use crate::usage::UsageError;

/// The maximum size of a key file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Random bytes of a key that is made here.
const KEY_BYTES: usize = 20;

impl KeyOptions {
    pub fn key(&self) -> Result<ClusterKey> {
        Ok(ClusterKey::from_passphrase(&self.given_text()?)?)
    }

    /// Checks that there is a key. A file is not read: it may be a pipe, which gives its content once.
    pub fn check(&self) -> Result<()> {
        self.check_given()?;
        if self.cluster_key_file.is_none() { self.key().map(drop) } else { Ok(()) }
    }

    /// Checks that a key is given, whatever it is. A file is not read.
    pub fn check_given(&self) -> Result<()> {
        match &self.cluster_key_file {
            Some(file) => file.metadata().map(drop).with_context(|| reading(file)),
            None if self.cluster_key.is_some() => Ok(()),
            None => Err(missing().into()),
        }
    }

    /// The given key, else the one that this machine has saved, else a new one, which is saved for the next time.
    pub fn key_or_saved(&self) -> Result<ClusterKey> {
        if self.is_given() {
            return self.key();
        }
        let file = saved_file()?;
        let text = match read(&file) {
            Ok(text) => text,
            Err(error) if is_missing(&error) => create(&file)?,
            Err(error) => return Err(error),
        };
        eprintln!("On other machines of this network run:\n\n    consort join --cluster-key {}\n", text.trim());
        Ok(ClusterKey::from_passphrase(&text)?)
    }

    /// The given key, else the one that this machine has saved.
    pub fn key_if_saved(&self) -> Result<ClusterKey> {
        if self.is_given() {
            return self.key();
        }
        match read(&saved_file()?) {
            Ok(text) => Ok(ClusterKey::from_passphrase(&text)?),
            Err(error) if is_missing(&error) => self.key(),
            Err(error) => Err(error),
        }
    }

    /// The text of the given key, without white space around it, for a protocol that uses it as it is.
    pub fn given_text(&self) -> Result<String> {
        let text = match (&self.cluster_key_file, &self.cluster_key) {
            (Some(file), _) => &read(file)?,
            (None, Some(Passphrase(text))) => text,
            (None, None) => return Err(missing().into()),
        };
        Ok(text.trim().to_owned())
    }

    fn is_given(&self) -> bool {
        self.cluster_key.is_some() || self.cluster_key_file.is_some()
    }
}

fn missing() -> UsageError {
    UsageError::new(
        "machines that work together share a key: give all of them the same one by --cluster-key-file, --cluster-key or \
         CONSORT_CLUSTER_KEY",
    )
}

/// Where this machine keeps the key of its cluster.
fn saved_file() -> Result<PathBuf> {
    Ok(Settings::own_configuration()?.join("cluster.key"))
}

/// Makes a key and saves it, readable by its owner alone. If another process saves one first, that is the key.
fn create(file: &Path) -> Result<String> {
    let saving = || format!("save the cluster's key in {}", file.display());
    let folder = file.parent().context("a key file is in a folder")?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(saving)?;
    let mut random = [0; KEY_BYTES];
    let filled = getrandom(&mut random, GetRandomFlags::empty()).with_context(saving)?;
    anyhow::ensure!(filled == random.len(), "the system has no random numbers");
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let created = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    match created {
        Ok(mut created) => {
            created.write_all(text.as_bytes()).with_context(saving)?;
            Ok(text)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => read(file),
        Err(error) => Err(error).with_context(saving),
    }
}

fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn read(path: &Path) -> Result<String> {
    let bytes = bounded_file::read(path, FILE_BYTES_MAX).with_context(|| reading(path))?;
    String::from_utf8(bytes).with_context(|| reading(path))
}

fn reading(path: &Path) -> String {
    format!("read the cluster's key from {}", path.display())
}
