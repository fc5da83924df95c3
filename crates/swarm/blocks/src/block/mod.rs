//! A block of layers that many clients use. Each has sessions of its own; requests that wait run together in one step.
//!
//! One thread owns the block's executor. A session reserves its K/V when it is opened, so it can always run; or as it grows, if
//! nobody says how long it will be. One that grows and that is not used is closed when another needs its room. What waits for the
//! thread is limited. Who the clients are, and how they reach this process, is left to the callers.

mod accounts;
mod backlog;
mod batch;
mod stats;
mod thread;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use directory::PeerId;
use engine::{Executor, Phase};
use tokio::sync::oneshot;
use types::LayerRange;

pub use stats::BlockStats;

use backlog::Backlog;
use thread::{BlockThread, Command, OpenedKey, SessionKey};

/// Who uses a block. Limits are per client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    Peer(PeerId),
    /// A program that has no identity but its address.
    Address(IpAddr),
}

/// What a block offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    pub layers: LayerRange,
    /// Whether a session may use a part of the layers.
    pub has_parts: bool,
    /// Values of one row.
    pub hidden: usize,
    /// Tokens of the longest session.
    pub positions_max: usize,
    /// Rows of one run.
    pub rows_max: usize,
}

/// What clients may use at most.
#[derive(Clone, Copy, Debug)]
pub struct BlockLimits {
    pub sessions_max: usize,
    pub sessions_per_client_max: usize,
    /// The part of the block's tokens that one client may reserve, in percent.
    pub tokens_per_client_percent: usize,
    /// A session that is not used for so long is closed.
    pub idle: Duration,
    /// A session that grows may be closed for another client's when it was not used for so long, and for one of its own client's
    /// at any time.
    pub evict_after: Duration,
    /// Sessions to open and runs that wait, of all clients and of one.
    pub waiting_max: usize,
    pub waiting_per_client_max: usize,
    /// Bytes of activations that wait, of all clients and of one.
    pub waiting_bytes_max: usize,
    pub waiting_bytes_per_client_max: usize,
}

impl Default for BlockLimits {
    fn default() -> Self {
        Self {
            sessions_max: 256,
            sessions_per_client_max: 64,
            tokens_per_client_percent: 50,
            idle: Duration::from_secs(600),
            evict_after: Duration::from_secs(10),
            waiting_max: 4096,
            waiting_per_client_max: 256,
            waiting_bytes_max: 1 << 30,
            waiting_bytes_per_client_max: 128 << 20,
        }
    }
}

/// Why a session was not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the block is warming up: its weights are loading")]
    WarmingUp,
    /// It lost a process or a machine. Which one is not for clients to know.
    #[error("the block is being rebuilt")]
    Rebuilding,
    #[error("the block is draining: it takes no new sessions")]
    Draining,
    #[error("{max} sessions are open, which is the limit")]
    TooManySessions { max: usize },
    #[error("{free} tokens are free, {needed} are needed")]
    NoTokens { needed: usize, free: usize },
    #[error("a session has 1 to {max} tokens, not {tokens}")]
    TooLong { tokens: usize, max: usize },
    #[error("layers {asked} are not to be had from the block {block}")]
    Layers { asked: LayerRange, block: LayerRange },
    #[error("too much waits for the block: open fewer sessions at once, or try again later")]
    Busy,
    #[error("the block has ended")]
    Ended,
}

impl Refusal {
    /// Whether the same peer may grant it later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::WarmingUp | Self::Rebuilding | Self::TooManySessions { .. } | Self::NoTokens { .. } | Self::Busy
        )
    }
}

/// Why rows were not run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    #[error("the session has computed {computed} tokens, the rows begin at {position}")]
    Position { position: usize, computed: usize },
    #[error("{found} values are not {rows} rows of {hidden}")]
    Shape { rows: usize, hidden: usize, found: usize },
    #[error("a run has 1 to {max} rows, not {rows}")]
    Rows { rows: usize, max: usize },
    #[error("the session has room for {max} tokens, the rows end at {end}")]
    TooLong { end: usize, max: usize },
    #[error("the activations are not finite")]
    NotFinite,
    #[error("the session was closed, because it was not used for too long or others needed its room")]
    Expired,
    /// Of a session that grows. It stays as it was.
    #[error("{free} tokens are free, the session needs {needed} more")]
    NoTokens { needed: usize, free: usize },
    #[error("too much waits for the block: send less at once, or try again later")]
    Busy,
    /// A process or a machine of the block was lost, and all sessions with it. The block is being rebuilt.
    #[error("the block lost its sessions, and is being rebuilt")]
    Lost,
    #[error("the step failed: {why}")]
    Failed { why: Arc<str> },
    #[error("the block has ended")]
    Ended,
}

impl RunError {
    /// Whether the client is to blame. Its session stays as it was.
    pub fn is_misuse(&self) -> bool {
        matches!(
            self,
            Self::Position { .. } | Self::Shape { .. } | Self::Rows { .. } | Self::TooLong { .. } | Self::NotFinite
        )
    }
}

/// Rows that a session is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockRows {
    /// Of the first row. What the session computed from there on is discarded.
    pub position: usize,
    pub phase: Phase,
    /// `[rows, hidden]`.
    pub activations: Vec<f32>,
    /// Of so many of the last rows the states are returned.
    pub state_rows: usize,
}

/// What a run returned.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStates {
    /// `[state_rows, hidden]`.
    pub states: Vec<f32>,
    /// The time of the step in which the rows ran.
    pub compute: Duration,
    /// How long the rows waited for it.
    pub queued: Duration,
}

/// A block that serves, or that loads its weights. The block ends when it was closed, or the last handle was dropped.
#[derive(Clone, Debug)]
pub struct BlockHandle(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    stats: Arc<Mutex<BlockStats>>,
}

#[derive(Debug)]
enum State {
    WarmingUp,
    Serving { shape: BlockShape, queue: Queue, thread: Option<JoinHandle<()>>, is_draining: bool },
    Ended,
}

/// The way to the block's thread. Only what the backlog has room for is sent, and one close for each session that was opened.
#[derive(Clone, Debug)]
struct Queue {
    commands: std::sync::mpsc::Sender<Command>,
    backlog: Arc<Backlog>,
}

impl BlockHandle {
    /// A block whose weights are loading.
    pub fn warming_up() -> Self {
        let state = Mutex::new(State::WarmingUp);
        Self(Arc::new(Shared { state, stats: Arc::default() }))
    }

    /// The weights are loaded: `executor` runs the layers of `shape`. It is not called from other threads than one.
    pub fn serve(&self, executor: Box<dyn Executor>, shape: BlockShape, limits: BlockLimits) -> std::io::Result<()> {
        let (commands, received) = std::sync::mpsc::channel();
        let thread = BlockThread::new(executor, shape, limits, Arc::clone(&self.0.stats));
        let thread =
            std::thread::Builder::new().name("consort-block".to_owned()).spawn(move || thread.run(&received))?;
        let mut state = self.0.lock();
        // It may have been closed while it was loading.
        if !matches!(*state, State::Ended) {
            let queue = Queue { commands, backlog: Backlog::new(limits) };
            *state = State::Serving { shape, queue, thread: Some(thread), is_draining: false };
        }
        Ok(())
    }

    /// `None` while the weights are loading, and after the end.
    pub fn shape(&self) -> Option<BlockShape> {
        match &*self.0.lock() {
            State::Serving { shape, .. } => Some(*shape),
            State::WarmingUp | State::Ended => None,
        }
    }

    pub fn stats(&self) -> BlockStats {
        self.0.stats.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sessions to open and runs that wait or run.
    pub fn waiting(&self) -> usize {
        match &*self.0.lock() {
            State::Serving { queue, .. } => queue.backlog.entries(),
            State::WarmingUp | State::Ended => 0,
        }
    }

    /// From now on no session is opened; those that are open go on.
    pub fn drain(&self) {
        if let State::Serving { is_draining, .. } = &mut *self.0.lock() {
            *is_draining = true;
        }
    }

    /// Ends all sessions, and waits until the executor is dropped.
    pub fn close(&self) {
        let ended = std::mem::replace(&mut *self.0.lock(), State::Ended);
        if let State::Serving { queue, thread, .. } = ended {
            // An error means that the thread has ended.
            let _ = queue.commands.send(Command::End);
            thread.map(JoinHandle::join);
        }
    }

    /// Opens a session for some of the block's layers, and reserves its K/V.
    pub async fn open(&self, client: Client, layers: LayerRange, tokens_max: usize) -> Result<BlockSession, Refusal> {
        self.open_session(client, layers, tokens_max, false).await
    }

    /// Opens a session that reserves its K/V as it grows, up to `tokens_max`. A run may find no room, and while the session is
    /// not used it may be closed for another.
    pub async fn open_growing(
        &self,
        client: Client,
        layers: LayerRange,
        tokens_max: usize,
    ) -> Result<BlockSession, Refusal> {
        self.open_session(client, layers, tokens_max, true).await
    }

    async fn open_session(
        &self,
        client: Client,
        layers: LayerRange,
        tokens_max: usize,
        is_growing: bool,
    ) -> Result<BlockSession, Refusal> {
        let queue = match &*self.0.lock() {
            State::WarmingUp => return Err(Refusal::WarmingUp),
            State::Ended => return Err(Refusal::Ended),
            State::Serving { is_draining: true, .. } => return Err(Refusal::Draining),
            State::Serving { shape, queue, .. } => {
                let block = shape.layers;
                let is_part = layers.start() >= block.start() && layers.end() <= block.end();
                if !is_part || (layers != block && !shape.has_parts) {
                    return Err(Refusal::Layers { asked: layers, block });
                }
                queue.clone()
            }
        };
        let place = queue.backlog.enter(client, 0).ok_or(Refusal::Busy)?;
        let (reply, opened) = oneshot::channel();
        let command = Command::Open { client, layers, tokens_max, is_growing, reply, place };
        queue.commands.send(command).map_err(|_| Refusal::Ended)?;
        let mut opening = Opening { opened, queue };
        let OpenedKey { key, is_open } = (&mut opening.opened).await.unwrap_or(Err(Refusal::Ended))?;
        Ok(BlockSession { key, client, is_open, queue: opening.queue.clone() })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Serving { queue, .. } = state {
            let _ = queue.commands.send(Command::End);
        }
    }
}

/// A session that is being opened. If nobody waits for it any more when it is open, it is closed.
struct Opening {
    opened: oneshot::Receiver<Result<OpenedKey, Refusal>>,
    queue: Queue,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.opened.close();
        if let Ok(Ok(OpenedKey { key, .. })) = self.opened.try_recv() {
            // An error means that all sessions have ended.
            let _ = self.queue.commands.send(Command::Close { session: key });
        }
    }
}

/// Dropping it closes the session and frees its K/V.
#[derive(Debug)]
pub struct BlockSession {
    key: SessionKey,
    client: Client,
    /// Gone when the block's thread has closed the session.
    is_open: Weak<()>,
    queue: Queue,
}

impl BlockSession {
    /// Runs rows. Runs of one session are made one after the other.
    pub async fn run(&mut self, rows: BlockRows) -> Result<BlockStates, RunError> {
        let place = self.queue.backlog.enter(self.client, size_of_val(rows.activations.as_slice()));
        let place = place.ok_or(RunError::Busy)?;
        let (reply, ran) = oneshot::channel();
        let command = Command::Run { session: self.key, rows, reply, place };
        self.queue.commands.send(command).map_err(|_| RunError::Ended)?;
        ran.await.unwrap_or(Err(RunError::Ended))
    }

    /// False when the block has closed it, because it was not used for too long or its room was needed.
    pub fn is_open(&self) -> bool {
        self.is_open.strong_count() > 0
    }
}

impl Drop for BlockSession {
    fn drop(&mut self) {
        // An error means that all sessions have ended.
        let _ = self.queue.commands.send(Command::Close { session: self.key });
    }
}
