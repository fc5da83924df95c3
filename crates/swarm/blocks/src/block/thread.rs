//! The thread that owns a block's executor: opens and closes sessions, and runs steps.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use engine::{Capacity, Executor, ExecutorError, Health, Prefix, RequestedOutput, StepOutput, StepPlan};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};
use types::{LayerRange, SessionId};

use super::accounts::{Accounts, Shortage};
use super::backlog::BacklogPlace;
use super::batch::{WaitingRun, take_batch};
use super::{BlockLimits, BlockRows, BlockShape, BlockStates, BlockStats, Client, Refusal, RunError};

/// Commands that are carried out between two steps, so that no flood of them keeps the steps from running.
const COMMANDS_PER_STEP_MAX: usize = 1024;
/// How long the thread sleeps at most before it looks for sessions to expire, and for ranks that were lost.
const TICK: Duration = Duration::from_millis(100);
/// How long it works on rebuilding the executor before it answers those who ask meanwhile.
const REBUILD_TICK: Duration = Duration::from_millis(20);

/// Names a session of this block. Keys are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey(u64);

#[cfg(test)]
impl SessionKey {
    pub fn for_test(number: u64) -> Self {
        Self(number)
    }
}

#[derive(Debug)]
pub(super) enum Command {
    Open {
        client: Client,
        layers: LayerRange,
        tokens_max: usize,
        is_growing: bool,
        reply: oneshot::Sender<Result<OpenedKey, Refusal>>,
        place: BacklogPlace,
    },
    Run {
        session: SessionKey,
        rows: BlockRows,
        reply: oneshot::Sender<Result<BlockStates, RunError>>,
        place: BacklogPlace,
    },
    Close {
        session: SessionKey,
    },
    End,
}

#[derive(Clone, Debug)]
pub(super) struct OpenedKey {
    pub key: SessionKey,
    /// Gone when the session was closed.
    pub is_open: Weak<()>,
}

struct Session {
    id: SessionId,
    client: Client,
    layers: LayerRange,
    tokens_max: usize,
    /// It reserves tokens as it needs them.
    is_growing: bool,
    /// Reserved tokens: those of whole pages.
    reserved: usize,
    /// Tokens that are computed.
    computed: usize,
    /// The same when the runs that wait are done.
    expected: usize,
    used: Instant,
    /// Whoever holds the session sees when it is gone.
    _open: Arc<()>,
}

pub(super) struct BlockThread {
    executor: Box<dyn Executor>,
    shape: BlockShape,
    limits: BlockLimits,
    capacity: Capacity,
    accounts: Accounts,
    sessions: HashMap<SessionKey, Session>,
    next_key: u64,
    waiting: VecDeque<WaitingRun>,
    /// Clients that were part of the last step.
    served: HashSet<Client>,
    plan: StepPlan,
    output: StepOutput,
    stats: Arc<Mutex<BlockStats>>,
    is_rebuilding: bool,
    /// The first session that was opened after the executor was lost last.
    first_after_loss: SessionKey,
}

impl BlockThread {
    pub fn new(
        executor: Box<dyn Executor>,
        shape: BlockShape,
        limits: BlockLimits,
        stats: Arc<Mutex<BlockStats>>,
    ) -> Self {
        let capacity = executor.capacity();
        let thread = Self {
            executor,
            shape,
            limits,
            capacity,
            accounts: Accounts::new(limits, capacity.pages_total * capacity.page_tokens),
            sessions: HashMap::new(),
            next_key: 0,
            waiting: VecDeque::new(),
            served: HashSet::new(),
            plan: StepPlan::new(),
            output: StepOutput::new(),
            stats,
            is_rebuilding: false,
            first_after_loss: SessionKey(0),
        };
        thread.report(|_| {});
        thread
    }

    /// Runs until the block is closed.
    pub fn run(mut self, commands: &Receiver<Command>) {
        let mut swept = Instant::now();
        loop {
            if self.is_rebuilding {
                self.check_health(REBUILD_TICK);
            } else if self.waiting.is_empty() {
                match commands.recv_timeout(TICK) {
                    Ok(Command::End) | Err(RecvTimeoutError::Disconnected) => return,
                    Ok(command) => self.handle(command),
                    Err(RecvTimeoutError::Timeout) => self.check_health(Duration::ZERO),
                }
            }
            // Everything that has come takes part in the next step.
            for _ in 0..COMMANDS_PER_STEP_MAX {
                match commands.try_recv() {
                    Ok(Command::End) | Err(TryRecvError::Disconnected) => return,
                    Ok(command) => self.handle(command),
                    Err(TryRecvError::Empty) => break,
                }
            }
            if swept.elapsed() >= TICK {
                swept = Instant::now();
                self.expire();
            }
            self.step();
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Open { client, layers, tokens_max, is_growing, reply, place } => {
                let opened = self.open(client, layers, tokens_max, is_growing);
                let key = opened.as_ref().ok().map(|opened| opened.key);
                drop(place);
                // The client may have left in the meantime.
                if reply.send(opened).is_err()
                    && let Some(key) = key
                {
                    self.close(key);
                }
            }
            Command::Run { session, rows, reply, place } => match self.check(session, &rows) {
                Ok((client, layers, count)) => {
                    let since = Instant::now();
                    self.waiting.push_back(WaitingRun {
                        client,
                        session,
                        layers,
                        rows,
                        count,
                        reply,
                        since,
                        _place: place,
                    });
                }
                Err(error) => self.fail(reply, error),
            },
            Command::Close { session } => self.close(session),
            Command::End => {}
        }
        self.report(|_| {});
    }

    fn open(
        &mut self,
        client: Client,
        layers: LayerRange,
        tokens_max: usize,
        is_growing: bool,
    ) -> Result<OpenedKey, Refusal> {
        let max = self.shape.positions_max;
        if !(1..=max).contains(&tokens_max) {
            return Err(Refusal::TooLong { tokens: tokens_max, max });
        }
        if self.is_rebuilding {
            return Err(Refusal::Rebuilding);
        }
        let reserved = if is_growing { 0 } else { self.capacity.pages(tokens_max) * self.capacity.page_tokens };
        self.reserve(client, None, |accounts| accounts.reserve(client, reserved))?;
        // Without page hashes nothing is shared between sessions, so nobody learns what others have computed.
        let prefix = Prefix { tokens: &[], pages: &[], reuse_max: 0 };
        let opened = match self.executor.open(tokens_max, prefix) {
            Ok(opened) => opened,
            Err(error) => {
                self.accounts.release(client, reserved);
                if error.is_lost() {
                    self.failed(Vec::new(), &error);
                    return Err(Refusal::Rebuilding);
                }
                warn!(%error, "a session could not be opened");
                return Err(Refusal::TooManySessions { max: self.sessions.len() });
            }
        };
        let key = SessionKey(self.next_key);
        self.next_key += 1;
        let (id, used, open) = (opened.session, Instant::now(), Arc::new(()));
        let is_open = Arc::downgrade(&open);
        let (computed, expected) = (0, 0);
        let session =
            Session { id, client, layers, tokens_max, is_growing, reserved, computed, expected, used, _open: open };
        self.sessions.insert(key, session);
        Ok(OpenedKey { key, is_open })
    }

    /// Reserves something for a client. If there is no room, sessions that grow and that nobody uses now are closed, as many as are
    /// needed: of the client that has the most tokens, the one that was not used for the longest time. None is closed if that does
    /// not help. `own`: the session that needs the room.
    fn reserve(
        &mut self,
        client: Client,
        own: Option<SessionKey>,
        reserve: impl Fn(&mut Accounts) -> Result<(), Shortage>,
    ) -> Result<(), Refusal> {
        let Err(mut shortage) = reserve(&mut self.accounts) else { return Ok(()) };
        let waits: HashSet<SessionKey> = self.waiting.iter().map(|run| run.session).collect();
        let (now, evict_after) = (Instant::now(), self.limits.evict_after);
        let is_idle = |(key, session): &(&SessionKey, &Session)| {
            let is_spare = session.client == client || now.duration_since(session.used) >= evict_after;
            session.is_growing && is_spare && Some(**key) != own && !waits.contains(*key)
        };
        let mut idle: Vec<(SessionKey, Client, usize, Instant)> = (self.sessions.iter().filter(is_idle))
            .map(|(key, session)| (*key, session.client, session.reserved, session.used))
            .collect();
        let (mut trial, mut evicted) = (self.accounts.clone(), Vec::new());
        loop {
            let may_help = idle.iter().enumerate().filter(|(_, (_, other, ..))| !shortage.is_own || *other == client);
            let next = may_help.min_by_key(|(_, (_, other, _, used))| (Reverse(trial.tokens_of(*other)), *used));
            let Some((index, _)) = next else { return Err(shortage.refusal) };
            let (key, other, reserved, _) = idle.swap_remove(index);
            trial.release(other, reserved);
            evicted.push(key);
            match reserve(&mut trial) {
                Ok(()) => break,
                Err(still) => shortage = still,
            }
        }
        debug!(sessions = evicted.len(), "sessions that are not used are closed for another one");
        evicted.into_iter().for_each(|key| self.close(key));
        reserve(&mut self.accounts).map_err(|shortage| shortage.refusal)
    }

    /// Reserves what a session that grows needs to hold so many tokens.
    fn grow(&mut self, key: SessionKey, tokens: usize) -> Result<(), RunError> {
        let needed = self.capacity.pages(tokens) * self.capacity.page_tokens;
        let Some(session) = self.sessions.get(&key).filter(|session| session.reserved < needed) else { return Ok(()) };
        let (client, more) = (session.client, needed - session.reserved);
        self.reserve(client, Some(key), |accounts| accounts.grow(client, more)).map_err(|refusal| match refusal {
            Refusal::NoTokens { needed, free } => RunError::NoTokens { needed, free },
            _ => RunError::Busy,
        })?;
        if let Some(session) = self.sessions.get_mut(&key) {
            session.reserved = needed;
        }
        Ok(())
    }

    fn close(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.remove(&key) else { return };
        self.executor.close(session.id);
        self.accounts.release(session.client, session.reserved);
        // Nobody waits for them: a session is closed by whoever runs it.
        self.waiting.retain(|run| run.session != key);
    }

    /// What a run may be refused for. Returns whose it is, its layers and its rows.
    fn check(&mut self, key: SessionKey, rows: &BlockRows) -> Result<(Client, LayerRange, usize), RunError> {
        let BlockShape { hidden, rows_max, .. } = self.shape;
        let Some(session) = self.sessions.get(&key) else {
            return Err(if key.0 < self.first_after_loss.0 { RunError::Lost } else { RunError::Expired });
        };
        let (found, count) = (rows.activations.len(), rows.activations.len() / hidden);
        if found != count * hidden || rows.state_rows > count {
            return Err(RunError::Shape { rows: count.max(rows.state_rows), hidden, found });
        }
        if !(1..=rows_max).contains(&count) {
            return Err(RunError::Rows { rows: count, max: rows_max });
        }
        if rows.position > session.expected {
            return Err(RunError::Position { position: rows.position, computed: session.expected });
        }
        // `position` is at most `expected`, so the sum does not overflow.
        let end = rows.position + count;
        if end > session.tokens_max {
            return Err(RunError::TooLong { end, max: session.tokens_max });
        }
        if rows.activations.iter().any(|value| !value.is_finite()) {
            return Err(RunError::NotFinite);
        }
        let (client, layers) = (session.client, session.layers);
        self.grow(key, end)?;
        if let Some(session) = self.sessions.get_mut(&key) {
            session.expected = end;
            session.used = Instant::now();
        }
        Ok((client, layers, count))
    }

    fn fail(&self, reply: oneshot::Sender<Result<BlockStates, RunError>>, error: RunError) {
        self.report(|stats| stats.failures += 1);
        // The client may have left in the meantime.
        let _ = reply.send(Err(error));
    }

    /// Runs one step of the runs that wait.
    fn step(&mut self) {
        let mut batch = take_batch(&mut self.waiting, &self.capacity, &mut self.served);
        batch.retain(|run| self.sessions.contains_key(&run.session));
        if batch.is_empty() {
            return;
        }
        let started = Instant::now();
        match self.run_batch(&mut batch) {
            Ok(()) => self.reply(batch, started),
            Err(error) => self.failed(batch, &error),
        }
    }

    fn run_batch(&mut self, batch: &mut [WaitingRun]) -> Result<(), ExecutorError> {
        let layers = batch.first().map(|run| run.layers);
        self.plan.clear();
        self.plan.set_layers(layers.filter(|layers| *layers != self.shape.layers));
        for run in &mut *batch {
            let BlockRows { position, phase, state_rows, .. } = run.rows;
            let Some(session) = self.sessions.get_mut(&run.session) else { continue };
            if position < session.computed {
                self.executor.truncate(session.id, position)?;
            }
            session.computed = position + run.count;
            self.plan.push_rows(session.id, phase, position, run.count, RequestedOutput::States { rows: state_rows });
        }
        let activations = self.plan.activations_mut();
        batch.iter().for_each(|run| activations.extend_from_slice(&run.rows.activations));
        self.executor.submit(&self.plan)?;
        self.executor.collect(&mut self.output)
    }

    fn reply(&mut self, batch: Vec<WaitingRun>, started: Instant) {
        let hidden = self.shape.hidden;
        let expected: usize = batch.iter().map(|run| run.rows.state_rows * hidden).sum();
        if self.output.states.len() != expected {
            let why = format!("it gave {} values instead of {expected}", self.output.states.len());
            let why: Arc<str> = why.into();
            batch.into_iter().for_each(|run| self.fail(run.reply, RunError::Failed { why: Arc::clone(&why) }));
            return;
        }
        let compute = started.elapsed();
        let oldest = batch.iter().map(|run| started.saturating_duration_since(run.since)).max().unwrap_or_default();
        let (entries, rows) = (batch.len(), batch.iter().map(|run| run.count).sum());
        self.report(|stats| stats.record(compute, oldest, entries, rows));
        let output = std::mem::take(&mut self.output);
        let mut states = output.states.as_slice();
        for run in batch {
            let (own, others) = states.split_at(run.rows.state_rows * hidden);
            states = others;
            let queued = started.saturating_duration_since(run.since);
            if own.iter().any(|value| !value.is_finite()) {
                // Finite rows, though so large that no model makes them.
                let why = "the states are not finite".into();
                self.fail(run.reply, RunError::Failed { why });
                self.close(run.session);
                continue;
            }
            // The client may have left in the meantime.
            let _ = run.reply.send(Ok(BlockStates { states: own.to_vec(), compute, queued }));
        }
        self.output = output;
        self.report(|_| {});
    }

    /// A step failed. What its sessions have computed is not known any more, so they end; a lost process ends all.
    fn failed(&mut self, batch: Vec<WaitingRun>, error: &ExecutorError) {
        let (ended, failure): (Vec<SessionKey>, RunError) = match error {
            ExecutorError::Lost { why } => {
                warn!(%why, sessions = self.sessions.len(), "the block is being rebuilt");
                self.is_rebuilding = true;
                self.first_after_loss = SessionKey(self.next_key);
                (self.sessions.keys().copied().collect(), RunError::Lost)
            }
            _ => {
                let why: Arc<str> = error.to_string().into();
                warn!(%why, sessions = batch.len(), "a step of the block failed");
                (batch.iter().map(|run| run.session).collect(), RunError::Failed { why })
            }
        };
        batch.into_iter().for_each(|run| self.fail(run.reply, failure.clone()));
        for key in ended {
            let (lost, waiting): (VecDeque<_>, VecDeque<_>) =
                self.waiting.drain(..).partition(|run| run.session == key);
            self.waiting = waiting;
            lost.into_iter().for_each(|run| self.fail(run.reply, failure.clone()));
            self.close(key);
        }
        self.report(|_| {});
    }

    /// Looks whether the executor's processes are there while nothing runs, or has it rebuilt for so long.
    fn check_health(&mut self, wait: Duration) {
        match (self.executor.poll_health(wait), self.is_rebuilding) {
            (Health::Ready, false) | (Health::Rebuilding { .. }, true) => {}
            (Health::Ready, true) => {
                info!("the block is rebuilt");
                self.is_rebuilding = false;
                self.report(|stats| stats.rebuilds += 1);
            }
            (Health::Rebuilding { why }, false) => self.failed(Vec::new(), &ExecutorError::Lost { why }),
        }
    }

    fn expire(&mut self) {
        let idle = self.limits.idle;
        let waits = |key: &SessionKey| self.waiting.iter().any(|run| run.session == *key);
        let is_idle = |(key, session): &(&SessionKey, &Session)| session.used.elapsed() >= idle && !waits(key);
        let expired: Vec<SessionKey> = self.sessions.iter().filter(is_idle).map(|(key, _)| *key).collect();
        if !expired.is_empty() {
            expired.into_iter().for_each(|key| self.close(key));
            self.report(|_| {});
        }
    }

    fn report(&self, change: impl FnOnce(&mut BlockStats)) {
        let mut stats = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        stats.sessions = self.accounts.sessions();
        stats.clients = self.accounts.clients();
        stats.tokens_free = self.accounts.tokens_free();
        stats.is_rebuilding = self.is_rebuilding;
        change(&mut stats);
    }
}
