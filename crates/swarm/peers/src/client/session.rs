//! One session of a client: a task that forms a chain, has it run jobs, and replaces spans that fail.

use std::collections::{HashMap, HashSet, VecDeque};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc as sync};
use std::time::{Duration, Instant};

use engine::Phase;
use swarm::{ChainSpan, Offence, PeerChain, PeerId};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, info};
use types::LayerRange;

use super::avoided::{AvoidedPeers, FAILED_FEEDS_MAX};
use super::check::Check;
use super::context::{ClientContext, SpanReport, lock};
use super::forming::{FormedSpans, OpenSpan, form};
use super::link::{SpanEvent, SpanLoss};
use super::session_state::{Action, JobOutput, LossReason, SessionState, SpanId};
use super::times::JobTimes;
use crate::wire::{FailureKind, Returned};

/// How often a session looks for replies that are late.
const TICK: Duration = Duration::from_millis(50);
/// How long a session keeps a chain on which nothing is run.
const UNUSED_MAX: Duration = Duration::from_secs(60);
/// Spot checks of one session that run at once.
const CHECKS_MAX: usize = 1;

/// Rows that are to be run.
pub(super) struct Job {
    pub position: usize,
    pub phase: Phase,
    pub rows: Vec<f32>,
    pub state_rows: usize,
    /// The logits of the last row serve as well as its state, which is the only one that is needed.
    pub takes_logits: bool,
    pub reply: JobReply,
}

pub(super) type JobReply = sync::Sender<Result<JobOutput, SessionLoss>>;

/// A job that is not done.
struct WaitingJob {
    /// The end of its rows.
    end: usize,
    rows: usize,
    times: JobTimes,
    reply: JobReply,
}

/// No chain could be had.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub(super) struct SessionLoss {
    pub why: Arc<str>,
    /// There are peers for all layers, and they have no room.
    pub is_full: bool,
    /// The layers without a peer, and since when one was looked for.
    pub layers: LayerRange,
    pub since: Instant,
}

/// Layers of a chain that are computed again, without some peers.
pub(super) struct CheckedPart {
    pub range: LayerRange,
    /// The spans before and after the range.
    pub outer: [Vec<ChainSpan>; 2],
    pub excluded: HashSet<PeerId>,
    /// The peers that were used, for whoever wants to know.
    pub used: Option<Arc<Mutex<Vec<PeerId>>>>,
}

pub(super) struct Session {
    context: Arc<ClientContext>,
    tokens_max: usize,
    /// What the session runs: all layers, or a part of them for a check.
    range: LayerRange,
    /// The spans before and after the range, in a check.
    outer: [Vec<ChainSpan>; 2],
    avoided: AvoidedPeers,
    state: SessionState,
    spans: Vec<(SpanId, OpenSpan)>,
    has_had_chain: bool,
    waiting: HashMap<u64, WaitingJob>,
    /// The peers that were used, for whoever wants to know.
    used: Option<Arc<Mutex<Vec<PeerId>>>>,
    checks: Arc<Semaphore>,
    events: mpsc::UnboundedSender<(SpanId, SpanEvent)>,
}

impl Session {
    /// A session for all layers of the model. Jobs come until their sender is dropped. `formed` learns whether there is a chain.
    pub async fn run(
        context: Arc<ClientContext>,
        tokens_max: usize,
        formed: sync::Sender<Result<(), SessionLoss>>,
        jobs: mpsc::UnboundedReceiver<Job>,
    ) {
        let layers = u32::try_from(context.layers).ok().and_then(|layers| LayerRange::new(0, layers));
        let Some(range) = layers else { return };
        let checked = CheckedPart { range, outer: [Vec::new(), Vec::new()], excluded: HashSet::new(), used: None };
        Self::run_part(context, tokens_max, checked, Some(formed), jobs).await;
    }

    /// A session that recomputes what another peer returned.
    pub async fn run_check(
        context: Arc<ClientContext>,
        tokens_max: usize,
        part: CheckedPart,
        jobs: mpsc::UnboundedReceiver<Job>,
    ) {
        Self::run_part(context, tokens_max, part, None, jobs).await;
    }

    async fn run_part(
        context: Arc<ClientContext>,
        tokens_max: usize,
        CheckedPart { range, outer, excluded, used }: CheckedPart,
        formed: Option<sync::Sender<Result<(), SessionLoss>>>,
        jobs: mpsc::UnboundedReceiver<Job>,
    ) {
        let (events, received) = mpsc::unbounded_channel();
        let state = SessionState::new(range.start(), [context.hidden, context.vocab], context.options.encoding);
        context.counters.sessions.fetch_add(1, Ordering::Relaxed);
        let mut session = Self {
            context,
            tokens_max,
            range,
            outer,
            avoided: AvoidedPeers::new(excluded),
            state,
            spans: Vec::new(),
            has_had_chain: false,
            waiting: HashMap::new(),
            used,
            checks: Arc::new(Semaphore::new(CHECKS_MAX)),
            events,
        };
        session.serve(formed, jobs, received).await;
        session.context.counters.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    async fn serve(
        &mut self,
        formed: Option<sync::Sender<Result<(), SessionLoss>>>,
        mut jobs: mpsc::UnboundedReceiver<Job>,
        mut events: mpsc::UnboundedReceiver<(SpanId, SpanEvent)>,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut lost = VecDeque::new();
        // Jobs wait; their sender may be dropped meanwhile.
        let mut early = Vec::new();
        let first = {
            let mut forming = pin!(self.form(self.range));
            loop {
                tokio::select! {
                    first = &mut forming => break first,
                    job = jobs.recv() => match job {
                        Some(job) => early.push(job),
                        None => return,
                    },
                }
            }
        };
        if let Some(formed) = formed {
            // An error means that nobody wants the session any more, which the channel of jobs tells too.
            let _ = formed.send(first.clone());
        }
        let mut ended = first.err();
        let mut is_used = !early.is_empty();
        early.into_iter().for_each(|job| self.add(job));
        let mut unused = pin!(sleep(UNUSED_MAX));
        while ended.is_none() {
            tokio::select! {
                job = jobs.recv() => match job {
                    Some(job) => {
                        is_used = true;
                        self.add(job);
                    }
                    None => return,
                },
                () = &mut unused, if !is_used => return,
                Some((span, event)) = events.recv() => self.handle(span, event, &mut lost),
                _ = ticks.tick() => self.state.check_deadlines(Instant::now()),
            }
            self.act(&mut lost);
            while let Some((span, loss)) = lost.pop_front() {
                let Some(layers) = self.lose(span, &loss) else { continue };
                let began = Instant::now();
                let mut early = Vec::new();
                let formed = {
                    let mut forming = pin!(self.form(layers));
                    loop {
                        tokio::select! {
                            formed = &mut forming => break formed,
                            job = jobs.recv() => match job {
                                Some(job) => early.push(job),
                                // Nobody wants the session any more.
                                None => return,
                            },
                        }
                    }
                };
                early.into_iter().for_each(|job| self.add(job));
                if let Err(loss) = formed {
                    ended = Some(loss);
                    break;
                }
                self.context.times.record_replacing(began.elapsed());
                self.context.counters.replaced.fetch_add(1, Ordering::Relaxed);
                self.act(&mut lost);
            }
        }
        let Some(loss) = ended else { return };
        info!(%loss, "a session found no chain");
        // The spans are closed, and everything that was asked gets an answer.
        self.spans.clear();
        self.waiting.drain().for_each(|(_, job)| drop(job.reply.send(Err(loss.clone()))));
        while let Some(job) = jobs.recv().await {
            let _ = job.reply.send(Err(loss.clone()));
        }
    }

    fn add(&mut self, job: Job) {
        let Job { position, phase, rows, state_rows, takes_logits, reply } = job;
        let count = rows.len() / self.context.hidden;
        let number = self.state.add_job(position, phase, &rows, state_rows, takes_logits);
        let times = JobTimes::new(Instant::now());
        self.waiting.insert(number, WaitingJob { end: position + count, rows: count, times, reply });
    }

    fn handle(&mut self, id: SpanId, event: SpanEvent, lost: &mut VecDeque<(SpanId, SpanLoss)>) {
        match event {
            SpanEvent::Returned(returned) => {
                self.record(id, &returned);
                let fed = self.state.fed();
                self.state.returned(id, returned);
                if self.state.fed() != fed {
                    self.report_chain();
                }
            }
            SpanEvent::Ended(loss) => lost.push_back((id, loss)),
        }
    }

    /// Takes the times of a reply.
    fn record(&mut self, id: SpanId, returned: &Returned) {
        let Some((_, span)) = self.spans.iter().find(|(known, _)| *known == id) else { return };
        if returned.states.rows == 1 {
            let time = returned.compute / u32::try_from(span.layers.count()).unwrap_or(1);
            self.context.view.add_layer_time(span.peer, time);
        }
        if !self.is_check() {
            let job = self.state.job_of(id, returned.run);
            let job = job.and_then(|job| self.waiting.get_mut(&job)).map(|job| &mut job.times);
            self.context.times.record_reply(span.peer, returned, job);
        }
    }

    /// Whether its rows may be in a step, for which other sessions of the client wait.
    pub(super) fn is_in_the_way(&self) -> bool {
        !self.is_check() && self.has_had_chain && self.context.counters.sessions.load(Ordering::Relaxed) > 1
    }

    /// Whether this session recomputes what another peer returned.
    pub(super) fn is_check(&self) -> bool {
        self.used.is_some()
    }

    fn act(&mut self, lost: &mut VecDeque<(SpanId, SpanLoss)>) {
        for action in self.state.take_actions() {
            match action {
                Action::Expect { from, run, rows } => {
                    if let Some(span) = self.span_mut(from) {
                        span.session.expect(run, rows);
                    }
                }
                Action::Send { to, run } => {
                    if let Some((_, span)) = self.spans.iter().find(|(id, _)| *id == to) {
                        if !self.is_check() {
                            self.context.times.record_sent(span.peer, &run);
                        }
                        span.session.run(run);
                    }
                }
                Action::Unfeed { before, span } => {
                    if let Some(before) = self.span_mut(before) {
                        debug!(peer = %before.peer, "rows that it passed on did not arrive");
                        before.route(before.accepts, None);
                    }
                    // Rows that are late must not come between those that the client sends.
                    if let Some(span) = self.span_mut(span) {
                        let next = span.next.clone();
                        span.route(None, next);
                    }
                    self.report_chain();
                }
                Action::Done { job, output } => {
                    let Some(job) = self.waiting.remove(&job) else { continue };
                    if !self.is_check() {
                        self.context.times.record_step(&job.times, Instant::now());
                    }
                    self.check_some(&job, &output);
                    // An error means that the engine has dropped the step.
                    let _ = job.reply.send(Ok(output));
                }
                Action::Discarded { job, state_rows } => {
                    let zeros = JobOutput::States(vec![0.0; state_rows * self.context.hidden]);
                    self.waiting.remove(&job).map(|job| job.reply.send(Ok(zeros)));
                }
                Action::Lost { span, why } => {
                    let loss = match why {
                        LossReason::Silent => SpanLoss::Late,
                        LossReason::Malformed => SpanLoss::Malformed { why: "activations".into() },
                    };
                    lost.push_back((span, loss));
                }
            }
        }
    }

    fn span_mut(&mut self, id: SpanId) -> Option<&mut OpenSpan> {
        self.spans.iter_mut().find(|(known, _)| *known == id).map(|(_, span)| span)
    }

    /// Has a part of the jobs checked, each at one span.
    fn check_some(&self, job: &WaitingJob, output: &JobOutput) {
        let context = &self.context;
        if self.is_check() || context.options.verify <= 0.0 || random() >= context.options.verify {
            return;
        }
        let index = (random() * self.spans.len() as f64) as usize;
        let (Some((id, span)), Ok(permit)) = (self.spans.get(index), Arc::clone(&self.checks).try_acquire_owned())
        else {
            return;
        };
        let after = match (index + 1 == self.spans.len(), output) {
            (true, JobOutput::States(states)) => states.clone(),
            // Others return states, which are not comparable with logits.
            (true, _) => return,
            (false, _) => {
                let Some((rows, _)) = self.state.rows_before_layer(span.layers.end(), job.end) else { return };
                rows[(job.end - job.rows) * context.hidden..].to_vec()
            }
        };
        let before = self.state.rows_before_layer(span.layers.start(), job.end).filter(|_| !after.is_empty());
        let Some((before, phases)) = before else { return };
        let spans = |spans: &[(SpanId, OpenSpan)]| -> Vec<ChainSpan> {
            spans.iter().map(|(_, span)| ChainSpan { peer: span.peer, layers: span.layers }).collect()
        };
        let check = Check {
            span: *id,
            peer: span.peer,
            layers: span.layers,
            outer: [spans(&self.spans[..index]), spans(&self.spans[index + 1..])],
            before: before.to_vec(),
            phases: phases.to_vec(),
            after,
            events: self.events.clone(),
        };
        let context = Arc::clone(context);
        tokio::spawn(async move {
            check.run(context).await;
            drop(permit);
        });
    }

    /// Closes a span, and remembers why. Returns its layers, unless it has been replaced already.
    fn lose(&mut self, id: SpanId, loss: &SpanLoss) -> Option<LayerRange> {
        let index = self.spans.iter().position(|(known, _)| *known == id)?;
        let (_, span) = self.spans.remove(index);
        info!(peer = %span.peer, layers = %span.layers, %loss, "a span of a chain is replaced");
        let before = self.spans.iter().find(|(_, before)| before.layers.meets(span.layers));
        let feeder = before.map(|(_, before)| before.peer).filter(|_| self.state.is_fed(id));
        match (loss, feeder) {
            // It may have computed right from wrong rows that were passed on to it.
            (SpanLoss::Wrong, Some(feeder)) => {
                [span.peer, feeder].iter().for_each(|peer| self.context.view.report(*peer, Offence::Malformed));
                self.avoided.add_failed_feeds(feeder, FAILED_FEEDS_MAX);
            }
            (SpanLoss::Failed { .. }, Some(feeder)) => {
                self.context.report(span.peer, loss);
                self.avoided.add_failed_feeds(feeder, 1);
            }
            _ => self.context.report(span.peer, loss),
        }
        self.waiting.values_mut().for_each(|job| job.times.disturb());
        // A session that only has to be begun again may be at the same peer.
        if *loss != SpanLoss::Replay {
            self.avoided.add(span.peer);
        }
        Some(span.layers)
    }

    /// Opens spans for these layers, which have none, and gives them to the state.
    async fn form(&mut self, layers: LayerRange) -> Result<(), SessionLoss> {
        let (before, after): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.spans).into_iter().partition(|(_, span)| span.layers.end() <= layers.start());
        let formed = form(self, layers, &before, &after).await;
        self.spans = before;
        let at = self.spans.len();
        self.spans.extend(after);
        let FormedSpans { opened, new, previous, following, after_fed_by } = formed?;
        // The peers around learn where rows come from and go to now.
        if let (Some(index), Some(next)) = (at.checked_sub(1), previous) {
            let span = &mut self.spans[index].1;
            span.route(span.accepts, Some(next));
        }
        // Also without a key: what the lost peer passed on must not come any more.
        if let Some((_, span)) = self.spans.get_mut(at) {
            let next = span.next.clone();
            span.route(following, next);
        }
        if let Some(used) = &self.used {
            lock(used).extend(opened.iter().map(|(_, span)| span.peer));
        }
        self.spans.splice(at..at, opened);
        self.state.replace(layers, new, after_fed_by);
        self.has_had_chain = true;
        self.context.counters.chains.fetch_add(1, Ordering::Relaxed);
        self.report_chain();
        Ok(())
    }

    fn report_chain(&self) {
        if self.range.count() == self.context.layers && !self.is_check() {
            let report = |(id, span): &(SpanId, OpenSpan)| {
                let OpenSpan { peer, layers, .. } = *span;
                let round_trip = self.context.view.round_trip(&peer);
                SpanReport { peer, layers, is_fed: self.state.is_fed(*id), round_trip }
            };
            *lock(&self.context.last_chain) = self.spans.iter().map(report).collect();
        }
    }

    pub(super) fn context(&self) -> &Arc<ClientContext> {
        &self.context
    }

    pub(super) fn tokens_max(&self) -> usize {
        self.tokens_max
    }

    pub(super) fn events(&self) -> mpsc::UnboundedSender<(SpanId, SpanEvent)> {
        self.events.clone()
    }

    /// The end of the layers that this session runs.
    pub(super) fn end(&self) -> usize {
        self.range.end()
    }

    pub(super) fn avoid(&mut self, peer: PeerId, loss: &SpanLoss) {
        debug!(%peer, %loss, "a peer did not open a session");
        self.context.report_refusal(peer, loss);
        match loss {
            SpanLoss::Failed { kind: FailureKind::WarmingUp | FailureKind::Refused, .. } => self.avoided.add_busy(peer),
            _ => self.avoided.add(peer),
        }
    }

    /// Whether a peer may pass rows on.
    pub(super) fn may_feed(&self, peer: &PeerId) -> bool {
        self.avoided.may_feed(peer)
    }

    /// Whether there is a chain without a peer.
    pub(super) fn has_other(&mut self, peer: PeerId, layers: LayerRange, around: [&[(SpanId, OpenSpan)]; 2]) -> bool {
        let [mut avoided, _] = self.avoided.now();
        avoided.insert(peer);
        self.plan_without(&avoided, layers, around).is_ok()
    }

    /// The spans for some layers of the fastest chain that has these spans around them. True if one of them is at a peer that was busy
    /// a moment ago: there are no others.
    pub(super) fn plan(
        &mut self,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<(Vec<ChainSpan>, bool), swarm::RouteError> {
        let [avoided, always] = self.avoided.now();
        match self.plan_without(&avoided, layers, around) {
            Err(_) if avoided != always => Ok((self.plan_without(&always, layers, around)?, true)),
            planned => Ok((planned?, false)),
        }
    }

    fn plan_without(
        &self,
        excluded: &HashSet<PeerId>,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<Vec<ChainSpan>, swarm::RouteError> {
        self.context.prefer_states(excluded, |excluded| self.plan_excluding(excluded, layers, around))
    }

    fn plan_excluding(
        &self,
        excluded: &HashSet<PeerId>,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<Vec<ChainSpan>, swarm::RouteError> {
        let (view, request) = (&self.context.view, self.context.request(self.tokens_max));
        let own = |spans: &[(SpanId, OpenSpan)]| -> Vec<ChainSpan> {
            spans.iter().map(|(_, span)| ChainSpan { peer: span.peer, layers: span.layers }).collect()
        };
        if layers.count() == self.context.layers && self.outer.iter().all(Vec::is_empty) {
            return Ok(view.plan(request, excluded)?.spans);
        }
        // Who had the layers does not matter: its span is replaced.
        let lost = ChainSpan { peer: PeerId::new(&[0]).expect("a byte is an id"), layers };
        let [before, after] = around.map(own);
        let spans = [&self.outer[0][..], &before, &[lost], &after, &self.outer[1]].concat();
        let chain = view.replace(request, excluded, &PeerChain { spans, token_seconds: 0.0 }, layers)?;
        let is_new = |span: &ChainSpan| span.layers.start() >= layers.start() && span.layers.end() <= layers.end();
        Ok(chain.spans.into_iter().filter(is_new).collect())
    }
}

/// Uniform in 0..1.
fn random() -> f64 {
    (engine::fresh_seed() >> 11) as f64 / (1_u64 << 53) as f64
}
