//! `Executor`: runs steps. One process, a group of tensor-parallel rank processes and a chain of stages are implementations of
//! this one trait, and the decode loop does not know which of them it drives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kernels::BackendError;
use model::CollectiveError;
use types::{LayerRange, Rank, SessionId};

use crate::plan::{StepOutput, StepPlan};
use crate::prefix::Prefix;

/// Holds sessions and runs steps. Up to [`Executor::depth`] steps are in flight; they are collected in the order in
/// which they were submitted.
///
/// Calls take effect in the order in which they are made, on every process that holds a part of the model: a session op
/// applies after the steps that were submitted before it, and before those submitted after it. So a step may continue a session
/// whose earlier rows are still in flight, a session may share pages that a step in flight computes, and pages that are
/// freed while a step in flight uses them can be allocated at once.
///
/// A loss ([`ExecutorError::Lost`], [`Health::Rebuilding`]) closes all sessions and discards all steps in flight.
pub trait Executor: Send {
    /// Steps that may be in flight at once: one for each pipeline stage, so that no stage idles. It may change at a loss.
    fn depth(&self) -> usize;

    fn capacity(&self) -> Capacity;

    /// Opens a session that will hold at most `tokens_max` tokens. It may say that this takes a while
    /// ([`ExecutorError::Opening`]): the caller asks again. It begins with those pages of `prefix` that the prefix
    /// cache has. Whole pages of `prefix` that it computes are published in the cache for later sessions.
    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError>;

    /// Discards what a session computed after its first `tokens` tokens. Returns how many remain computed: fewer than
    /// `tokens` if these end within a page that is shared or in the prefix cache, because that page is released. What steps
    /// in flight return for rows after the tokens that remain is missing or meaningless; no other session is affected.
    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError>;

    /// Closes a session and frees its pages at once. What steps in flight compute for it is dropped, except for
    /// [`StepOutput::states`], whose rows keep their places. Closing a session twice does nothing.
    fn close(&mut self, session: SessionId);

    /// Starts a step. An error means that no session changed; what can be checked is checked before anything runs.
    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError>;

    /// Waits for the oldest step in flight and replaces `output` with its results. An executor whose sessions run independently may
    /// return a later one first, if none of its sessions is in a step before it, and says so in [`StepOutput::overtaken`].
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError>;

    /// The same, but an executor that looks for a part of its model while the step runs returns false after about `wait`: the
    /// step stays in flight.
    fn poll_collect(&mut self, output: &mut StepOutput, wait: Duration) -> Result<bool, ExecutorError> {
        let _ = wait;
        self.collect(output).map(|()| true)
    }

    /// The layers that nobody runs now, if there are some and the executor waits for them.
    fn missing(&self) -> Option<MissingLayers> {
        None
    }

    /// Detects lost processes while no step runs, and continues to replace them, for at most `wait` or until the executor is
    /// ready. After a loss every session is gone; either this method or a call that failed has reported it.
    fn poll_health(&mut self, wait: Duration) -> Health {
        let _ = wait;
        Health::Ready
    }

    /// The processes that share the model, if there are several.
    fn ranks(&self) -> Vec<RankReport> {
        Vec::new()
    }
}

/// Whether an executor can run steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Ready,
    /// It lost a process and replaces it: see [`Executor::poll_health`].
    Rebuilding {
        why: Arc<str>,
    },
}

/// Layers that an executor waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingLayers {
    pub layers: LayerRange,
    pub since: Instant,
    /// Why nobody runs them.
    pub why: Arc<str>,
}

/// The state of one rank of an executor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankReport {
    pub rank: Rank,
    /// `None` while there is no process.
    pub pid: Option<u32>,
    /// Whether it can run steps as soon as all others can.
    pub ready: bool,
    /// For people: `ready`, `loading`.
    pub state: &'static str,
    /// Number of earlier processes of this rank.
    pub restarts: u64,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub resident_bytes: u64,
    pub steps: u64,
    /// Time in steps, and the time in collectives, which is mostly waiting for other ranks.
    pub step_time: Duration,
    pub wait_time: Duration,
    /// Time that the supervisor spent writing requests to the rank.
    pub send_time: Duration,
    /// How often the rank had to abort a step because another rank was lost, and the longest time that this took.
    pub drains: u64,
    pub drain_max: Duration,
}

/// A session opened by [`Executor::open`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenedSession {
    pub session: SessionId,
    /// Tokens at its beginning that are computed already; the others have to be run.
    pub computed: usize,
}

/// What an executor can hold. All but `pages_free` and `pages_cached` stay the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    pub vocab: usize,
    /// Tokens of the longest session.
    pub positions_max: usize,
    /// Tokens of one step, all sequences together.
    pub rows_max: usize,
    /// Sequences of one step.
    pub sequences_max: usize,
    /// Rows of one step whose logits may be requested.
    pub logit_rows_max: usize,
    /// Pages of all sequences of one step; a page that two share counts twice.
    pub step_pages_max: usize,
    pub page_tokens: usize,
    pub pages_total: usize,
    /// Pages that can be allocated: empty ones and cached ones.
    pub pages_free: usize,
    /// Of these: pages of the prefix cache that no session uses.
    pub pages_cached: usize,
}

impl Capacity {
    /// Pages that hold this many tokens.
    pub fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// The longest sequence that can run when it is alone: the context to advertise.
    pub fn tokens_max(&self) -> usize {
        self.positions_max.min(self.pages_total.min(self.step_pages_max) * self.page_tokens)
    }

    pub fn tokens_free(&self) -> usize {
        self.pages_free * self.page_tokens
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    #[error("the KV cache has {free} pages free, the step needs {needed}")]
    OutOfPages { needed: usize, free: usize },
    #[error("{max} sessions are open, which is the limit")]
    OutOfSessions { max: usize },
    #[error("the session is being opened")]
    Opening,
    #[error("session {} is not open", .0.0)]
    UnknownSession(SessionId),
    #[error("a session of {tokens} tokens was asked for, the limit is {max}")]
    TooLong { tokens: usize, max: usize },
    #[error("session {} has computed {computed} tokens, the plan continues at {position}", session.0)]
    PositionMismatch { session: SessionId, computed: usize, position: usize },
    #[error("session {} occurs twice in one step", .0.0)]
    DuplicateSession(SessionId),
    #[error("a step of {found} {what} is too large, the limit is {max}")]
    StepTooLarge { what: &'static str, found: usize, max: usize },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error("the plan does not have {expected} for its rows, which this executor needs")]
    Input { expected: &'static str },
    #[error("{found} values were given for {rows} rows of {width}")]
    ActivationShape { rows: usize, width: usize, found: usize },
    #[error("this executor does not return {what}")]
    Output { what: &'static str },
    #[error("the plan asks for layers {layers} alone, and this executor always runs all of its layers")]
    PartOfLayers { layers: LayerRange },
    #[error("the plan asks for layers {layers}, which this executor does not have")]
    UnknownLayers { layers: LayerRange },
    #[error("session {} has tokens that some of the plan's layers did not compute", .0.0)]
    OtherLayers(SessionId),
    #[error("{depth} steps are in flight, which is the limit")]
    PipelineFull { depth: usize },
    #[error("no step is in flight")]
    NoStepInFlight,
    #[error("a part of the model was lost: {why}")]
    Lost { why: Arc<str> },
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
}

impl ExecutorError {
    /// Whether the same call can succeed later, when other sessions have ended or gone on.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::OutOfPages { .. } | Self::OutOfSessions { .. } | Self::Opening | Self::PipelineFull { .. })
    }

    /// Whether all sessions are gone and the executor replaces a lost process: see [`Executor::poll_health`].
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. })
    }
}

impl<E: Executor + ?Sized> Executor for Box<E> {
    fn depth(&self) -> usize {
        (**self).depth()
    }

    fn capacity(&self) -> Capacity {
        (**self).capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        (**self).open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        (**self).truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        (**self).close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        (**self).submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        (**self).collect(output)
    }

    fn poll_collect(&mut self, output: &mut StepOutput, wait: Duration) -> Result<bool, ExecutorError> {
        (**self).poll_collect(output, wait)
    }

    fn missing(&self) -> Option<MissingLayers> {
        (**self).missing()
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        (**self).poll_health(wait)
    }

    fn ranks(&self) -> Vec<RankReport> {
        (**self).ranks()
    }
}
