//! `CakeExecutor`: runs plans with activations on a cake worker. Each session has a connection of its own, and the sequences
//! of a step are sent on theirs concurrently.
//!
//! The session table decides what can run, as it does for other executors. The worker has no prefix cache and forgets whole
//! sequences only. So what was sent is kept, and a session that begins with a prefix, or continues where it was truncated,
//! is sent again from its beginning.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use engine::{
    Capacity, Entry, Executor, ExecutorError, Health, OpenedSession, Prefix, SessionTable, StepOutput, StepPlan,
};
use model::Limits;
use tracing::warn;
use types::SessionId;

use super::CakeWorkerAddress;
use super::history::ActivationHistory;
use super::link::{RunReply, WorkerLink};

/// Connections that wait for the next session.
const IDLE_MAX: usize = 16;
/// Rows that are sent again in one message.
const RESENT_ROWS_MAX: usize = 512;

pub struct CakeExecutor {
    worker: CakeWorkerAddress,
    hidden: usize,
    sessions: SessionTable,
    history: ActivationHistory,
    /// Of the sessions that have run.
    links: HashMap<SessionId, SessionLink>,
    idle: Vec<WorkerLink>,
    flight: Option<Vec<RunInFlight>>,
}

struct SessionLink {
    link: WorkerLink,
    /// Tokens that the worker has.
    computed: usize,
}

/// What was sent for an entry, and how many of its last rows are requested.
struct RunInFlight {
    /// The answers to what was sent again are not used.
    resent: Vec<Receiver<RunReply>>,
    result: Receiver<RunReply>,
    rows: usize,
}

impl CakeExecutor {
    /// Connects when the first step comes. `hidden` and `vocab` are those of the model; `limits` those of all stages.
    pub fn new(worker: CakeWorkerAddress, hidden: usize, vocab: usize, limits: &Limits) -> Self {
        let sessions = SessionTable::new(limits, vocab);
        warn!(
            worker = %worker.address,
            layers = %worker.layers,
            "a cake worker is used: what is sent to it is not encrypted, and anybody on the way can read and change it"
        );
        let history = ActivationHistory::new(hidden, limits.kv_pages);
        Self { worker, hidden, sessions, history, links: HashMap::new(), idle: Vec::new(), flight: None }
    }

    /// The connection of a session, which is made when it first runs.
    fn take_link(&mut self, session: SessionId) -> Result<SessionLink, ExecutorError> {
        if let Some(link) = self.links.remove(&session) {
            return Ok(link);
        }
        // The worker may have ended since their sequences did.
        self.idle.retain(|link| !link.is_hung_up());
        let link = match self.idle.pop() {
            Some(link) => link,
            None => WorkerLink::start(self.worker.clone(), self.hidden).map_err(|error| self.lost(error))?,
        };
        Ok(SessionLink { link, computed: 0 })
    }

    /// Closes all connections and sessions.
    fn lose(&mut self, why: String) -> Arc<str> {
        self.links.clear();
        self.idle.clear();
        self.flight = None;
        self.sessions.clear();
        self.history.clear();
        why.into()
    }

    fn lost(&mut self, error: impl std::fmt::Display) -> ExecutorError {
        let why = format!("cake worker {} with layers {}: {error}", self.worker.address, self.worker.layers);
        ExecutorError::Lost { why: self.lose(why) }
    }

    fn answer(&mut self, result: &Receiver<RunReply>) -> Result<Vec<f32>, ExecutorError> {
        match result.recv() {
            Ok(Ok(states)) => Ok(states),
            Ok(Err(error)) => Err(self.lost(error)),
            Err(_) => Err(self.lost("the connection's thread has ended")),
        }
    }

    /// Checks a plan as the table does, and that it has what this executor takes and requests what it returns.
    fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.sessions.check(plan)?;
        plan.check_stage(self.hidden)?;
        plan.check_all_layers()
    }

    /// Sends the rows of an entry, and before them what the worker does not have of its session.
    fn send(&mut self, entry: &Entry, rows: &[f32]) -> Result<RunInFlight, ExecutorError> {
        let table = self.sessions.pages(entry)?.to_vec();
        let mut resent = Vec::new();
        let mut session = self.take_link(entry.session)?;
        if session.computed > entry.position {
            session.link.reset();
            session.computed = 0;
        }
        while session.computed < entry.position {
            let count = RESENT_ROWS_MAX.min(entry.position - session.computed);
            let Some(rows) = self.history.read(&table, session.computed, count) else {
                return Err(self.lost("the beginning of a sequence is not known any more"));
            };
            resent.push(session.link.run(session.computed, rows));
            session.computed += count;
        }
        let result = session.link.run(entry.position, rows.to_vec());
        session.computed = entry.end();
        self.links.insert(entry.session, session);
        self.history.write(&table, entry.position, rows);
        Ok(RunInFlight { resent, result, rows: entry.state_rows().len() })
    }

    /// Forgets what the worker holds of a session.
    fn release(&mut self, session: SessionId) {
        let Some(SessionLink { link, .. }) = self.links.remove(&session) else { return };
        if self.idle.len() < IDLE_MAX {
            link.reset();
            self.idle.push(link);
        }
    }
}

impl Executor for CakeExecutor {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.sessions.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.sessions.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.sessions.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.release(session);
        self.sessions.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.flight.is_some() {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        self.check(plan)?;
        self.sessions.reserve(plan)?;
        self.sessions.advance(plan);
        let mut activations = plan.activations();
        let mut flight = Vec::with_capacity(plan.entries().len());
        for entry in plan.entries() {
            let (own, rest) = activations.split_at(entry.rows() * self.hidden);
            activations = rest;
            flight.push(self.send(entry, own)?);
        }
        self.flight = Some(flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        let flight = self.flight.take().ok_or(ExecutorError::NoStepInFlight)?;
        for RunInFlight { resent, result, rows } in flight {
            for again in &resent {
                self.answer(again)?;
            }
            let states = self.answer(&result)?;
            let start = states.len() - rows * self.hidden;
            output.states.extend_from_slice(&states[start..]);
        }
        Ok(())
    }

    /// A worker that closes a connection has ended, or has lost a sequence.
    fn poll_health(&mut self, wait: Duration) -> Health {
        let _ = wait;
        self.idle.retain(|link| !link.is_hung_up());
        if self.flight.is_none() && self.links.values().any(|session| session.link.is_hung_up()) {
            let ExecutorError::Lost { why } = self.lost("it closed a connection") else { return Health::Ready };
            return Health::Rebuilding { why };
        }
        Health::Ready
    }
}
