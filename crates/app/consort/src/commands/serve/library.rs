//! `StoreLibrary`: the models that a server offers: those of the store, or those that were named when it was started.

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result};
use model::Checkpoint;
use ranks::memory_available;
use server::{
    LibraryError, LibraryModel, ModelDescription, ModelDetails, ModelLibrary, ModelSlot, PullProgress, ServedModel,
};
use tracing::debug;

use super::capacity::Share;
use super::greeting;
use super::load::{ModelLoader, describe};
use crate::placement::Placement;
use crate::store::{ModelFiles, PullObserver, Store};
use crate::usage::UsageError;

/// Where the system does not report its free memory.
const MEMORY_DEFAULT: u64 = 8 << 30;

pub struct StoreLibrary {
    loader: ModelLoader,
    /// What may be asked for; `None`: all of the store.
    named: Option<Vec<NamedModel>>,
    /// Memory for all models.
    memory: u64,
    /// Whether a name that is not known stands for the only model.
    strict_names: bool,
    descriptions: Mutex<HashMap<PathBuf, Described>>,
}

/// A model that was named when the server was started.
#[derive(Clone, Debug)]
struct NamedModel {
    /// The name that it has here.
    name: String,
    /// The name or path that was given.
    given: String,
}

/// A description, and when the files that it was read from were changed.
#[derive(Clone)]
struct Described {
    modified: Option<SystemTime>,
    /// `None`: these files are no model that can be loaded.
    description: Option<ModelDescription>,
}

impl StoreLibrary {
    /// `named`: names or paths; none: all models of the store. `memory`: the limit for all models; by default what is free now.
    pub fn new(loader: ModelLoader, named: &[String], memory: Option<u64>, strict_names: bool) -> Result<Self> {
        let store = Store::from_environment()?;
        let of_given = |given: &String| NamedModel {
            name: store.canonical(given).unwrap_or_else(|| given.clone()),
            given: given.clone(),
        };
        let named: Vec<_> = named.iter().map(of_given).collect();
        for (index, model) in named.iter().enumerate() {
            if let Some(other) = named[..index].iter().find(|other| other.name == model.name) {
                let (one, two) = (&other.given, &model.given);
                return Err(UsageError::new(format!("{one} and {two} have the same name, {}", model.name)).into());
            }
        }
        let free = memory_available().unwrap_or(MEMORY_DEFAULT);
        Ok(Self {
            loader,
            named: (!named.is_empty()).then_some(named),
            memory: memory.unwrap_or(free),
            strict_names,
            descriptions: Mutex::default(),
        })
    }

    /// The names of all models, in the order of a list.
    pub fn names(&self) -> Vec<String> {
        match &self.named {
            Some(named) => named.iter().map(|model| model.name.clone()).collect(),
            None => self.stored().into_iter().map(|(name, _)| name).collect(),
        }
    }

    /// The model, if there is one only.
    pub fn only(&self) -> Option<String> {
        let mut names = self.names();
        if names.len() == 1 { names.pop() } else { None }
    }

    /// The complete models of the store.
    fn stored(&self) -> Vec<(String, PathBuf)> {
        let listed = Store::from_environment().and_then(|store| store.list());
        let listed = listed.unwrap_or_else(|error| {
            debug!("the store cannot be listed: {error:#}");
            Vec::new()
        });
        let complete = listed.into_iter().filter(|model| model.complete);
        complete.map(|model| (model.name, model.path)).filter(|(_, path)| self.description(path).is_some()).collect()
    }

    /// The files of a model, downloaded if it was named when the server was started and they are missing.
    fn files(&self, name: &str) -> Result<ModelFiles> {
        let Some(named) = &self.named else { return Store::from_environment()?.find(name) };
        let model = named.iter().find(|model| model.name == name).context("there is no such model")?;
        let files = self.loader.config.resolve(Some(&model.given))?;
        Ok(ModelFiles { name: name.to_owned(), ..files })
    }

    /// The files of a model that is here.
    fn path(&self, name: &str) -> Option<PathBuf> {
        let given = match &self.named {
            Some(named) => &named.iter().find(|model| model.name == name)?.given,
            None => name,
        };
        Some(Store::from_environment().ok()?.find(given).ok()?.path)
    }

    /// What files say of their model. Read once, and again when they change.
    fn description(&self, path: &Path) -> Option<ModelDescription> {
        let modified = fs::metadata(path).and_then(|file| file.modified()).ok();
        let mut known = self.descriptions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(described) = known.get(path).filter(|described| described.modified == modified) {
            return described.description.clone();
        }
        let description = match Checkpoint::open(path) {
            Ok(checkpoint) => Some(describe(path, &checkpoint)),
            Err(error) => {
                debug!("{} is not offered: {error}", path.display());
                None
            }
        };
        known.insert(path.to_owned(), Described { modified, description: description.clone() });
        description
    }
}

impl ModelLibrary for StoreLibrary {
    fn list(&self) -> Vec<LibraryModel> {
        let models = match &self.named {
            Some(named) => named.iter().map(|model| (model.name.clone(), self.path(&model.name))).collect(),
            None => self.stored().into_iter().map(|(name, path)| (name, Some(path))).collect::<Vec<_>>(),
        };
        let model = |(name, path): (String, Option<PathBuf>)| {
            let description = path.and_then(|path| self.description(&path)).unwrap_or_default();
            LibraryModel { name, bytes: description.file_bytes, modified: description.modified, description }
        };
        models.into_iter().map(model).collect()
    }

    fn resolve(&self, name: &str) -> Option<String> {
        let names = self.names();
        if names.iter().any(|known| known == name) {
            return Some(name.to_owned());
        }
        let canonical = Store::from_environment().ok().and_then(|store| store.canonical(name));
        let given = || self.named.iter().flatten().find(|model| model.given == name).map(|model| model.name.clone());
        let found = canonical.filter(|canonical| names.contains(canonical)).or_else(given);
        found.or_else(|| if self.strict_names { None } else { self.only() })
    }

    fn details(&self, name: &str) -> Result<ModelDetails, LibraryError> {
        let path = self.path(name).ok_or_else(|| not_here(name))?;
        self.loader.details(&ModelFiles { name: name.to_owned(), path }).map_err(failed)
    }

    fn memory_needed(&self, name: &str) -> Result<u64, LibraryError> {
        match self.loader.config.placement {
            Placement::Here | Placement::Ranks(_) => {}
            // Their machines and peers serve one model at a time.
            Placement::Cluster(_) | Placement::Cake(_) | Placement::Swarm(_) => return Ok(u64::MAX),
        }
        let files = self.files(name).map_err(failed)?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model").map_err(failed)?;
        self.loader.memory_needed(&checkpoint).map_err(failed)
    }

    fn memory_free(&self, used: u64) -> u64 {
        // Memory of a KV cache that was not used yet looks free to the system.
        let planned = self.memory.saturating_sub(used);
        memory_available().unwrap_or(u64::MAX).min(planned)
    }

    fn load(&self, slot: &ModelSlot) -> Result<ServedModel, LibraryError> {
        let files = self.files(slot.name()).map_err(failed)?;
        let begun = Instant::now();
        let (served, _) = self.loader.load(&files, Share::Least, slot).map_err(failed)?;
        greeting::tell_ready(slot.name(), begun.elapsed(), served.context);
        Ok(served)
    }

    fn pull(
        &self,
        name: &str,
        progress: &mut dyn FnMut(PullProgress) -> ControlFlow<()>,
    ) -> Result<String, LibraryError> {
        let store = Store::from_environment().map_err(failed)?;
        store.pull_observed(name, &mut Observer(progress)).map(|files| files.name).map_err(invalid)
    }

    fn set_alias(&self, alias: &str, model: &str) -> Result<(), LibraryError> {
        if self.resolve(model).is_none() {
            return Err(not_here(model));
        }
        Store::from_environment().and_then(|store| store.set_alias(alias, model)).map_err(invalid)
    }

    fn delete(&self, name: &str) -> Result<(), LibraryError> {
        let store = Store::from_environment().map_err(failed)?;
        if store.remove_alias(name).map_err(failed)? {
            return Ok(());
        }
        store.find(name).map_err(|_| not_here(name))?;
        store.remove(name).map(drop).map_err(invalid)
    }
}

/// Passes the progress of a download on.
struct Observer<'a>(&'a mut dyn FnMut(PullProgress) -> ControlFlow<()>);

impl PullObserver for Observer<'_> {
    fn progress(&mut self, progress: &crate::store::PullProgress) -> ControlFlow<()> {
        let crate::store::PullProgress { file, digest, done, total } = progress.clone();
        (self.0)(PullProgress { file, digest, done, total })
    }
}

fn not_here(name: &str) -> LibraryError {
    LibraryError::NotFound(format!("model '{name}' not found"))
}

fn failed(error: anyhow::Error) -> LibraryError {
    LibraryError::Failed(format!("{error:#}"))
}

fn invalid(error: anyhow::Error) -> LibraryError {
    LibraryError::Invalid(format!("{error:#}"))
}
