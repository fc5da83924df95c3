//! `SwarmExecutor`: the executor of a model whose layers are served by the swarm.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{self as sync, RecvTimeoutError};
use std::time::{Duration, Instant};

use directory::{ChainSpan, ModelDigest, PeerChain, PeerId, RouteError};
use engine::{
    Capacity, CoordinatorStage, Entry, EntryWithoutStates, Executor, ExecutorError, Health, MissingLayers,
    OpenedSession, Prefix, StepOutput, StepPlan,
};
use kernels::Backend;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use types::{LayerRange, SessionId};

use super::context::{ClientContext, ClientCounters, ClientOptions, SpanReport, lock};
use super::foreign::ForeignPeers;
use super::job::{Job, JobReply, JobResult, ReplySignal};
use super::session::{LossKind, Session, SessionLoss};
use super::session_state::JobOutput;
use super::times::ClientTimes;
use crate::dial::Dial;
use crate::view::SwarmView;

/// Steps in flight: peers work on one while others are on their way.
const DEPTH: usize = 4;
/// Rows of one run: what peers run at once. A step may have more, of one sequence or of several.
pub const RUN_ROWS_MAX: usize = 512;
/// How long a session is kept for which nobody has asked again.
const OPENING_KEPT: Duration = Duration::from_secs(20);
/// How long the engine waits for a session's chain before it looks again.
const OPENING_WAIT: Duration = Duration::from_millis(100);
/// How long the executor waits for a reply before it looks whether peers are missing.
const REPLY_WAIT: Duration = Duration::from_millis(100);
const SESSION_ENDED: &str = "a session of the swarm ended";
/// The length for which a chain has to have room for the client to count as ready.
const READY_TOKENS: usize = 32;

/// What the client knows of its chains. Clones see the same.
#[derive(Clone)]
pub struct SwarmClient(Arc<ClientContext>);

impl SwarmClient {
    pub fn counters(&self) -> &Arc<ClientCounters> {
        &self.0.counters
    }

    pub fn times(&self) -> &ClientTimes {
        &self.0.times
    }

    /// The chain that was formed or changed last. Its session may have ended.
    pub fn last_chain(&self) -> Vec<SpanReport> {
        lock(&self.0.last_chain).clone()
    }

    /// The fastest chain for a session of so many tokens.
    pub fn plan(&self, tokens: usize) -> Result<PeerChain, RouteError> {
        self.0.plan(tokens)
    }

    /// The predicted time of a token in a chain, in seconds.
    pub fn predict(&self, spans: &[ChainSpan]) -> f64 {
        self.0.view.predict(self.0.request(1), spans)
    }

    pub fn model(&self) -> ModelDigest {
        self.0.model
    }

    /// All layers of the model.
    pub fn layers(&self) -> usize {
        self.0.layers
    }

    /// The round trip to a peer that was measured last.
    pub fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        self.0.round_trip(peer)
    }

    /// What people call a peer: where a server without an identity is, or else its id.
    pub fn peer_name(&self, peer: &PeerId) -> String {
        self.0.peer_name(peer)
    }

    /// The layers of a chain of which nobody but its peer could check the results.
    pub fn unverifiable(&self, spans: &[ChainSpan]) -> Vec<LayerRange> {
        let alone = |span: &&ChainSpan| {
            let chain = PeerChain { spans: spans.to_vec(), token_seconds: 0.0 };
            let mut without = self.0.foreign.with_logits();
            without.insert(span.peer);
            self.0.view.replace(self.0.request(READY_TOKENS), &without, &chain, span.layers).is_err()
        };
        spans.iter().filter(alone).map(|span| span.layers).collect()
    }

    /// The most memory that sessions have kept for replays and checks.
    pub fn replay_bytes_peak(&self) -> usize {
        self.0.replay.bytes_peak()
    }

    /// Whether a peer has another protocol.
    pub fn is_foreign(&self, peer: &PeerId) -> bool {
        self.0.foreign.contains(peer)
    }
}

/// A step in flight.
struct Flight {
    plan: StepPlan,
    /// The outputs of each entry, one after the other for its runs.
    replies: Vec<Vec<Reply>>,
}

/// The result of a run, as soon as it is there.
struct Reply {
    received: sync::Receiver<JobResult>,
    /// An error if the session's task has ended without one.
    result: Option<Result<JobResult, sync::RecvError>>,
}

impl Flight {
    /// Whether all results are there, or nobody waits for them.
    fn is_done(&mut self, sessions: &HashMap<SessionId, mpsc::UnboundedSender<Job>>) -> bool {
        let open = self.plan.entries().iter().zip(&mut self.replies);
        open.filter(|(entry, _)| sessions.contains_key(&entry.session))
            .flat_map(|(_, replies)| replies)
            .all(Reply::is_there)
    }

    fn shares_session(&self, other: &Self) -> bool {
        let sessions = |flight: &Self| flight.plan.entries().iter().map(|entry| entry.session).collect::<Vec<_>>();
        let ours = sessions(self);
        sessions(other).iter().any(|session| ours.contains(session))
    }
}

impl Reply {
    fn new(received: sync::Receiver<JobResult>) -> Self {
        Self { received, result: None }
    }

    /// Whether the result is there.
    fn is_there(&mut self) -> bool {
        if self.result.is_none() {
            self.result = match self.received.try_recv() {
                Ok(result) => Some(Ok(result)),
                Err(sync::TryRecvError::Disconnected) => Some(Err(sync::RecvError)),
                Err(sync::TryRecvError::Empty) => None,
            };
        }
        self.result.is_some()
    }

    fn take(self) -> Result<JobResult, sync::RecvError> {
        self.result.unwrap_or_else(|| self.received.recv())
    }
}

pub struct SwarmExecutor<B: Backend> {
    ends: CoordinatorStage<B>,
    context: Arc<ClientContext>,
    runtime: Handle,
    sessions: HashMap<SessionId, mpsc::UnboundedSender<Job>>,
    flights: VecDeque<Flight>,
    /// Wakes whoever waits for a step.
    replied: Arc<ReplySignal>,
    activations: Vec<f32>,
    states: Vec<f32>,
    without_states: Vec<EntryWithoutStates>,
    /// A session of which nobody has run anything yet.
    opening: Option<Opening>,
    lost: Option<Loss>,
}

/// Why there is no chain.
struct Loss {
    why: Arc<str>,
    /// The layers without a peer, and since when, if that is known.
    missing: Option<MissingLayers>,
    is_reported: bool,
}

/// A session whose chain is being formed.
struct Opening {
    tokens_max: usize,
    asked: Instant,
    formed: sync::Receiver<Result<(), SessionLoss>>,
    jobs: mpsc::UnboundedSender<Job>,
}

impl<B: Backend> SwarmExecutor<B> {
    #[expect(clippy::too_many_arguments, reason = "each is another thing that a client is made of")]
    /// `ends` has the embedding and the head, and none of the model's `layers`. `foreign` are peers with other protocols, which
    /// have records in the view. Tasks run on `runtime`.
    pub fn new(
        ends: CoordinatorStage<B>,
        layers: usize,
        model: ModelDigest,
        dial: Arc<dyn Dial>,
        view: Arc<SwarmView>,
        options: ClientOptions,
        foreign: impl Into<ForeignPeers>,
        runtime: Handle,
    ) -> Self {
        let Capacity { rows_max, vocab, .. } = ends.capacity();
        let shape = [layers, ends.stage().width(), vocab, rows_max.min(RUN_ROWS_MAX)];
        let context = ClientContext::new(dial, view, model, shape, options, foreign.into());
        Self {
            ends,
            context: Arc::new(context),
            runtime,
            sessions: HashMap::new(),
            flights: VecDeque::new(),
            replied: Arc::default(),
            activations: Vec::new(),
            states: Vec::new(),
            without_states: Vec::new(),
            opening: None,
            lost: None,
        }
    }

    pub fn client(&self) -> SwarmClient {
        SwarmClient(Arc::clone(&self.context))
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.ends.head_bytes()
    }

    fn check(&mut self) -> Result<(), ExecutorError> {
        match &mut self.lost {
            None => Ok(()),
            Some(Loss { why, is_reported, .. }) => {
                *is_reported = true;
                Err(ExecutorError::Lost { why: Arc::clone(why) })
            }
        }
    }

    /// Ends all sessions.
    fn lose(&mut self, why: Arc<str>, missing: Option<MissingLayers>) -> ExecutorError {
        self.sessions.clear();
        self.opening = None;
        self.flights.clear();
        self.ends.clear();
        self.lost = Some(Loss { why: Arc::clone(&why), missing, is_reported: true });
        ExecutorError::Lost { why }
    }

    fn lose_session(&mut self, SessionLoss { why, layers, since, .. }: SessionLoss) -> ExecutorError {
        self.lose(Arc::clone(&why), Some(MissingLayers { layers, since, why }))
    }

    /// The way to a session's task, once it has a chain. The engine waits a moment for that, and not at all while other sessions
    /// run: peers may have no room until one of these ends.
    fn form(&mut self, tokens_max: usize) -> Result<mpsc::UnboundedSender<Job>, ExecutorError> {
        let fits = |opening: &Opening| opening.tokens_max >= tokens_max && opening.asked.elapsed() < OPENING_KEPT;
        let opening = self.opening.take().filter(fits).unwrap_or_else(|| {
            let ((jobs, received), (sender, formed)) = (mpsc::unbounded_channel(), sync::channel());
            self.runtime.spawn(Session::run(Arc::clone(&self.context), tokens_max, sender, received));
            Opening { tokens_max, asked: Instant::now(), formed, jobs }
        });
        let is_alone = self.sessions.is_empty();
        match opening.formed.recv_timeout(if is_alone { OPENING_WAIT } else { Duration::ZERO }) {
            Ok(Ok(())) => Ok(opening.jobs),
            Ok(Err(loss)) if is_alone => Err(self.lose_session(loss)),
            Err(RecvTimeoutError::Disconnected) if is_alone => Err(self.lose(SESSION_ENDED.into(), None)),
            Ok(Err(_)) | Err(RecvTimeoutError::Disconnected) => Err(ExecutorError::Opening),
            Err(RecvTimeoutError::Timeout) => {
                self.opening = Some(Opening { asked: Instant::now(), ..opening });
                Err(ExecutorError::Opening)
            }
        }
    }

    /// Gives an entry's rows to its session, in runs.
    fn send(&self, entry: &Entry, rows: &[f32]) -> Vec<Reply> {
        let (width, phase) = (self.ends.stage().width(), entry.phase);
        let first_state = entry.rows() - entry.state_rows().len();
        let mut start = 0;
        let run = |values: &[f32]| {
            let (position, count) = (entry.position + start, values.len() / width);
            let state_rows = (start + count).saturating_sub(start.max(first_state));
            start += count;
            let (reply, received) = JobReply::new(Some(&self.replied));
            let takes_logits = entry.takes_logits() && state_rows > 0;
            let job = Job { position, phase, rows: values.to_vec(), state_rows, takes_logits, reply };
            // A session that is not there any more drops the reply, which the step finds out.
            self.sessions.get(&entry.session).map(|jobs| jobs.send(job));
            Reply::new(received)
        };
        rows.chunks(self.context.rows_max * width).map(run).collect()
    }

    /// The oldest step whose results are there, if none before it has a session of it: chains are independent.
    fn first_done(&mut self) -> Option<usize> {
        let done: Vec<bool> = self.flights.iter_mut().map(|flight| flight.is_done(&self.sessions)).collect();
        let may_overtake =
            |index: usize| self.flights.range(..index).all(|older| !older.shares_session(&self.flights[index]));
        (0..self.flights.len()).find(|&index| done[index] && may_overtake(index))
    }

    /// Collects a step. False if peers are looked for after about `wait`; a step that is only slow is waited for.
    fn poll(&mut self, output: &mut StepOutput, wait: Duration) -> Result<bool, ExecutorError> {
        let started = Instant::now();
        loop {
            let count = self.replied.count();
            let index = if self.flights.is_empty() { Some(0) } else { self.first_done() };
            if let Some(index) = index {
                return self.collect_at(index, output).map(|()| true);
            }
            if started.elapsed() >= wait && self.context.missing().is_some() {
                return Ok(false);
            }
            self.replied.wait(count, wait.min(REPLY_WAIT));
        }
    }

    fn collect_at(&mut self, index: usize, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        self.check()?;
        let Some(Flight { plan, replies }) = self.flights.remove(index) else {
            return Err(ExecutorError::NoStepInFlight);
        };
        self.states.clear();
        self.without_states.clear();
        let mut preempted = Vec::new();
        for (index, (entry, replies)) in plan.entries().iter().zip(replies).enumerate() {
            match self.gather(index, entry, replies) {
                Ok(true) => {}
                Ok(false) => preempted.push(entry.session),
                Err(error) => return Err(error),
            }
        }
        match self.ends.finish_without(&plan, &self.states, &self.without_states, output) {
            Ok(()) => {
                (output.preempted, output.overtaken) = (preempted, index);
                Ok(())
            }
            Err(error) => Err(self.lose(error.to_string().into(), None)),
        }
    }

    fn is_possible(&self) -> Result<(), RouteError> {
        self.context.plan(READY_TOKENS.min(self.ends.capacity().tokens_max())).map(drop)
    }

    /// Waits for the outputs of an entry. False if its session has ended, because the peers that are left have no room for it beside
    /// others, or because it has to be begun again.
    fn gather(&mut self, index: usize, entry: &Entry, replies: Vec<Reply>) -> Result<bool, ExecutorError> {
        // Nobody waits for a session that was closed: its rows keep their places.
        let is_closed = !self.sessions.contains_key(&entry.session);
        let mut is_preempted = false;
        let end = self.states.len() + entry.state_rows().len() * self.ends.stage().width();
        let mut without = None;
        for reply in replies {
            if is_closed {
                continue;
            }
            match reply.take() {
                Ok(Ok(JobOutput::States(states))) => self.states.extend_from_slice(&states),
                Ok(Ok(JobOutput::Logits(logits))) => without = Some(Some(logits)),
                Ok(Ok(JobOutput::NoStates)) => without = Some(None),
                Ok(Err(loss)) if loss.kind == LossKind::Restart => is_preempted = true,
                Ok(Err(loss)) if loss.kind == LossKind::NoRoom && self.sessions.len() > 1 => is_preempted = true,
                Ok(Err(loss)) => return Err(self.lose_session(loss)),
                Err(_) => return Err(self.lose(SESSION_ENDED.into(), None)),
            }
        }
        if is_closed || is_preempted || without.is_some() {
            self.states.resize(end, 0.0);
        }
        if is_preempted {
            self.close(entry.session);
        } else {
            self.without_states.extend(without.map(|logits| EntryWithoutStates { entry: index, logits }));
        }
        Ok(!is_preempted)
    }
}

impl<B: Backend> Executor for SwarmExecutor<B> {
    fn depth(&self) -> usize {
        DEPTH
    }

    fn capacity(&self) -> Capacity {
        self.ends.capacity()
    }

    fn open(&mut self, tokens_max: usize, _: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.check()?;
        // Peers share nothing between sessions, so nothing is found.
        let opened = self.ends.open(tokens_max, Prefix { tokens: &[], pages: &[], reuse_max: 0 })?;
        match self.form(tokens_max) {
            Ok(jobs) => {
                self.sessions.insert(opened.session, jobs);
                Ok(opened)
            }
            Err(error) => {
                if !error.is_lost() {
                    self.ends.close(opened.session);
                }
                Err(error)
            }
        }
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.check()?;
        // Peers learn of it by the position of the next rows.
        self.ends.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        if self.sessions.remove(&session).is_some() {
            self.ends.close(session);
        }
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.check()?;
        if self.flights.len() == DEPTH {
            return Err(ExecutorError::PipelineFull { depth: DEPTH });
        }
        self.ends.start(plan, &mut self.activations)?;
        let width = self.ends.stage().width();
        let (mut rest, mut replies) = (self.activations.as_slice(), Vec::with_capacity(plan.entries().len()));
        for entry in plan.entries() {
            let (rows, others) = rest.split_at(entry.rows() * width);
            rest = others;
            replies.push(self.send(entry, rows));
        }
        self.flights.push_back(Flight { plan: plan.clone(), replies });
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        while !self.poll(output, Duration::MAX)? {}
        Ok(())
    }

    fn poll_collect(&mut self, output: &mut StepOutput, wait: Duration) -> Result<bool, ExecutorError> {
        self.poll(output, wait)
    }

    fn missing(&self) -> Option<MissingLayers> {
        match &self.lost {
            Some(loss) => loss.missing.clone(),
            None => self.context.missing(),
        }
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.context.drop_unused_links();
        let Some(Loss { why, is_reported, .. }) = &mut self.lost else { return Health::Ready };
        let why = Arc::clone(why);
        if !std::mem::replace(is_reported, true) {
            return Health::Rebuilding { why };
        }
        match self.is_possible() {
            Ok(()) => {
                self.lost = None;
                Health::Ready
            }
            Err(_) => {
                std::thread::sleep(wait.min(Duration::from_millis(100)));
                Health::Rebuilding { why }
            }
        }
    }
}
