//! `Models`: the models of a server. Either one, which whoever started the server loads, or those of a [`ModelLibrary`],
//! which are loaded when a request names them.
//!
//! Models are loaded one at a time. If the memory does not suffice, the one that was not used for longest is unloaded, but
//! never one that a request uses, nor a pinned one. If all are in use, the load waits: requests that come later for the
//! model that has to go wait behind it, so that no model starves another.

mod library;
mod slot;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use futures_util::future::select_all;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tracing::{info, warn};

use crate::blocking;
use crate::error::{ApiError, ApiErrorKind, RETRY_AFTER};
use crate::load_stage::{LoadStage, Progress};
use crate::redact::without_paths;
use crate::served_model::ServedModel;
use slot::Retirement;

pub use library::{LibraryError, LibraryModel, ModelDetails, ModelLibrary, PullProgress};
pub use slot::{ModelSlot, ModelUse};

/// How long a model that failed to load is not tried again: requests get the reason.
const FAILURE_AGE_MAX: Duration = Duration::from_secs(30);
/// Time for an engine and its ranks to end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Downloads that run at once.
const PULLS_MAX: usize = 4;
/// How often models are looked for that nobody uses any more.
const IDLE_CHECK: Duration = Duration::from_millis(500);

/// The settings of a server with a library.
#[derive(Clone, Debug, Default)]
pub struct LibraryOptions {
    /// How long a model stays loaded without a request; `None`: until another one needs the memory.
    pub keep: Option<Duration>,
    /// Models that are never unloaded.
    pub pinned: Vec<String>,
    /// The model of requests that name none, and of the page; by default the one that was used last.
    pub default: Option<String>,
}

pub struct Models {
    /// In a server without a library, its one model. Else those that were asked for.
    slots: RwLock<Vec<Arc<ModelSlot>>>,
    library: Option<Library>,
    /// Set when the server shuts down: nothing is loaded any more.
    is_closed: AtomicBool,
}

struct Library {
    models: Arc<dyn ModelLibrary>,
    options: LibraryOptions,
    trim_memory: fn(),
    /// Held while memory is made free and a model is loaded.
    room: tokio::sync::Mutex<()>,
    pulls: Arc<Semaphore>,
}

impl Models {
    /// One model, which is loading.
    pub fn single(name: &str) -> Self {
        let slot = ModelSlot::new(name, LoadStage::Loading(Progress::default()), None);
        Self { slots: RwLock::new(vec![slot]), library: None, is_closed: AtomicBool::new(false) }
    }

    pub fn of_library(models: Arc<dyn ModelLibrary>, options: LibraryOptions, trim_memory: fn()) -> Self {
        let pulls = Arc::new(Semaphore::new(PULLS_MAX));
        let library = Library { models, options, trim_memory, room: tokio::sync::Mutex::default(), pulls };
        Self { slots: RwLock::default(), library: Some(library), is_closed: AtomicBool::new(false) }
    }

    /// The models that were asked for, or the only one.
    pub fn slots(&self) -> Vec<Arc<ModelSlot>> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The library; `None` in a server of one model.
    pub fn library(&self) -> Option<&Arc<dyn ModelLibrary>> {
        self.library.as_ref().map(|library| &library.models)
    }

    /// The right to download a model.
    pub fn begin_pull(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        let library = self.library.as_ref().ok_or_else(not_managed)?;
        let permit = Arc::clone(&library.pulls).try_acquire_owned();
        permit.map_err(|_| {
            let message = format!("{PULLS_MAX} downloads are running: try again when one has ended");
            let mut error = ApiError::new(ApiErrorKind::Overloaded, message).code("too_many_downloads");
            error.retry_after = Some(RETRY_AFTER);
            error
        })
    }

    /// The slot of a model that was asked for, by its own name.
    pub fn slot(&self, name: &str) -> Option<Arc<ModelSlot>> {
        self.slots.read().unwrap_or_else(PoisonError::into_inner).iter().find(|slot| slot.name() == name).cloned()
    }

    /// The model of requests that name none: the one that the options say, else the one that was used last.
    pub fn default_slot(&self) -> Option<Arc<ModelSlot>> {
        let named = self.library.as_ref().and_then(|library| library.options.default.as_deref());
        let named = named.map(|name| self.slot_of(name));
        named.or_else(|| self.slots().into_iter().max_by_key(|slot| (slot.is_loaded(), slot.used_at())))
    }

    /// The slot of a model of the library, which is made if there is none yet.
    pub fn slot_of(&self, name: &str) -> Arc<ModelSlot> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = slots.iter().find(|slot| slot.name() == name) {
            return Arc::clone(slot);
        }
        let keep = self.library.as_ref().and_then(|library| library.options.keep);
        let slot = ModelSlot::new(name, LoadStage::Unloaded, keep);
        slots.push(Arc::clone(&slot));
        slot
    }

    /// The model of a slot, loaded if it has to be. The load goes on if the caller is dropped.
    pub async fn acquire(self: &Arc<Self>, slot: &Arc<ModelSlot>) -> Result<ModelUse, ApiError> {
        loop {
            if let Some(model) = slot.begin_use() {
                return Ok(model);
            }
            if self.is_closed.load(Ordering::Relaxed) {
                return Err(ApiError::shutting_down());
            }
            if self.library.is_none() {
                slot.stage().model()?;
                continue;
            }
            let mut changes = slot.changes();
            let loading = Arc::clone(&slot.loading).lock_owned().await;
            if let Some(model) = slot.begin_use() {
                return Ok(model);
            }
            if slot.is_retiring() {
                // It is unloaded soon, or stays: room was found elsewhere.
                drop(loading);
                changes.changed().await.map_err(|_| ApiError::internal("the model's slot is gone"))?;
                continue;
            }
            if let Some(why) = slot.recent_failure(FAILURE_AGE_MAX) {
                return Err(ApiError::unavailable(why, RETRY_AFTER).code("model_failed"));
            }
            let (models, loaded) = (Arc::clone(self), Arc::clone(slot));
            let load = tokio::spawn(async move {
                models.load(&loaded).await;
                drop(loading);
            });
            load.await.map_err(|_| ApiError::internal("the task that loads the model has ended"))?;
        }
    }

    /// Refuses new requests from now on, and returns the models that may still have some.
    pub fn close(&self) -> Vec<Arc<ServedModel>> {
        self.is_closed.store(true, Ordering::Relaxed);
        let close = |slot: Arc<ModelSlot>| {
            let model = slot.stage().model().ok();
            slot.set_stage(LoadStage::Draining(model.as_ref().map_or_else(Weak::new, Arc::downgrade)));
            model
        };
        self.slots().into_iter().filter_map(close).collect()
    }

    /// Unloads a model as soon as nobody uses it. Further requests load it again.
    pub async fn unload(&self, slot: &Arc<ModelSlot>) {
        let Some(library) = &self.library else { return };
        let _retirement = Retirement::of(slot);
        let mut changes = slot.changes();
        while !slot.is_idle() {
            if changes.changed().await.is_err() {
                return;
            }
        }
        let _room = library.room.lock().await;
        library.take_out(slot).await;
    }

    /// Unloads the models whose time is over, until it is dropped.
    pub async fn unload_idle(self: Arc<Self>) {
        let Some(library) = &self.library else { return };
        loop {
            tokio::time::sleep(IDLE_CHECK).await;
            let is_over = |slot: &Arc<ModelSlot>| {
                slot.is_loaded()
                    && slot.is_idle()
                    && !library.is_pinned(slot)
                    && slot.expires_at().is_some_and(|at| at <= Instant::now())
            };
            for slot in self.slots().into_iter().filter(is_over) {
                let _room = library.room.lock().await;
                if is_over(&slot) {
                    library.take_out(&slot).await;
                }
            }
        }
    }

    /// Forgets a model that was deleted.
    pub async fn remove(&self, slot: &Arc<ModelSlot>) {
        self.unload(slot).await;
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        slots.retain(|other| !Arc::ptr_eq(other, slot));
    }

    /// Makes room for the model and loads it. The slot says how that went.
    async fn load(&self, slot: &Arc<ModelSlot>) {
        let Some(library) = &self.library else { return };
        let progress = Progress { doing: "waiting for its turn".to_owned(), done: 0, total: 1 };
        slot.set_stage(LoadStage::Loading(progress));
        let _room = library.room.lock().await;
        let stage = match self.make_room(library, slot).await {
            Ok(()) => library.load(slot).await,
            Err(error) => Err(error),
        };
        slot.set_stage(match stage {
            Ok(model) => LoadStage::Ready(model),
            Err(error) => {
                warn!(model = slot.name(), "the model could not be loaded: {error}");
                let why = format!("the model {} could not be loaded: {error}", slot.name());
                LoadStage::Failed(without_paths(&why))
            }
        });
    }

    /// Unloads models until the memory suffices for one more.
    async fn make_room(&self, library: &Library, wanted: &Arc<ModelSlot>) -> Result<(), LibraryError> {
        let (models, name) = (Arc::clone(&library.models), wanted.name().to_owned());
        let needed = on_thread(move || models.memory_needed(&name)).await?;
        wanted.set_memory_needed(needed);
        let mut retirement = None;
        loop {
            let loaded: Vec<_> = self.slots().into_iter().filter(|slot| slot.is_loaded()).collect();
            let used = loaded.iter().map(|slot| slot.memory_needed()).fold(0, u64::saturating_add);
            let models = Arc::clone(&library.models);
            if on_thread(move || Ok(models.memory_free(used))).await? >= needed {
                return Ok(());
            }
            let mut victims: Vec<_> = loaded.into_iter().filter(|slot| !library.is_pinned(slot)).collect();
            victims.sort_by_key(|slot| slot.used_at());
            if let Some(idle) = victims.iter().find(|slot| slot.is_idle()) {
                library.take_out(idle).await;
                continue;
            }
            // Whether the memory suffices all the same is checked when the model is loaded.
            let Some(oldest) = victims.first() else { return Ok(()) };
            let mut changes: Vec<_> = victims.iter().map(|slot| slot.changes()).collect();
            retirement.get_or_insert_with(|| Retirement::of(oldest));
            if victims.iter().all(|slot| !slot.is_idle()) {
                let changed = changes.iter_mut().map(|changes| Box::pin(changes.changed()));
                let _ = select_all(changed).await;
            }
            if !oldest.is_idle() {
                // Another one may have become idle.
                continue;
            }
            library.take_out(oldest).await;
        }
    }
}

impl Library {
    fn is_pinned(&self, slot: &ModelSlot) -> bool {
        self.options.pinned.iter().any(|name| name == slot.name())
    }

    async fn load(&self, slot: &Arc<ModelSlot>) -> Result<Arc<ServedModel>, LibraryError> {
        let (models, loading) = (Arc::clone(&self.models), Arc::clone(slot));
        let begun = Instant::now();
        let model = on_thread(move || models.load(&loading)).await?;
        let seconds = (begun.elapsed().as_secs_f64() * 100.0).round() / 100.0;
        info!(model = slot.name(), seconds, memory_bytes = slot.memory_needed(), "loaded");
        Ok(Arc::new(model))
    }

    /// Unloads a model if nobody uses it, and waits until its memory is free.
    async fn take_out(&self, slot: &Arc<ModelSlot>) {
        let Some(model) = slot.take_idle() else { return };
        let exit = model.service.thread_exit();
        drop(model);
        let trim = self.trim_memory;
        // Others may hold the model for a moment more, as a request for the metrics does.
        let exited = blocking::run(move || {
            let exited = exit.wait(EXIT_TIMEOUT);
            trim();
            Ok(exited)
        });
        match exited.await {
            Ok(true) => info!(model = slot.name(), "unloaded"),
            _ => warn!(model = slot.name(), "the model was unloaded, but its engine has not ended yet"),
        }
    }
}

/// The error of what only a server with a library can do.
pub fn not_managed() -> ApiError {
    let message = "this server has one model, which was chosen when it was started: `consort serve` without a model, or \
                   with several, manages models";
    ApiError::new(ApiErrorKind::Invalid, message).code("unsupported_operation")
}

/// Runs what takes long on a thread of its own: those for blocking work are for requests.
pub async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LibraryError> + Send + 'static,
) -> Result<T, LibraryError> {
    let (sender, result) = oneshot::channel();
    let thread = std::thread::Builder::new().name("models".to_owned()).spawn(move || drop(sender.send(work())));
    thread.map_err(|error| LibraryError::Failed(format!("no thread could be started: {error}")))?;
    result.await.map_err(|_| LibraryError::Failed("this program made a mistake".to_owned()))?
}

impl From<LibraryError> for ApiError {
    fn from(error: LibraryError) -> Self {
        let message = error.to_string();
        match error {
            LibraryError::NotFound(_) => ApiError::new(ApiErrorKind::NotFound, message).code("model_not_found"),
            LibraryError::Invalid(_) => ApiError::new(ApiErrorKind::Invalid, message),
            LibraryError::Failed(_) => ApiError::unavailable(message, RETRY_AFTER).code("model_failed"),
        }
    }
}
