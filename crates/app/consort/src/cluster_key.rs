//! The cluster key, the secret that all machines of a cluster share: given by [`KeyOptions`], or kept in
//! a file that its owner alone can read.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use net::{ClusterKey, WeakPassphrase, check_passphrase};
use rustix::rand::{GetRandomFlags, getrandom};
use tempfile::NamedTempFile;

use crate::bounded_file;
use crate::options::{KeyOptions, Passphrase};
use crate::store::Settings;
use crate::usage::UsageError;

/// The maximum size of a key file.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Random bytes of a key that is made here.
const KEY_BYTES: usize = 20;
/// What the mode of a file lets the group and others do.
const OTHERS: u32 = 0o077;

impl KeyOptions {
    pub fn key(&self) -> Result<ClusterKey> {
        parse(&self.given_text()?)
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

    /// The text of the given key, else of the one that this machine keeps, else of a new one, which it keeps from now on; `made`
    /// is called with its file.
    pub fn text_or_made(&self, made: impl FnOnce(&Path)) -> Result<String> {
        if let Some(text) = self.text_if_kept()? {
            return Ok(text);
        }
        let file = kept_file()?;
        let text = make(&file)?;
        made(&file);
        Ok(text)
    }

    /// The text of the given key, else of the one that this machine keeps, if it does.
    pub fn text_if_kept(&self) -> Result<Option<String>> {
        if self.is_given() { self.given_text().map(Some) } else { kept() }
    }

    /// The text of the given key, without white space around it, for a protocol that uses it as it is. A weak one is refused.
    pub fn given_text(&self) -> Result<String> {
        let text = match (&self.cluster_key_file, &self.cluster_key) {
            (Some(file), _) => &read(file)?,
            (None, Some(Passphrase(text))) => text,
            (None, None) => return Err(missing().into()),
        };
        check_passphrase(text).map_err(weak)?;
        Ok(text.trim().to_owned())
    }

    pub fn is_given(&self) -> bool {
        self.cluster_key.is_some() || self.cluster_key_file.is_some()
    }
}

/// The key that a text is.
pub fn parse(text: &str) -> Result<ClusterKey> {
    Ok(ClusterKey::from_passphrase(text).map_err(weak)?)
}

fn weak(error: WeakPassphrase) -> UsageError {
    UsageError::new(format!(
        "the cluster key can be guessed: {error}. Leave it out, and `consort cluster key` makes one that cannot, for all machines"
    ))
}

fn missing() -> UsageError {
    UsageError::new(
        "machines that work together share a key: give all of them the same one by --cluster-key-file or CONSORT_CLUSTER_KEY",
    )
}

/// Where this machine keeps the key of its cluster.
pub fn kept_file() -> Result<PathBuf> {
    Ok(Settings::own_configuration()?.join("cluster.key"))
}

/// The key that this machine keeps.
fn kept() -> Result<Option<String>> {
    let file = kept_file()?;
    match read_private(&file) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Keeps a key that came from another machine. One that was kept before stays beside it.
pub fn keep(text: &str) -> Result<PathBuf> {
    let file = kept_file()?;
    let saving = || format!("save the cluster's key in {}", file.display());
    let written = private_file(&file, text).with_context(saving)?;
    match fs::rename(&file, file.with_extension("key.old")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).with_context(saving),
        _ => {}
    }
    written.persist(&file).with_context(saving)?;
    Ok(file)
}

/// Makes a key. If another process makes one at the same time, both have the same.
fn make(file: &Path) -> Result<String> {
    let saving = || format!("save the cluster's key in {}", file.display());
    let mut random = [0; KEY_BYTES];
    let filled = getrandom(&mut random, GetRandomFlags::empty()).with_context(saving)?;
    anyhow::ensure!(filled == random.len(), "the system has no random numbers");
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    match private_file(file, &text).with_context(saving)?.persist_noclobber(file) {
        Ok(_) => Ok(text),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => read_private(file),
        Err(error) => Err(error.error).with_context(saving),
    }
}

/// A file beside `file` with this text, which its owner alone can read. It gets the name of `file` once it is complete.
fn private_file(file: &Path, text: &str) -> Result<NamedTempFile> {
    let folder = file.parent().context("a key file is in a folder")?;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    // Such a file has the mode 0600.
    let mut written = NamedTempFile::new_in(folder)?;
    writeln!(written, "{text}")?;
    written.as_file().sync_all()?;
    Ok(written)
}

/// The text of a file that nobody else may read.
fn read_private(path: &Path) -> Result<String> {
    let mode = path.metadata().with_context(|| reading(path))?.permissions().mode();
    let file = path.display();
    anyhow::ensure!(
        mode & OTHERS == 0,
        "other users of this machine may read the cluster's key in {file}: if none has, forbid it with `chmod 600 {file}`; \
         else remove it, and have all machines join anew"
    );
    read(path)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_key_is_made_once_for_its_owner_alone() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("consort/cluster.key");
        let made = make(&file).unwrap();
        assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
        assert_eq!((read_private(&file).unwrap().trim(), made.len()), (made.as_str(), 2 * KEY_BYTES));
        // Another process was faster.
        assert_eq!(make(&file).unwrap().trim(), made);
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "nothing else stays there");
    }

    #[test]
    fn a_kept_key_that_others_may_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.key");
        make(&file).unwrap();
        for others in [0o640, 0o604, 0o644, 0o620] {
            fs::set_permissions(&file, fs::Permissions::from_mode(others)).unwrap();
            let error = read_private(&file).unwrap_err().to_string();
            assert!(error.contains("chmod 600"), "{others:o}: {error}");
        }
        fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).unwrap();
        read_private(&file).unwrap();
        assert!(is_missing(&read_private(&folder.path().join("other")).unwrap_err()));
    }
}
