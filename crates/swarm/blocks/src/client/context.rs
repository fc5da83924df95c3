//! `ClientContext`: what all sessions of a client share: the model, the links to peers, what is known of the swarm.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use directory::{ModelDigest, Offence, PeerChain, PeerId, RouteError};
use engine::MissingLayers;
use rustix::rand::GetRandomFlags;
use tracing::warn;
use types::LayerRange;

use super::foreign::ForeignPeers;
use super::forming::FORM_TIME_MAX;
use super::link::{PeerLink, SpanLoss};
use super::replay_budget::ReplayBudget;
use super::session_state::SpanId;
use super::times::ClientTimes;
use crate::dial::Dial;
use crate::view::{ChainRequest, SwarmView};
use crate::wire::{Encoding, FailureKind, PushKey};

/// What a client keeps for replays by default: rows of all sessions, before each of their spans.
pub const REPLAY_BYTES_MAX: usize = 2 << 30;
/// How long nobody asks again who could check a peer.
const UNVERIFIABLE: Duration = Duration::from_secs(60);
/// Peers that nobody can check, of which that is remembered.
const UNVERIFIABLE_MAX: usize = 1024;
/// The least time of a layer that a client believes to have measured.
const LAYER_TIME_MIN: Duration = Duration::from_micros(1);

/// How a client uses the swarm.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    pub encoding: Encoding,
    /// The client carries all activations, from peer to peer.
    pub is_star: bool,
    /// The part of the rows that other peers compute again, to check them: 0 to 1.
    pub verify: f64,
    /// Memory for replays: see [`REPLAY_BYTES_MAX`].
    pub replay_bytes_max: usize,
    /// How long a session looks for a chain that works.
    pub search_time_max: Duration,
}

impl Default for ClientOptions {
    /// Nothing is checked.
    fn default() -> Self {
        let (replay_bytes_max, search_time_max) = (REPLAY_BYTES_MAX, FORM_TIME_MAX);
        Self { encoding: Encoding::default(), is_star: false, verify: 0.0, replay_bytes_max, search_time_max }
    }
}

/// What happened, for people and for tests.
#[derive(Debug, Default)]
pub struct ClientCounters {
    /// Chains that were formed, spans that were replaced, checks that were made, and those that found a difference.
    pub chains: AtomicU64,
    pub replaced: AtomicU64,
    pub checks: AtomicU64,
    pub differences: AtomicU64,
    /// Checks in which every bit was the same.
    pub identical: AtomicU64,
    /// How often a session dropped what it kept for replays, for want of memory.
    pub dropped: AtomicU64,
    pub sessions: AtomicU64,
}

pub(super) struct ClientContext {
    pub dial: Arc<dyn Dial>,
    pub view: Arc<SwarmView>,
    pub model: ModelDigest,
    pub layers: usize,
    pub hidden: usize,
    pub vocab: usize,
    /// Rows of a run at most.
    pub rows_max: usize,
    pub options: ClientOptions,
    pub counters: Arc<ClientCounters>,
    pub times: ClientTimes,
    /// Peers with other protocols.
    pub foreign: ForeignPeers,
    pub replay: Arc<ReplayBudget>,
    /// Peers that nobody could check, and when that was found.
    unverifiable: Mutex<HashMap<PeerId, Instant>>,
    links: Mutex<HashMap<PeerId, Arc<PeerLink>>>,
    next_span: AtomicU64,
    searches: Mutex<HashMap<u64, MissingLayers>>,
    /// The chain that was formed or changed last.
    pub last_chain: Mutex<Vec<SpanReport>>,
}

/// A session that looks for peers.
pub(super) struct PeerSearch {
    context: Arc<ClientContext>,
    number: u64,
}

impl PeerSearch {
    /// An attempt failed, because nobody runs these layers.
    pub fn failed(&self, layers: LayerRange, why: &str) {
        if let Some(missing) = lock(&self.context.searches).get_mut(&self.number) {
            (missing.layers, missing.why) = (layers, why.into());
        }
    }
}

impl Drop for PeerSearch {
    fn drop(&mut self) {
        lock(&self.context.searches).remove(&self.number);
    }
}

/// A span of the chain that was formed or changed last.
#[derive(Clone, Debug)]
pub struct SpanReport {
    pub peer: PeerId,
    pub layers: LayerRange,
    /// The peer before passes its rows on to it; else they come from the client.
    pub is_fed: bool,
    pub round_trip: Option<Duration>,
}

impl ClientContext {
    pub fn new(
        dial: Arc<dyn Dial>,
        view: Arc<SwarmView>,
        model: ModelDigest,
        [layers, hidden, vocab, rows_max]: [usize; 4],
        options: ClientOptions,
        foreign: ForeignPeers,
    ) -> Self {
        let (counters, links, last_chain) = (Arc::default(), Mutex::default(), Mutex::default());
        Self {
            dial,
            view,
            model,
            layers,
            hidden,
            vocab,
            rows_max,
            options,
            counters,
            times: ClientTimes::default(),
            foreign,
            replay: ReplayBudget::new(options.replay_bytes_max),
            unverifiable: Mutex::default(),
            links,
            next_span: AtomicU64::new(1),
            searches: Mutex::default(),
            last_chain,
        }
    }

    pub fn request(&self, tokens_max: usize) -> ChainRequest {
        ChainRequest { model: self.model, layers: self.layers, tokens_max, row_bytes: self.hidden * size_of::<f32>() }
    }

    /// Plans without some peers a chain that ends in states; only if there is none, one that may end in logits.
    pub fn prefer_states<T>(
        &self,
        excluded: &HashSet<PeerId>,
        plan: impl Fn(&HashSet<PeerId>) -> Result<T, RouteError>,
    ) -> Result<T, RouteError> {
        let mut without_logits = self.foreign.with_logits();
        if without_logits.is_empty() {
            return plan(excluded);
        }
        without_logits.extend(excluded);
        plan(&without_logits).or_else(|_| plan(excluded))
    }

    /// The fastest chain for a session of so many tokens.
    pub fn plan(&self, tokens_max: usize) -> Result<PeerChain, RouteError> {
        self.prefer_states(&HashSet::new(), |excluded| self.view.plan(self.request(tokens_max), excluded))
    }

    /// The link to a peer; a new one if there is none.
    pub fn link(&self, peer: PeerId) -> Arc<PeerLink> {
        let mut links = lock(&self.links);
        links.retain(|_, link| !link.is_ended());
        let start = || PeerLink::start(Arc::clone(&self.dial), peer, self.rows_max, self.hidden);
        Arc::clone(links.entry(peer).or_insert_with(start))
    }

    /// A session looks for peers for these layers, until the value is dropped.
    pub fn search(self: &Arc<Self>, layers: LayerRange) -> PeerSearch {
        let number = self.next_span.fetch_add(1, Ordering::Relaxed);
        let missing = MissingLayers { layers, since: Instant::now(), why: "peers are looked for".into() };
        lock(&self.searches).insert(number, missing);
        PeerSearch { context: Arc::clone(self), number }
    }

    /// What the session misses that has looked for the longest time.
    pub fn missing(&self) -> Option<MissingLayers> {
        lock(&self.searches).values().min_by_key(|missing| missing.since).cloned()
    }

    /// The round trip to a peer that was measured last.
    pub fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        let of_link = lock(&self.links).get(peer).and_then(|link| link.round_trip());
        of_link.or_else(|| self.view.round_trip(peer))
    }

    /// What people call a peer: where a server without an identity is, or else its id.
    pub fn peer_name(&self, peer: &PeerId) -> String {
        self.foreign.name(peer).unwrap_or_else(|| libp2p_node::peer_text(peer))
    }

    /// A run of one row took so long at a peer, without the way there and back. What it announces as its queue is a cost of its own.
    pub fn add_layer_time(&self, peer: PeerId, layers: LayerRange, time: Duration) {
        let record = self.view.record(&self.model, &peer);
        let queue = record.map(|record| Duration::try_from_secs_f32(record.speed.queue_seconds));
        let time = time.saturating_sub(queue.and_then(Result::ok).unwrap_or_default());
        let layer = time / u32::try_from(layers.count()).unwrap_or(1);
        self.view.add_layer_time(peer, layer.max(LAYER_TIME_MIN));
    }

    /// Whether it was found a moment ago that nobody can check a peer.
    pub fn is_unverifiable(&self, peer: &PeerId, now: Instant) -> bool {
        let found = lock(&self.unverifiable).get(peer).copied();
        found.is_some_and(|found| now.saturating_duration_since(found) < UNVERIFIABLE)
    }

    /// Nobody else serves a peer's layers.
    pub fn tell_unverifiable(&self, peer: &PeerId, layers: LayerRange) {
        let mut unverifiable = lock(&self.unverifiable);
        if unverifiable.len() >= UNVERIFIABLE_MAX {
            unverifiable.clear();
        }
        if unverifiable.insert(*peer, Instant::now()).is_none() {
            let peer = self.peer_name(peer);
            warn!(peer, %layers, "what a peer returns is not verified: nobody else serves its layers");
        }
    }

    /// Drops links that no session uses.
    pub fn drop_unused_links(&self) {
        lock(&self.links).retain(|_, link| Arc::strong_count(link) > 1 && !link.is_ended());
    }

    pub fn span_id(&self) -> SpanId {
        SpanId(self.next_span.fetch_add(1, Ordering::Relaxed))
    }

    /// Remembers why a peer did not open a session. Its record promised one, whatever it says now.
    pub fn report_refusal(&self, peer: PeerId, loss: &SpanLoss) {
        match loss {
            SpanLoss::Failed { kind: FailureKind::WarmingUp | FailureKind::Misuse, .. } => {
                self.view.report(peer, Offence::Refused);
            }
            // What it has room for may be what this client's other sessions have.
            SpanLoss::Failed { kind: FailureKind::Refused, .. } if self.has_sessions_at(&peer) => {}
            _ => self.report(peer, loss),
        }
    }

    fn has_sessions_at(&self, peer: &PeerId) -> bool {
        lock(&self.links).get(peer).is_some_and(|link| Arc::strong_count(link) > 1)
    }

    /// Remembers why a peer's session has ended.
    pub fn report(&self, peer: PeerId, loss: &SpanLoss) {
        let offence = match loss {
            SpanLoss::Failed { kind: FailureKind::WarmingUp | FailureKind::Misuse, .. } | SpanLoss::Replay => return,
            SpanLoss::Failed { kind: FailureKind::Refused, .. } => Offence::Refused,
            SpanLoss::Failed { kind: FailureKind::Ended, .. } | SpanLoss::Lost { .. } => Offence::Lost,
            SpanLoss::Late => Offence::Slow,
            SpanLoss::Wrong => Offence::WrongResult,
            SpanLoss::Malformed { .. } => Offence::Malformed,
        };
        self.times.change(peer, |times| times.failures += 1);
        self.view.report(peer, offence);
    }
}

/// A key that nobody can guess; `None` if the system gives no random numbers.
pub(super) fn push_key() -> Option<PushKey> {
    let mut key = PushKey([0; 16]);
    let filled = rustix::rand::getrandom(&mut key.0, GetRandomFlags::empty()).ok()?;
    (filled == key.0.len()).then_some(key)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
