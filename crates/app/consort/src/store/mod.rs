//! The model store: resolves a model name to files on disk, and downloads them if they are missing.

mod aliases;
mod bundled;
mod cache;
pub mod catalogue;
mod choose;
mod default_model;
mod disk;
pub mod download;
mod fetch;
mod hub;
pub mod name;
mod observer;
mod parts;
mod settings;
mod suggestion;
mod zip_member;

#[cfg(test)]
#[path = "../../tests/store/fake_hub.rs"]
mod fake_hub;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, bail};
use model::ModelPart;

use aliases::Aliases;
use cache::RepoCache;
pub use choose::{ChosenFiles, choose};
use download::{DownloadError, Source};
use fetch::fetch;
use hub::{Hub, HubError, Listing};
use name::{ModelName, NameError, RepoId, of_hub, of_path, tag_of};
use observer::DownloadBar;
pub use settings::Settings;
use suggestion::{did_you_mean, nearest};

pub use cache::StoredModel;
pub use catalogue::catalogue;
pub use hub::FoundModel;
#[allow(unused_imports)] // for the server, which shows downloads
pub use observer::{PullObserver, PullProgress};

/// The names of models that an error lists.
const NAMES_LISTED_MAX: usize = 8;

/// A model on disk.
#[derive(Debug)]
pub struct ModelFiles {
    /// Its one name: see [`name`].
    pub name: String,
    /// A folder with `config.json`, safetensors and a tokenizer, or the (first) file of a GGUF.
    pub path: PathBuf,
}

pub struct Store {
    settings: Settings,
}

/// Whether a word that is no path has the form of a model's name, or is an alias.
pub fn is_model_name(word: &str) -> bool {
    let is_alias = || Store::from_environment().is_ok_and(|store| store.alias(word).is_ok_and(|found| found.is_some()));
    match word.parse() {
        Ok(ModelName::Hub { .. } | ModelName::Bundled) | Err(NameError::NoSuchSize { .. }) => true,
        Ok(ModelName::Local(_)) | Err(_) => is_alias(),
    }
}

/// Whether a download ended because its observer ended it.
#[allow(dead_code)] // for the server, whose clients may leave
pub fn is_cancelled(error: &Error) -> bool {
    error.chain().any(|cause| {
        matches!(cause.downcast_ref(), Some(DownloadError::Cancelled { .. })) || cause.is::<bundled::Cancelled>()
    })
}

impl Store {
    pub fn from_environment() -> Result<Self> {
        Ok(Self { settings: Settings::from_environment()? })
    }

    /// The files of a model, from the caches if they are complete, else downloaded. `None` is the default model.
    pub fn resolve(&self, model: Option<&str>) -> Result<ModelFiles> {
        let Some(model) = model else { return self.default_model() };
        let name = self.parse(model)?;
        match self.find_named(&name) {
            Some(files) => Ok(files),
            None => self.pull_named(&name, &mut DownloadBar::new()),
        }
    }

    /// The same for a part of a model. Of a model with shards only those are downloaded that have the part's tensors; others may be
    /// missing.
    pub fn resolve_part(&self, model: Option<&str>, part: ModelPart) -> Result<ModelFiles> {
        let Some(given) = model else { return self.resolve(None) };
        let ModelName::Hub { repo, choice: None } = self.parse(given)? else { return self.resolve(model) };
        let found = self.cache(&repo).find_part(part);
        match found {
            Some(files) => Ok(files),
            None => self.pull_files(&repo, None, Some(part), &mut DownloadBar::new()),
        }
    }

    /// The files of a model that is on this machine. Downloads nothing.
    pub fn find(&self, model: &str) -> Result<ModelFiles> {
        let name = self.parse(model)?;
        self.find_named(&name).ok_or_else(|| {
            let near = nearest(model, self.names_here());
            anyhow!(
                "{model} is not on this machine: `consort pull {model}` fetches it{}",
                did_you_mean(near.as_deref())
            )
        })
    }

    /// Like [`Self::resolve`], but checks the hub for a newer version even if the model is in the cache.
    pub fn pull(&self, model: Option<&str>) -> Result<ModelFiles> {
        match model {
            Some(model) => self.pull_observed(model, &mut DownloadBar::new()),
            None => self.default_model(),
        }
    }

    /// The same, with an observer that is told of progress and may end the download; [`is_cancelled`] tells that it
    /// did.
    pub fn pull_observed(&self, model: &str, observer: &mut dyn PullObserver) -> Result<ModelFiles> {
        match self.parse(model)? {
            ModelName::Local(_) => bail!("{model} is on this machine already"),
            name => self.pull_named(&name, observer),
        }
    }

    /// Every model in the caches, ordered by name.
    pub fn list(&self) -> Result<Vec<StoredModel>> {
        let mut stored: Vec<_> = RepoCache::all(&self.settings.hub_cache)?.iter().flat_map(RepoCache::stored).collect();
        if let Some(path) = bundled::find(&self.settings.own_cache) {
            let bytes = path.metadata().map_or(0, |file| file.len());
            stored.push(StoredModel { name: catalogue().bundled().name.clone(), bytes, complete: true, path });
        }
        stored.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(stored)
    }

    /// Deletes a model from the caches, or an alias and not its model. Returns the number of bytes freed.
    pub fn remove(&self, model: &str) -> Result<u64> {
        if self.remove_alias(model)? {
            return Ok(0);
        }
        match self.parse(model)? {
            ModelName::Local(_) => bail!("{model} is a file of yours: consort deletes only what it has fetched"),
            ModelName::Bundled => bundled::remove(&self.settings.own_cache),
            ModelName::Hub { repo, choice } => self.cache(&repo).remove(choice.as_deref()),
        }
    }

    /// The one name of a model, whichever of its names is given; `None` if it is no name of a model. The model need
    /// not be on this machine.
    pub fn canonical(&self, name: &str) -> Option<String> {
        let name = self.parse(name).ok()?;
        Some(self.find_named(&name).map_or_else(|| canonical(&name), |files| files.name))
    }

    /// Aliases and the models that they stand for, ordered by alias.
    pub fn aliases(&self) -> Result<BTreeMap<String, String>> {
        self.alias_file().all()
    }

    /// Lets every command take `alias` for `model`, which need not be on this machine yet.
    #[allow(dead_code)] // for the server's `copy` and `create`
    pub fn set_alias(&self, alias: &str, model: &str) -> Result<()> {
        let name = self.parse(model)?;
        let is_model = self.names_here().iter().any(|here| here.eq_ignore_ascii_case(alias));
        if is_model {
            bail!("`{alias}` cannot be an alias: it is a model");
        }
        self.alias_file().set(alias, &aliases::kept(&name, canonical(&name))?)
    }

    /// Whether there was such an alias.
    pub fn remove_alias(&self, alias: &str) -> Result<bool> {
        self.alias_file().remove(alias)
    }

    /// The models of a hub that a word finds.
    pub fn search(&self, word: &str, count_max: usize) -> Result<Vec<FoundModel>> {
        Ok(Hub::new(self.settings.access()?).search(word, count_max)?)
    }

    fn alias_file(&self) -> Aliases {
        Aliases::new(self.settings.aliases.clone())
    }

    /// What an alias stands for; `None` for other names.
    fn alias(&self, name: &str) -> Result<Option<String>> {
        if name::is_model_path(Path::new(name)) { Ok(None) } else { self.alias_file().target(name) }
    }

    fn parse(&self, model: &str) -> Result<ModelName> {
        let target = self.alias(model)?;
        let parsed = target.as_deref().unwrap_or(model).parse();
        Ok(parsed.map_err(|error| match error {
            NameError::NotAModel { name, near: None } => {
                NameError::NotAModel { near: nearest(&name, self.names_here()), name }
            }
            error => error,
        })?)
    }

    fn find_named(&self, name: &ModelName) -> Option<ModelFiles> {
        match name {
            ModelName::Local(path) => Some(ModelFiles { name: of_path(path), path: path.into() }),
            ModelName::Bundled => {
                let path = bundled::find(&self.settings.own_cache)?;
                Some(ModelFiles { name: catalogue().bundled().name.clone(), path })
            }
            ModelName::Hub { repo, choice } => self.cache(repo).find(choice.as_deref()),
        }
    }

    fn pull_named(&self, name: &ModelName, observer: &mut dyn PullObserver) -> Result<ModelFiles> {
        match name {
            ModelName::Local(path) => Ok(ModelFiles { name: of_path(path), path: path.into() }),
            ModelName::Bundled => self.bundled(observer),
            ModelName::Hub { repo, choice } => self.pull_files(repo, choice.as_deref(), None, observer),
        }
    }

    fn bundled(&self, observer: &mut dyn PullObserver) -> Result<ModelFiles> {
        let path = match bundled::find(&self.settings.own_cache) {
            Some(path) => path,
            None => bundled::fetch(&self.settings.own_cache, observer)?,
        };
        Ok(ModelFiles { name: catalogue().bundled().name.clone(), path })
    }

    /// Downloads a model, or only the shards that a part of it needs.
    fn pull_files(
        &self,
        repo: &RepoId,
        choice: Option<&str>,
        part: Option<ModelPart>,
        observer: &mut dyn PullObserver,
    ) -> Result<ModelFiles> {
        let hub = Hub::new(self.settings.access()?);
        let listing = hub.listing(repo).map_err(|error| self.explained(repo, choice, error))?;
        self.fetch_listed(&hub, repo, choice, part, &listing, observer)
    }

    fn fetch_listed(
        &self,
        hub: &Hub,
        repo: &RepoId,
        choice: Option<&str>,
        part: Option<ModelPart>,
        listing: &Listing,
        observer: &mut dyn PullObserver,
    ) -> Result<ModelFiles> {
        let offered: Vec<_> = listing.files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
        let chosen = choose(&offered, choice).with_context(|| format!("choose the files of {repo}"))?;
        let files: Vec<_> = chosen.files().iter().map(|&index| &listing.files[index]).collect();

        let cache = self.cache(repo);
        let source = Source { hub, repo, commit: &listing.commit };
        match part.filter(|_| matches!(chosen, ChosenFiles::Folder(_)) && parts::has_shards(&files)) {
            Some(part) => parts::fetch_part(&cache, &source, &files, part, observer)?,
            None => fetch(&cache, &source, &files, observer)?,
        }
        let snapshot = cache.publish(&listing.commit)?;
        Ok(cache.files(&offered, &chosen, snapshot))
    }

    /// An error of the hub, with the model that was asked for and what there is instead.
    fn explained(&self, repo: &RepoId, choice: Option<&str>, error: HubError) -> Error {
        let name = of_hub(repo, choice.map(tag_of).as_deref());
        let is_here = self.cache(repo).find(choice).is_some();
        match error {
            HubError::Offline(_) | HubError::Unreachable { .. } if is_here => {
                Error::new(error).context(format!("{name} is here, but whether there is a newer version is not known"))
            }
            HubError::Offline(_) | HubError::Unreachable { .. } => {
                anyhow!("{name} is not on this machine, and {error}; {}", self.what_is_here())
            }
            error if error.is_about_repository() => {
                let known = catalogue().repos().map(ToString::to_string);
                let near = nearest(&repo.to_string(), known.chain(self.names_here()));
                anyhow!("{error}{}", did_you_mean(near.as_deref()))
            }
            error => error.into(),
        }
    }

    /// The names of the complete models of this machine. What cannot be read is left out.
    fn names_here(&self) -> Vec<String> {
        let stored = self.list().unwrap_or_default();
        stored.into_iter().filter(|model| model.complete).map(|model| model.name).collect()
    }

    fn what_is_here(&self) -> String {
        let names = self.names_here();
        let more = names.len().saturating_sub(NAMES_LISTED_MAX);
        match (names.is_empty(), more) {
            (true, _) => "no model is here".to_owned(),
            (false, 0) => format!("here is {}", names.join(", ")),
            (false, more) => format!("here is {} and {more} more", names[..NAMES_LISTED_MAX].join(", ")),
        }
    }

    fn cache(&self, repo: &RepoId) -> RepoCache {
        RepoCache::new(&self.settings.hub_cache, repo.clone())
    }
}

/// The one name of a model whose files are not here.
fn canonical(name: &ModelName) -> String {
    match name {
        ModelName::Local(path) => of_path(path),
        ModelName::Bundled => catalogue().bundled().name.clone(),
        ModelName::Hub { repo, choice } => of_hub(repo, choice.as_deref().map(tag_of).as_deref()),
    }
}
