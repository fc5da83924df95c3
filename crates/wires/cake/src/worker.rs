//! `CakeWorker`: lends this machine to cake masters. They assign layers, send weights if there are none, and send work.
//!
//! A connection begins with authentication. Its first message says what it is for: an assignment sets the worker up, a
//! hello begins a sequence. Everything that a stranger can cause is bounded: connections, handshakes, frames, files.

mod executor_stage;
mod registry;
mod sequence;
mod served;
mod setup;
mod space;
mod stage;
mod store;
mod transfer;

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use model::{Checkpoint, LoadError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{debug, info, warn};
use types::LogLimit;

use super::auth::{CakeAuthError, CakeKey};
use super::connection::{CakeConnection, CakeConnectionError};
use super::frame_budget::FrameBudget;
use super::layer_name::CakeLayersError;
use super::wire::{CakeMessage, CakeVariant, FRAME_BYTES_MAX};
use registry::{ConnectionRegistry, RegisteredConnection};
use served::ServedModel;
use store::CakeStore;

pub use executor_stage::{ExecutorLoader, LoadExecutor};
pub use registry::{CONNECTIONS_MAX, HANDSHAKES_MAX};
pub use space::CakeStoreLimits;
pub use stage::{CakeLoader, CakeSession, CakeStage, CakeStageError};
pub use store::CakeStoreError;
pub use transfer::CakeTransferError;

/// The memory of all large frames at once. It holds the largest frame twice.
const FRAMES_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX;
/// The largest first message: the assignment of all layers of a large model.
const FIRST_BYTES_MAX: usize = 1 << 20;
/// What a message has besides its tensor.
const MESSAGE_OVERHEAD_BYTES: usize = 1 << 20;
/// How long a master may take to say what it wants.
const FIRST_WAIT: Duration = Duration::from_secs(30);
const ACCEPT_TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Enough for what a connection's thread does: layers run elsewhere.
const STACK_BYTES: usize = 512 << 10;

#[derive(Debug, thiserror::Error)]
pub enum CakeWorkerError {
    #[error(transparent)]
    Connection(#[from] CakeConnectionError),
    #[error(transparent)]
    Layers(#[from] CakeLayersError),
    #[error("the model's hash is not one")]
    ModelHash,
    #[error("this worker is being set up, or runs sequences of another assignment")]
    Busy,
    #[error("this worker has another model")]
    OtherModel,
    #[error("the model's folder has no config.json that can be read")]
    NoConfig,
    #[error("this worker takes no weights, since it has no cluster key")]
    NoStore,
    #[error(transparent)]
    Store(#[from] CakeStoreError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Stage(#[from] CakeStageError),
}

#[derive(Debug)]
pub struct CakeWorkerSettings {
    /// Without a key, whoever connects is served, but sends no weights.
    pub key: Option<CakeKey>,
    /// Where received models are kept.
    pub store: PathBuf,
    pub store_limits: CakeStoreLimits,
    /// A folder with config.json and safetensors. Then no weights are received.
    pub model: Option<PathBuf>,
}

pub struct CakeWorker {
    settings: CakeWorkerSettings,
    store: Option<CakeStore>,
    loader: Arc<dyn CakeLoader>,
    serving: Mutex<Option<Serving>>,
    /// Held while a master sets the worker up.
    setup: Mutex<()>,
    budget: Arc<FrameBudget>,
    refusals: Mutex<LogLimit>,
}

struct Serving {
    model: Arc<ServedModel>,
    config: String,
    /// Of the master that assigned it.
    variant: CakeVariant,
}

impl Serving {
    /// Serves whichever layers a master names.
    fn of_folder(folder: &Path, loader: &Arc<dyn CakeLoader>) -> Result<Self, CakeWorkerError> {
        let config = read_config(folder)?;
        let model = ServedModel::load(Checkpoint::open(folder)?, Arc::clone(loader), None)?;
        Ok(Self { model: Arc::new(model), config, variant: CakeVariant::Head })
    }
}

fn read_config(folder: &Path) -> Result<String, CakeWorkerError> {
    fs::read_to_string(folder.join("config.json")).map_err(|_| CakeWorkerError::NoConfig)
}

impl CakeWorker {
    /// With a model of its own, the worker runs whichever layers of it a master names, until a master assigns some.
    pub fn new(settings: CakeWorkerSettings, loader: Arc<dyn CakeLoader>) -> Result<Self, CakeWorkerError> {
        let serving = settings.model.as_deref().map(|folder| Serving::of_folder(folder, &loader)).transpose()?;
        Ok(Self {
            store: settings.key.as_ref().map(|key| CakeStore::new(settings.store.clone(), settings.store_limits, key)),
            settings,
            loader,
            serving: Mutex::new(serving),
            setup: Mutex::new(()),
            budget: FrameBudget::new(FRAMES_BYTES_MAX),
            refusals: Mutex::default(),
        })
    }

    /// Serves masters until `is_over`; then closes their connections.
    pub fn serve(&self, listener: &TcpListener, is_over: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
        warn!(
            "cake's protocol is served: nothing is encrypted, and anybody on the way can read and change what is sent"
        );
        if self.settings.key.is_none() {
            warn!("without a cluster key, whoever can connect is served");
        }
        listener.set_nonblocking(true)?;
        let registry = &ConnectionRegistry::default();
        thread::scope(|scope| {
            let served = loop {
                if is_over() {
                    break Ok(());
                }
                match accept(listener) {
                    Ok(Some(stream)) => {
                        let run = move || self.serve_stream(stream, registry);
                        let builder = thread::Builder::new().name("consort-cake".to_owned()).stack_size(STACK_BYTES);
                        // If no thread can be started, the connection is dropped, as if it had been refused.
                        let _ = builder.spawn_scoped(scope, run);
                    }
                    Ok(None) => {}
                    Err(error) => break Err(error),
                }
            };
            registry.close_all();
            served
        })
    }

    fn serve_stream(&self, stream: TcpStream, registry: &ConnectionRegistry) {
        let peer = stream.peer_addr().ok();
        let registered = match registry.add(&stream) {
            Ok(Some(registered)) => registered,
            Ok(None) => {
                return debug!(
                    peer = peer.map(display),
                    "{CONNECTIONS_MAX} connections are open, so another was closed"
                );
            }
            Err(error) => return debug!(peer = peer.map(display), "a connection failed: {error}"),
        };
        match self.serve_connection(stream, &registered) {
            Ok(()) | Err(CakeConnectionError::Closed) => {}
            Err(CakeConnectionError::Auth(error)) => {
                let count = self.refusals.lock().unwrap_or_else(PoisonError::into_inner).count(Instant::now());
                // A master with another key sees so first and closes; one without a key sends something else.
                let why = match error {
                    CakeAuthError::Io(_) => {
                        "it did not prove that it has the cluster key: it has none, or another".to_owned()
                    }
                    error => error.to_string(),
                };
                if let Some(count) = count {
                    info!(peer = peer.map(display), count, "callers were refused, the last one because: {why}");
                }
            }
            Err(error) => debug!(peer = peer.map(display), "a connection ended: {error}"),
        }
    }

    fn serve_connection(
        &self,
        stream: TcpStream,
        registered: &RegisteredConnection<'_>,
    ) -> Result<(), CakeConnectionError> {
        let connection = CakeConnection::as_worker(stream, self.settings.key.as_ref(), Arc::clone(&self.budget))?;
        let authenticated = Instant::now();
        if self.settings.key.is_some() {
            registered.admit();
        }
        let first = connection.receive(FIRST_BYTES_MAX, Some(FIRST_WAIT))?;
        registered.admit();
        match first.message(CakeVariant::Head)? {
            CakeMessage::Hello => self.serve_master(&connection, authenticated.elapsed())?,
            CakeMessage::LayerAssignment { layers, model_hash } => self.set_up(&connection, &layers, model_hash)?,
            _ => return Err(CakeConnectionError::Unexpected),
        }
        connection.finish();
        Ok(())
    }

    /// The model whose layers are run.
    fn served(&self) -> Result<Arc<ServedModel>, CakeStageError> {
        let serving = self.serving();
        let serving =
            serving.as_ref().ok_or_else(|| CakeStageError("no layers were assigned to this worker".into()))?;
        Ok(Arc::clone(&serving.model))
    }

    /// Frees what is served, unless a sequence is using it.
    fn stop_serving(&self) -> Result<(), CakeWorkerError> {
        let mut serving = self.serving();
        if serving.as_ref().is_some_and(|serving| Arc::strong_count(&serving.model) > 1) {
            return Err(CakeWorkerError::Busy);
        }
        *serving = None;
        Ok(())
    }

    fn serving(&self) -> MutexGuard<'_, Option<Serving>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The longest message that a master may send: the activations of the longest session in f32.
    fn message_bytes_max(&self) -> usize {
        let serving = self.serving();
        let model = serving.as_ref().map(|serving| &serving.model);
        let tensor = model.map_or(0, |model| model.positions_max().saturating_mul(4 * model.hidden()));
        tensor.saturating_add(MESSAGE_OVERHEAD_BYTES)
    }
}

/// The next connection, if one comes within a tick.
fn accept(listener: &TcpListener) -> io::Result<Option<TcpStream>> {
    match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&ACCEPT_TICK)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            Ok(Some(stream))
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => Ok(None),
        Err(error) => {
            // Most likely out of descriptors, until connections end.
            debug!("accept a connection: {error}");
            thread::sleep(Duration::from_millis(50));
            Ok(None)
        }
    }
}
