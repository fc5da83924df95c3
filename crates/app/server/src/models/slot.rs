//! `ModelSlot`: one model of a server, loaded or not, and who uses it.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::Health;
use tokio::sync::watch;

use crate::cluster::{SharedInviter, SharedMonitor, WatchedCluster};
use crate::load_stage::LoadStage;
use crate::metrics::ModelMetrics;
use crate::served_model::ServedModel;

/// A model that is named, its load stage, and its metrics.
pub struct ModelSlot {
    name: String,
    state: Mutex<SlotState>,
    /// How long the model stays loaded without a request, unless a request says otherwise; `None`: until another one needs
    /// the memory.
    keep: Option<Duration>,
    /// Counts the changes of the state.
    changes: watch::Sender<u64>,
    metrics: ModelMetrics,
    /// Held by the one task that loads the model.
    pub(super) loading: Arc<tokio::sync::Mutex<()>>,
}

struct SlotState {
    stage: LoadStage,
    cluster: Option<SharedMonitor>,
    inviter: Option<SharedInviter>,
    memory_needed: u64,
    /// Requests that use the model now.
    uses: usize,
    used_at: Instant,
    /// What the last request said of this.
    keep: Option<Duration>,
    /// The [`Retirement`]s of it: as long as there is one, no further request may use the model.
    retirements: usize,
    failed_at: Option<Instant>,
}

impl ModelSlot {
    pub fn new(name: &str, stage: LoadStage, keep: Option<Duration>) -> Arc<Self> {
        let state = SlotState {
            stage,
            cluster: None,
            inviter: None,
            memory_needed: 0,
            uses: 0,
            used_at: Instant::now(),
            keep,
            retirements: 0,
            failed_at: None,
        };
        Arc::new(Self {
            name: name.to_owned(),
            keep,
            state: Mutex::new(state),
            changes: watch::Sender::new(0),
            metrics: ModelMetrics::new(name),
            loading: Arc::default(),
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn metrics(&self) -> &ModelMetrics {
        &self.metrics
    }

    /// The stage that was set, updated by the health of the engine.
    pub fn stage(&self) -> LoadStage {
        let LoadStage::Ready(model) = self.lock().stage.clone() else { return self.lock().stage.clone() };
        if model.service.has_stopped() {
            let reason = "the model has stopped by a mistake of this program: start the server again";
            return LoadStage::Failed(reason.to_owned());
        }
        match model.service.health() {
            Health::Ready => LoadStage::Ready(model),
            Health::Rebuilding { why } => LoadStage::Rebuilding { model, why },
        }
    }

    pub fn set_stage(&self, stage: LoadStage) {
        self.change(|state| {
            state.failed_at = matches!(stage, LoadStage::Failed(_)).then(Instant::now);
            state.stage = stage;
        });
    }

    /// `None` if the model runs on this machine alone.
    pub fn cluster(&self) -> Option<SharedMonitor> {
        self.lock().cluster.clone()
    }

    /// Sets who knows the machines that run the model.
    pub fn set_cluster(&self, monitor: SharedMonitor) {
        let watched = WatchedCluster::start(monitor);
        self.change(|state| state.cluster = Some(watched));
    }

    /// `None` if the model has no cluster that other machines could join.
    pub fn inviter(&self) -> Option<SharedInviter> {
        self.lock().inviter.clone()
    }

    /// Sets who can let other machines join the cluster of the model.
    pub fn set_inviter(&self, inviter: SharedInviter) {
        self.change(|state| state.inviter = Some(inviter));
    }

    /// Notices every change of the state from now on.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The model, if it is loaded and may be used.
    pub(super) fn begin_use(self: &Arc<Self>) -> Option<ModelUse> {
        let mut state = self.lock();
        let LoadStage::Ready(model) = &state.stage else { return None };
        if state.retirements > 0 || model.service.has_stopped() {
            return None;
        }
        let model = Arc::clone(model);
        (state.uses, state.keep) = (state.uses + 1, self.keep);
        Some(ModelUse { slot: Arc::clone(self), model })
    }

    /// Why loading failed, if that was less than `age` ago.
    pub(super) fn recent_failure(&self, age: Duration) -> Option<String> {
        let state = self.lock();
        let is_recent = state.failed_at.is_some_and(|at| at.elapsed() < age);
        match &state.stage {
            LoadStage::Failed(why) if is_recent => Some(why.clone()),
            _ => None,
        }
    }

    pub(super) fn is_loaded(&self) -> bool {
        matches!(self.lock().stage, LoadStage::Ready(_))
    }

    /// The memory that was found to be needed when the model was loaded.
    pub(super) fn memory_needed(&self) -> u64 {
        self.lock().memory_needed
    }

    pub(super) fn set_memory_needed(&self, bytes: u64) {
        self.lock().memory_needed = bytes;
    }

    pub(super) fn is_idle(&self) -> bool {
        self.lock().uses == 0
    }

    /// When the last request ended.
    pub(super) fn used_at(&self) -> Instant {
        self.lock().used_at
    }

    pub(crate) fn set_keep(&self, keep: Option<Duration>) {
        self.change(|state| state.keep = keep);
    }

    /// When the model is to be unloaded; `None`: when another one needs the memory, or not before its requests have ended.
    pub(crate) fn expires_at(&self) -> Option<Instant> {
        let state = self.lock();
        state.used_at.checked_add(state.keep?)
    }

    /// Whether the model is loaded, but further requests have to wait.
    pub(super) fn is_retiring(&self) -> bool {
        let state = self.lock();
        state.retirements > 0 && matches!(state.stage, LoadStage::Ready(_))
    }

    /// Takes the model out, if nobody uses it.
    pub(super) fn take_idle(&self) -> Option<Arc<ServedModel>> {
        let mut taken = None;
        self.change(|state| {
            if state.uses == 0
                && let LoadStage::Ready(model) = &state.stage
            {
                taken = Some(Arc::clone(model));
                state.stage = LoadStage::Unloaded;
                self.metrics.end_engine();
                (state.cluster, state.inviter) = (None, None);
            }
        });
        taken
    }

    fn change(&self, change: impl FnOnce(&mut SlotState)) {
        change(&mut self.lock());
        self.changes.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A model is to be unloaded: as long as this lives, requests for it wait, so that it becomes idle.
pub(super) struct Retirement(Arc<ModelSlot>);

impl Retirement {
    pub fn of(slot: &Arc<ModelSlot>) -> Self {
        slot.change(|state| state.retirements += 1);
        Self(Arc::clone(slot))
    }
}

impl Drop for Retirement {
    fn drop(&mut self) {
        self.0.change(|state| state.retirements -= 1);
    }
}

/// A model that a request uses: it stays loaded as long.
pub struct ModelUse {
    slot: Arc<ModelSlot>,
    model: Arc<ServedModel>,
}

impl ModelUse {
    pub fn slot(&self) -> &Arc<ModelSlot> {
        &self.slot
    }

    /// The name by which the server calls the model.
    pub fn name(&self) -> &str {
        &self.slot.name
    }
}

impl Deref for ModelUse {
    type Target = ServedModel;

    fn deref(&self) -> &ServedModel {
        &self.model
    }
}

impl Clone for ModelUse {
    fn clone(&self) -> Self {
        self.slot.lock().uses += 1;
        Self { slot: Arc::clone(&self.slot), model: Arc::clone(&self.model) }
    }
}

impl Drop for ModelUse {
    fn drop(&mut self) {
        self.slot.change(|state| {
            state.uses -= 1;
            state.used_at = Instant::now();
        });
    }
}
