//! One session of a client: a task that forms a chain, has it run jobs, and replaces spans that fail.

mod checking;
mod planning;
mod search;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet, VecDeque};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc as sync};
use std::time::{Duration, Instant};

use directory::{ChainSpan, Offence, PeerId};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{debug, info};
use types::LayerRange;

use super::avoided::{AvoidedPeers, FAILED_FEEDS_MAX};
use super::context::{ClientContext, SpanReport, lock};
use super::forming::{FormedSpans, OpenSpan, form};
use super::job::{Job, JobReply};
use super::link::{SpanEvent, SpanLoss};
use super::replay_budget::ReplayShare;
use super::session_state::{Action, JobOutput, LossReason, SessionState, SpanId};
use super::times::JobTimes;
use crate::wire::Returned;
use search::SessionSearch;

pub(super) use checking::random;

/// How often a session looks for replies that are late.
const TICK: Duration = Duration::from_millis(50);
/// After so long without a tick this process stood still.
const STOOD_STILL: Duration = Duration::from_secs(1);
/// How long a session keeps a chain on which nothing is run.
const UNUSED_MAX: Duration = Duration::from_secs(60);
/// Spot checks of one session that run at once.
const CHECKS_MAX: usize = 1;

/// A job that is not done.
struct WaitingJob {
    /// The end of its rows.
    end: usize,
    rows: usize,
    times: JobTimes,
    reply: JobReply,
}

/// Why a session has ended.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{why}")]
pub(super) struct SessionLoss {
    pub why: Arc<str>,
    pub kind: LossKind,
    /// The layers without a peer, and since when one was looked for.
    pub layers: LayerRange,
    pub since: Instant,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LossKind {
    NoChain,
    /// There are peers for all layers, and they have no room.
    NoRoom,
    /// It has to be begun again from its tokens: what it has is wrong, or was dropped.
    Restart,
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
    /// Set while a chain is looked for, or one that was found has not run anything yet.
    search: Option<SessionSearch>,
    share: ReplayShare,
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
        part: CheckedPart,
        formed: Option<sync::Sender<Result<(), SessionLoss>>>,
        jobs: mpsc::UnboundedReceiver<Job>,
    ) {
        let (events, received) = mpsc::unbounded_channel();
        context.counters.sessions.fetch_add(1, Ordering::Relaxed);
        let mut session = Self::new(context, tokens_max, part, events);
        session.serve(formed, jobs, received).await;
        session.context.counters.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    fn new(
        context: Arc<ClientContext>,
        tokens_max: usize,
        CheckedPart { range, outer, excluded, used }: CheckedPart,
        events: mpsc::UnboundedSender<(SpanId, SpanEvent)>,
    ) -> Self {
        let mut state = SessionState::new(range.start(), [context.hidden, context.vocab], context.options.encoding);
        if used.is_none() && context.options.verify > 0.0 {
            state.keep_outputs();
        }
        Self {
            share: context.replay.share(),
            context,
            tokens_max,
            range,
            outer,
            avoided: AvoidedPeers::new(excluded),
            search: None,
            state,
            spans: Vec::new(),
            has_had_chain: false,
            waiting: HashMap::new(),
            used,
            checks: Arc::new(Semaphore::new(CHECKS_MAX)),
            events,
        }
    }

    async fn serve(
        &mut self,
        formed: Option<sync::Sender<Result<(), SessionLoss>>>,
        mut jobs: mpsc::UnboundedReceiver<Job>,
        mut events: mpsc::UnboundedReceiver<(SpanId, SpanEvent)>,
    ) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut lost, mut ticked) = (VecDeque::new(), Instant::now());
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
                biased;
                // What has come is never late.
                Some((span, event)) = events.recv() => self.handle(span, event, &mut lost),
                job = jobs.recv() => match job {
                    Some(job) => {
                        is_used = true;
                        self.add(job);
                    }
                    None => return,
                },
                () = &mut unused, if !is_used => return,
                () = self.share.asked() => self.drop_kept(),
                _ = ticks.tick() => {
                    let now = Instant::now();
                    self.tick(now, now.saturating_duration_since(ticked), &mut events, &mut lost);
                    ticked = now;
                }
            }
            if let Some(loss) = self.act(&mut lost) {
                ended = Some(loss);
                break;
            }
            while let Some((span, loss)) = lost.pop_front() {
                let Some(layers) = self.lose(span, &loss) else { continue };
                if loss == SpanLoss::Wrong || !self.state.can_replay(layers.start()) {
                    ended = Some(self.restart(layers, &loss.to_string()));
                    break;
                }
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
                ticked = Instant::now();
                ended = self.act(&mut lost);
                if ended.is_some() {
                    break;
                }
            }
            if self.share.set(self.state.kept_bytes()) {
                self.drop_kept();
            }
        }
        let Some(loss) = ended else { return };
        match loss.kind {
            LossKind::Restart => info!(%loss, "a session is begun again"),
            _ => info!(%loss, "a session found no chain"),
        }
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
                let (fed, had_replied) = (self.state.fed(), self.state.has_replied(id));
                self.state.returned(id, returned);
                // It does something.
                if !had_replied && self.state.has_replied(id) {
                    self.search = None;
                }
                if self.state.fed() != fed {
                    self.report_chain();
                }
            }
            SpanEvent::Ended(loss) => lost.push_back((id, loss)),
        }
    }

    /// Looks for replies that are late, after those that have come. `stood`: since the last tick.
    fn tick(
        &mut self,
        now: Instant,
        stood: Duration,
        events: &mut mpsc::UnboundedReceiver<(SpanId, SpanEvent)>,
        lost: &mut VecDeque<(SpanId, SpanLoss)>,
    ) {
        while let Ok((span, event)) = events.try_recv() {
            self.handle(span, event, lost);
        }
        // Replies may have come that nobody has read.
        if stood > STOOD_STILL {
            self.state.postpone(stood);
        }
        self.state.check_deadlines(now);
    }

    /// Takes the times of a reply. Chains are planned with the client's own.
    fn record(&mut self, id: SpanId, returned: &Returned) {
        let Some((_, span)) = self.spans.iter().find(|(known, _)| *known == id) else { return };
        if returned.states.rows == 1
            && !self.is_check()
            && let Some(waited) = self.state.waited(id, returned.run, Instant::now())
        {
            // A fed span's rows did not come from here.
            let way = self.context.round_trip(&span.peer).filter(|_| !self.state.is_fed(id)).unwrap_or_default();
            self.context.add_layer_time(span.peer, span.layers, waited.saturating_sub(way));
        }
        if !self.is_check() {
            let job = self.state.job_of(id, returned.run);
            let job = job.and_then(|job| self.waiting.get_mut(&job)).map(|job| &mut job.times);
            self.context.times.record_reply(span.peer, returned, job);
        }
    }

    /// Drops what is only kept for replays and checks.
    fn drop_kept(&mut self) {
        let before = self.state.kept_bytes();
        self.state.drop_kept();
        let bytes = self.state.kept_bytes();
        self.share.dropped(bytes);
        if bytes < before {
            debug!(bytes = before - bytes, "rows of a session are not kept any more");
            self.context.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The session ends, to be begun again from its tokens.
    fn restart(&self, layers: LayerRange, why: &str) -> SessionLoss {
        SessionLoss { why: why.into(), kind: LossKind::Restart, layers, since: Instant::now() }
    }

    /// Whether its rows may be in a step, for which other sessions of the client wait.
    pub(super) fn is_in_the_way(&self) -> bool {
        !self.is_check() && self.has_had_chain && self.context.counters.sessions.load(Ordering::Relaxed) > 1
    }

    /// Whether this session recomputes what another peer returned.
    pub(super) fn is_check(&self) -> bool {
        self.used.is_some()
    }

    /// Carries out what the state wants. Returns why the session cannot go on.
    fn act(&mut self, lost: &mut VecDeque<(SpanId, SpanLoss)>) -> Option<SessionLoss> {
        let mut ended = None;
        for action in self.state.take_actions() {
            match action {
                Action::Unreplayable => {
                    ended = Some(self.restart(self.range, "rows that were needed again were not kept"));
                }
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
                    self.check_some(job.end, job.rows);
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
        ended
    }

    fn span_mut(&mut self, id: SpanId) -> Option<&mut OpenSpan> {
        self.spans.iter_mut().find(|(known, _)| *known == id).map(|(_, span)| span)
    }

    /// Closes a span, and remembers why. Returns its layers, unless it has been replaced already.
    fn lose(&mut self, id: SpanId, loss: &SpanLoss) -> Option<LayerRange> {
        let index = self.spans.iter().position(|(known, _)| *known == id)?;
        let (_, span) = self.spans.remove(index);
        let (now, peer) = (Instant::now(), self.context.peer_name(&span.peer));
        info!(peer, layers = %span.layers, %loss, "a span of a chain is replaced");
        if self.state.has_replied(id) {
            self.search = None;
        }
        let since = self.state.owes_since(id).filter(|_| loss.is_silence()).unwrap_or(now);
        self.note_failure(span.peer, loss, since);
        let before = self.spans.iter().find(|(_, before)| before.layers.meets(span.layers));
        let feeder = before.map(|(_, before)| before.peer).filter(|_| self.state.is_fed(id));
        match (loss, feeder) {
            // It may have computed right from wrong rows that were passed on to it.
            (SpanLoss::Wrong, Some(feeder)) => {
                [span.peer, feeder].iter().for_each(|peer| self.context.view.report(*peer, Offence::Malformed));
                self.avoided.add_failed_feeds(feeder, FAILED_FEEDS_MAX, now);
            }
            (SpanLoss::Failed { .. }, Some(feeder)) => {
                self.context.report(span.peer, loss);
                self.avoided.add_failed_feeds(feeder, 1, now);
            }
            _ => self.context.report(span.peer, loss),
        }
        self.waiting.values_mut().for_each(|job| job.times.disturb());
        match loss {
            // A session that only has to be begun again may be at the same peer.
            SpanLoss::Replay => {}
            loss if loss.is_busy() => self.avoided.add_busy(span.peer, now),
            _ => self.avoided.add(span.peer, now),
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
        let now = Instant::now();
        self.note_failure(peer, loss, now);
        self.context.report_refusal(peer, loss);
        match loss.is_busy() {
            true => self.avoided.add_busy(peer, now),
            false => self.avoided.add(peer, now),
        }
    }

    /// Whether a peer may pass rows on.
    pub(super) fn may_feed(&self, peer: &PeerId) -> bool {
        self.avoided.may_feed(peer, Instant::now())
    }
}
