//! `ModelLibrary`: the models that a server may load, as the program around this crate knows them.

use std::ops::ControlFlow;
use std::time::SystemTime;

use text::GenerationDefaults;

use super::ModelSlot;
use crate::served_model::{ModelDescription, ServedModel};

/// A model that requests may name. It need not be loaded.
#[derive(Clone, Debug)]
pub struct LibraryModel {
    /// The one name that this server calls it by.
    pub name: String,
    /// Size of its files.
    pub bytes: u64,
    pub modified: Option<SystemTime>,
    /// Empty where the files were not read.
    pub description: ModelDescription,
}

/// What is known of a model before it is loaded.
#[derive(Clone, Debug)]
pub struct ModelDetails {
    pub description: ModelDescription,
    /// The source of the chat template.
    pub template: Option<String>,
    pub has_reasoning: bool,
    pub defaults: GenerationDefaults,
    /// Context size, if the model was loaded now.
    pub context: usize,
    pub vocab: usize,
}

impl From<&ServedModel> for ModelDetails {
    fn from(model: &ServedModel) -> Self {
        Self {
            description: model.description.clone(),
            template: model.template.as_ref().map(|template| template.source().to_owned()),
            has_reasoning: model.format.has_reasoning(),
            defaults: model.defaults.clone(),
            context: model.context,
            vocab: model.tokenizer.vocab_size(),
        }
    }
}

/// Finds, measures and loads models, and changes what is stored. All methods may block: they are called on threads for that.
pub trait ModelLibrary: Send + Sync {
    /// The models to offer, in the order of a list.
    fn list(&self) -> Vec<LibraryModel>;

    /// The name of the model that a spelling or an alias stands for; `None` if there is no such model here.
    fn resolve(&self, name: &str) -> Option<String>;

    /// Reads the files of a model.
    fn details(&self, name: &str) -> Result<ModelDetails, LibraryError>;

    /// The memory that a model takes once it is loaded.
    fn memory_needed(&self, name: &str) -> Result<u64, LibraryError>;

    /// The memory that another model may take now, if those that are loaded take `used`.
    fn memory_free(&self, used: u64) -> u64;

    /// Loads the model of a slot, and tells it how far that is.
    fn load(&self, slot: &ModelSlot) -> Result<ServedModel, LibraryError>;

    /// Downloads a model and returns its name. `progress` may end the download.
    fn pull(
        &self,
        name: &str,
        progress: &mut dyn FnMut(PullProgress) -> ControlFlow<()>,
    ) -> Result<String, LibraryError>;

    /// Lets `alias` stand for a model.
    fn set_alias(&self, alias: &str, model: &str) -> Result<(), LibraryError>;

    /// Deletes an alias, or the files of a model.
    fn delete(&self, name: &str) -> Result<(), LibraryError>;
}

/// How far the download of one file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullProgress {
    pub file: String,
    /// SHA-256 in hexadecimal, if the hub says it.
    pub digest: Option<String>,
    pub done: u64,
    pub total: u64,
}

/// An error that clients may read: it names no path of this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Failed(String),
}
