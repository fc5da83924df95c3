//! A block of layers that many clients use. Each has sessions of its own; requests that wait run together in one step.
//!
//! One thread owns the block's executor. Sessions reserve their K/V when they are opened, so a session that is open can
//! always run. Who the clients are, and how they reach this process, is left to the callers.

mod accounts;
mod batch;
mod stats;
mod thread;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use engine::{Executor, Phase};
use swarm::PeerId;
use tokio::sync::oneshot;
use types::LayerRange;

pub use stats::BlockStats;

use thread::{BlockThread, Command, SessionKey};

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
}

impl Default for BlockLimits {
    fn default() -> Self {
        Self {
            sessions_max: 256,
            sessions_per_client_max: 64,
            tokens_per_client_percent: 50,
            idle: Duration::from_secs(600),
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
    #[error("the block has ended")]
    Ended,
}

impl Refusal {
    /// Whether the same peer may grant it later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::WarmingUp | Self::Rebuilding | Self::TooManySessions { .. } | Self::NoTokens { .. })
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
    #[error("the session was not used for too long")]
    Expired,
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
    Serving {
        shape: BlockShape,
        commands: std::sync::mpsc::Sender<Command>,
        thread: Option<JoinHandle<()>>,
        is_draining: bool,
    },
    Ended,
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
            *state = State::Serving { shape, commands, thread: Some(thread), is_draining: false };
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

    /// From now on no session is opened; those that are open go on.
    pub fn drain(&self) {
        if let State::Serving { is_draining, .. } = &mut *self.0.lock() {
            *is_draining = true;
        }
    }

    /// Ends all sessions, and waits until the executor is dropped.
    pub fn close(&self) {
        let ended = std::mem::replace(&mut *self.0.lock(), State::Ended);
        if let State::Serving { commands, thread, .. } = ended {
            // An error means that the thread has ended.
            let _ = commands.send(Command::End);
            thread.map(JoinHandle::join);
        }
    }

    /// Opens a session for some of the block's layers, and reserves its K/V.
    pub async fn open(&self, client: Client, layers: LayerRange, tokens_max: usize) -> Result<BlockSession, Refusal> {
        let commands = match &*self.0.lock() {
            State::WarmingUp => return Err(Refusal::WarmingUp),
            State::Ended => return Err(Refusal::Ended),
            State::Serving { is_draining: true, .. } => return Err(Refusal::Draining),
            State::Serving { shape, commands, .. } => {
                let block = shape.layers;
                let is_part = layers.start() >= block.start() && layers.end() <= block.end();
                if !is_part || (layers != block && !shape.has_parts) {
                    return Err(Refusal::Layers { asked: layers, block });
                }
                commands.clone()
            }
        };
        let (reply, opened) = oneshot::channel();
        let command = Command::Open { client, layers, tokens_max, reply };
        commands.send(command).map_err(|_| Refusal::Ended)?;
        let mut opening = Opening { opened, commands };
        let key = (&mut opening.opened).await.unwrap_or(Err(Refusal::Ended))?;
        Ok(BlockSession { key, commands: opening.commands.clone() })
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
        if let State::Serving { commands, .. } = state {
            let _ = commands.send(Command::End);
        }
    }
}

/// A session that is being opened. If nobody waits for it any more when it is open, it is closed.
struct Opening {
    opened: oneshot::Receiver<Result<SessionKey, Refusal>>,
    commands: std::sync::mpsc::Sender<Command>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.opened.close();
        if let Ok(Ok(key)) = self.opened.try_recv() {
            // An error means that all sessions have ended.
            let _ = self.commands.send(Command::Close { session: key });
        }
    }
}

/// Dropping it closes the session and frees its K/V.
#[derive(Debug)]
pub struct BlockSession {
    key: SessionKey,
    commands: std::sync::mpsc::Sender<Command>,
}

impl BlockSession {
    /// Runs rows. Runs of one session are made one after the other.
    pub async fn run(&mut self, rows: BlockRows) -> Result<BlockStates, RunError> {
        let (reply, ran) = oneshot::channel();
        self.commands.send(Command::Run { session: self.key, rows, reply }).map_err(|_| RunError::Ended)?;
        ran.await.unwrap_or(Err(RunError::Ended))
    }
}

impl Drop for BlockSession {
    fn drop(&mut self) {
        // An error means that all sessions have ended.
        let _ = self.commands.send(Command::Close { session: self.key });
    }
}
