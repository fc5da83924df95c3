//! `PeerLink`: a client's stream to a peer, with all of its sessions there.
//!
//! A peer is silent when no byte has come for a while, although pings were sent. Then the link is lost, and all of its sessions
//! with it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use directory::PeerId;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, split};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{MissedTickBehavior, interval};

use super::foreign::{ForeignLoss, ForeignPeer};
use super::session_state::SpanId;
use crate::dial::{BoxedStream, Dial};
use crate::protocols::BLOCK_PROTOCOL;
use crate::wire::{
    FailureKind, FrameError, HIDDEN_MAX, Next, Open, PushKey, Reply, Request, Returned, Run, body_bytes_max,
    read_frame, write_frame,
};

/// Requests that wait to be sent.
const REQUESTS_WAITING_MAX: usize = 256;
const PING_INTERVAL: Duration = Duration::from_millis(500);
/// Pings whose answers count.
const PINGS_MAX: usize = 8;
/// A peer that sends nothing for so long is lost.
pub const SILENCE_MAX: Duration = Duration::from_millis(2500);
/// Replies of one session that are expected.
const EXPECTED_MAX: usize = 1024;

/// What happens to a span's session.
#[derive(Debug)]
pub(super) enum SpanEvent {
    Returned(Returned),
    /// It has ended.
    Ended(SpanLoss),
}

/// Why a session at a peer was not opened, or has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SpanLoss {
    #[error("{why}")]
    Failed { kind: FailureKind, why: String },
    #[error("the connection ended: {why}")]
    Lost { why: Arc<str> },
    #[error("it sent nonsense: {why}")]
    Malformed { why: Arc<str> },
    #[error("it did not answer in time")]
    Late,
    #[error("others compute other results")]
    Wrong,
    #[error("the rows have to be run again from the first one on")]
    Replay,
}

impl SpanLoss {
    /// The peer said that it has no room, or is not ready. Others may be better, and it may be soon.
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Failed { kind: FailureKind::WarmingUp | FailureKind::Refused, .. })
    }

    /// The peer did nothing for a while before.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::Late | Self::Failed { .. })
    }
}

/// Only what a session asked for goes in, and one end of each span, so it is as limited as what the session asks for.
type Events = mpsc::UnboundedSender<(SpanId, SpanEvent)>;

struct OpenSpan {
    id: SpanId,
    events: Events,
    opened: Option<oneshot::Sender<Result<OpenedSpan, SpanLoss>>>,
    /// Runs whose replies are expected, and how many rows these have.
    expected: BTreeMap<u64, usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct OpenedSpan {
    pub rows_max: usize,
    pub is_linked: bool,
    /// It returns the logits of a run's last row instead of states.
    pub returns_logits: bool,
}

#[derive(Default)]
struct Spans {
    open: HashMap<u64, OpenSpan>,
    next: u64,
    ended: Option<SpanLoss>,
}

pub(super) struct PeerLink {
    requests: mpsc::Sender<Request>,
    spans: Arc<Mutex<Spans>>,
    round_trip: Arc<AtomicU64>,
}

impl PeerLink {
    /// Connects in the background. Rows have `hidden` values.
    pub fn start(dial: Arc<dyn Dial>, peer: PeerId, rows_max: usize, hidden: usize) -> Arc<Self> {
        let (requests, waiting) = mpsc::channel(REQUESTS_WAITING_MAX);
        let spans = Arc::<Mutex<Spans>>::default();
        let round_trip = Arc::<AtomicU64>::default();
        let link = Arc::new(Self { requests, spans: Arc::clone(&spans), round_trip: Arc::clone(&round_trip) });
        let body_max = body_bytes_max(rows_max, hidden.min(HIDDEN_MAX));
        tokio::spawn(async move {
            let loss = match dial.open(peer, &[], BLOCK_PROTOCOL).await {
                Ok(stream) => run(stream, waiting, &spans, &round_trip, body_max).await,
                Err(error) => SpanLoss::Lost { why: error.to_string().into() },
            };
            end(&spans, &loss);
        });
        link
    }

    pub fn is_ended(&self) -> bool {
        lock(&self.spans).ended.is_some()
    }

    /// Of the last ping, in seconds.
    pub fn round_trip(&self) -> Option<Duration> {
        Some(self.round_trip.load(Ordering::Relaxed)).filter(|&us| us > 0).map(Duration::from_micros)
    }

    /// Sends a request. If the link takes no more, it ends.
    fn send(&self, request: Request) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.requests.try_send(request) {
            end(&self.spans, &SpanLoss::Lost { why: "too many requests wait".into() });
        }
    }

    /// Opens a session. `open` gets its number. Events of the session come under `id` until the session is dropped.
    pub async fn open(
        self: &Arc<Self>,
        id: SpanId,
        mut open: Open,
        events: Events,
    ) -> Result<(SpanSession, OpenedSpan), SpanLoss> {
        let (opened, answer) = oneshot::channel();
        {
            let mut spans = lock(&self.spans);
            if let Some(loss) = &spans.ended {
                return Err(loss.clone());
            }
            open.session = spans.next;
            spans.next += 1;
            spans.open.insert(open.session, OpenSpan { id, events, opened: Some(opened), expected: BTreeMap::new() });
        }
        // Closes it also if nobody waits any more.
        let session = SpanSession(Way::Link { link: Arc::clone(self), number: open.session });
        self.send(Request::Open(open));
        let opened = answer.await.unwrap_or(Err(SpanLoss::Lost { why: "the link ended".into() }))?;
        Ok((session, opened))
    }
}

/// An open session at a peer. Dropping it closes the session.
pub(super) struct SpanSession(Way);

enum Way {
    Link {
        link: Arc<PeerLink>,
        number: u64,
    },
    /// Runs go to a task that speaks another protocol.
    Foreign(mpsc::UnboundedSender<Run>),
}

impl SpanSession {
    /// A session at a peer with another protocol. Its events come under `id`.
    pub fn foreign(peer: &dyn ForeignPeer, id: SpanId, is_last: bool, events: Events) -> Self {
        let (runs, received) = mpsc::unbounded_channel();
        let (returned, mut replies) = mpsc::unbounded_channel();
        let session = peer.session(is_last, received, returned);
        tokio::spawn(async move {
            let mut session = std::pin::pin!(session);
            let loss = loop {
                tokio::select! {
                    biased;
                    Some(reply) = replies.recv() => {
                        // An error means that the session has ended.
                        if events.send((id, SpanEvent::Returned(reply))).is_err() {
                            return;
                        }
                    }
                    loss = &mut session => break loss,
                }
            };
            let loss = match loss {
                ForeignLoss::Replay => SpanLoss::Replay,
                ForeignLoss::Busy { why, is_full } => {
                    let kind = if is_full { FailureKind::Refused } else { FailureKind::WarmingUp };
                    SpanLoss::Failed { kind, why: why.to_string() }
                }
                ForeignLoss::Lost { why } => SpanLoss::Failed { kind: FailureKind::Ended, why: why.to_string() },
                ForeignLoss::Malformed { why } => SpanLoss::Malformed { why },
            };
            let _ = events.send((id, SpanEvent::Ended(loss)));
        });
        Self(Way::Foreign(runs))
    }

    pub fn run(&self, run: Run) {
        match &self.0 {
            Way::Link { link, number } => link.send(Request::Run { session: *number, run }),
            // An error means that the session has ended, and has said why.
            Way::Foreign(runs) => drop(runs.send(run)),
        }
    }

    /// A reply to this run, with so many rows, will be due. Others are dropped.
    pub fn expect(&self, run: u64, rows: usize) {
        if let Way::Link { link, number } = &self.0
            && let Some(span) = lock(&link.spans).open.get_mut(number)
        {
            span.expected.insert(run, rows);
            // A peer need not answer runs that were discarded.
            while span.expected.len() > EXPECTED_MAX {
                span.expected.pop_first();
            }
        }
    }

    /// From now on rows come and go another way. Those of foreign peers do so through the client.
    pub fn route(&self, accepts: Option<PushKey>, next: Option<Next>) {
        if let Way::Link { link, number } = &self.0 {
            link.send(Request::Route { session: *number, accepts, next });
        }
    }
}

impl Drop for SpanSession {
    fn drop(&mut self) {
        if let Way::Link { link, number } = &self.0 {
            lock(&link.spans).open.remove(number);
            link.send(Request::Close { session: *number });
        }
    }
}

async fn run(
    stream: BoxedStream,
    waiting: mpsc::Receiver<Request>,
    spans: &Mutex<Spans>,
    round_trip: &AtomicU64,
    body_max: usize,
) -> SpanLoss {
    let started = Instant::now();
    let (from, to) = split(stream);
    let (pongs, answered) = mpsc::channel(8);
    let last = Arc::new(AtomicU64::new(0));
    let from = Watched { inner: from, started, last: Arc::clone(&last) };
    tokio::select! {
        loss = receive(from, spans, body_max, &pongs) => loss,
        loss = send(waiting, to, started, &last, answered, round_trip) => loss,
    }
}

/// Sends requests, and pings in between. Ends when the peer is silent.
async fn send(
    mut waiting: mpsc::Receiver<Request>,
    mut to: impl AsyncWrite + Unpin,
    started: Instant,
    last: &AtomicU64,
    mut answered: mpsc::Receiver<u64>,
    round_trip: &AtomicU64,
) -> SpanLoss {
    let micros = || u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let is_silent = || micros().saturating_sub(last.load(Ordering::Relaxed)) > SILENCE_MAX.as_micros() as u64;
    let mut ticks = interval(PING_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut ticked = Instant::now();
    let mut body = Vec::new();
    // Their numbers cannot be guessed: a peer that answered before it was asked would seem to be near.
    let mut pings: VecDeque<(u64, Instant)> = VecDeque::new();
    loop {
        let request = tokio::select! {
            request = waiting.recv() => match request {
                Some(request) => request,
                None => return SpanLoss::Lost { why: "it is not used any more".into() },
            },
            Some(number) = answered.recv() => {
                if let Some(at) = pings.iter().position(|(ping, _)| *ping == number) {
                    let time = pings.drain(..=at).next_back().map_or(Duration::ZERO, |(_, sent)| sent.elapsed());
                    let time = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
                    round_trip.store(time.max(1), Ordering::Relaxed);
                }
                continue;
            }
            _ = ticks.tick() => {
                // This process stood still, and may have the peer's bytes unread.
                if ticked.elapsed() > 2 * PING_INTERVAL {
                    last.fetch_max(micros(), Ordering::Relaxed);
                }
                ticked = Instant::now();
                if is_silent() {
                    return SpanLoss::Lost { why: format!("it was silent for {SILENCE_MAX:?}").into() };
                }
                let number = engine::fresh_seed();
                if pings.len() == PINGS_MAX {
                    pings.pop_front();
                }
                pings.push_back((number, Instant::now()));
                Request::Ping { number }
            }
        };
        let kind = request.encode(&mut body);
        let began = Instant::now();
        if let Err(error) = write_frame(&mut to, kind, &body).await {
            return loss_of(&error);
        }
        // Nothing was asked of the peer while it took a long frame.
        if began.elapsed() > PING_INTERVAL {
            last.fetch_max(micros(), Ordering::Relaxed);
        }
    }
}

async fn receive(
    mut from: impl AsyncRead + Unpin,
    spans: &Mutex<Spans>,
    body_max: usize,
    pongs: &mpsc::Sender<u64>,
) -> SpanLoss {
    let mut body = Vec::new();
    loop {
        let reply = match read_frame(&mut from, body_max, &mut body).await {
            Ok(kind) => Reply::decode(kind, &body),
            Err(error) => return loss_of(&error),
        };
        match reply {
            Ok(Reply::Pong { number }) => drop(pongs.try_send(number)),
            Ok(Reply::Opened { session, rows_max, is_linked }) => {
                let mut spans = lock(spans);
                let opened = spans.open.get_mut(&session).and_then(|span| span.opened.take());
                // An error means that nobody waits any more.
                opened.map(|opened| opened.send(Ok(OpenedSpan { rows_max, is_linked, returns_logits: false })));
            }
            Ok(Reply::Ran { session, returned }) => {
                let mut spans = lock(spans);
                // The session may be closed by now.
                let Some(span) = spans.open.get_mut(&session) else { continue };
                // A run whose rows came twice is answered twice.
                let Some(rows) = span.expected.remove(&returned.run) else { continue };
                if returned.states.rows != rows {
                    let why = format!("{} rows instead of {rows}", returned.states.rows).into();
                    let Some(span) = spans.open.remove(&session) else { continue };
                    fail(span, &SpanLoss::Malformed { why });
                    continue;
                }
                // An error means that the session has ended.
                let _ = span.events.send((span.id, SpanEvent::Returned(returned)));
            }
            Ok(Reply::Failed { session, kind, why }) => {
                let Some(span) = lock(spans).open.remove(&session) else { continue };
                fail(span, &SpanLoss::Failed { kind, why });
            }
            Err(error) => return SpanLoss::Malformed { why: error.to_string().into() },
        }
    }
}

fn loss_of(error: &FrameError) -> SpanLoss {
    let why: Arc<str> = error.to_string().into();
    match error {
        FrameError::TooLong { .. } | FrameError::Wire(_) => SpanLoss::Malformed { why },
        FrameError::TooSlow | FrameError::Closed | FrameError::Io(_) => SpanLoss::Lost { why },
    }
}

fn end(spans: &Mutex<Spans>, loss: &SpanLoss) {
    let mut spans = lock(spans);
    spans.ended.get_or_insert_with(|| loss.clone());
    let open = std::mem::take(&mut spans.open);
    drop(spans);
    open.into_values().for_each(|span| fail(span, loss));
}

fn fail(span: OpenSpan, loss: &SpanLoss) {
    // Errors mean that nobody waits any more.
    match span.opened {
        Some(opened) => drop(opened.send(Err(loss.clone()))),
        None => drop(span.events.send((span.id, SpanEvent::Ended(loss.clone())))),
    }
}

fn lock(spans: &Mutex<Spans>) -> MutexGuard<'_, Spans> {
    spans.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes when a byte has come.
struct Watched<R> {
    inner: R,
    started: Instant,
    /// In microseconds.
    last: Arc<AtomicU64>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Watched<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        if buffer.filled().len() > before {
            let micros = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.last.store(micros, Ordering::Relaxed);
        }
        polled
    }
}
