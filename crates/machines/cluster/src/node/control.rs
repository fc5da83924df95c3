//! One coordinator's connection to a node. Requests that take long run in a thread of their own, so that pings are answered
//! meanwhile. When the connection ends, the stage is freed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use net::{LastHeard, MessageError, MessageReceiver, MessageSender, MessageStream, WaitLimit};
use tracing::{info, warn};

use super::NodeShared;
#[cfg(debug_assertions)]
use super::fault::{self, FaultAction, FaultPoint};
use super::loaded_stage::{self, LoadProgress, LoadedStage};
use super::running_chain::RunningChain;
use crate::purpose::{CHAIN, CONTROL, ConnectionId, RESULTS};
use crate::wire::control::{ControlKind, ControlReply, ControlRequest, StageSpec, UNASKED, WireFault, decode, encode};
use weights::PinnedTensors;

/// How long the stages of a chain wait for each other to connect.
const LINK_DEADLINE: Duration = Duration::from_secs(10);
/// How long one connection to another node may take when the way to it is measured.
const REACH_DEADLINE: Duration = Duration::from_secs(2);
/// How often a node looks whether it has to describe itself again,
const DESCRIBE_INTERVAL: Duration = Duration::from_secs(1);
/// which it has if its memory has changed by more than one part in so many.
const MEMORY_PARTS: u64 = 8;

/// Serves a coordinator until its connection ends.
pub(super) fn serve(node: &Arc<NodeShared>, stream: MessageStream, address: SocketAddr) {
    let MessageStream { sender, receiver } = stream;
    let is_over = Arc::new(AtomicBool::new(false));
    let (work, requests) = channel();
    let waiting = Arc::<AtomicUsize>::default();
    let held = Arc::<AtomicU64>::default();
    let coordinator = receiver.last_heard();
    let session = StageSession {
        node: Arc::clone(node),
        sender: sender.clone(),
        is_over: Arc::clone(&is_over),
        waiting: Arc::clone(&waiting),
        held: Arc::clone(&held),
        coordinator,
        stage: None,
        fetched: None,
    };
    info!(%address, "a coordinator has connected");
    #[cfg(debug_assertions)]
    inject(&sender, FaultPoint::Joining);
    let why = thread::scope(|scope| {
        scope.spawn(move || session.run(&requests));
        let why = receive_all(node, &sender, receiver, (&waiting, &held), work);
        is_over.store(true, Ordering::Release);
        why
    });
    info!(%address, "the coordinator's connection has ended: {why}");
}

/// Answers what can be answered at once and passes on the rest. Returns why the connection ended.
fn receive_all(
    node: &NodeShared,
    sender: &MessageSender,
    mut receiver: MessageReceiver,
    (waiting, held): (&AtomicUsize, &AtomicU64),
    work: Sender<ControlRequest>,
) -> String {
    let limit = |kind| Some(ControlKind::parse(kind).ok()?.bytes_max());
    let (mut body, mut described) = (Vec::new(), None);
    let describe = |id, described: &mut Option<u64>| {
        let facts = node.facts(held.load(Ordering::Acquire));
        *described = Some(facts.memory_bytes);
        reply(sender, &ControlReply::Facts { id, facts })
    };
    loop {
        let request = match receiver.receive(Some(Instant::now() + DESCRIBE_INTERVAL), limit, &mut body) {
            Err(MessageError::Timeout) => {
                let memory = node.facts(held.load(Ordering::Acquire)).memory_bytes;
                let is_other = |before: u64| before.abs_diff(memory) > before.max(memory) / MEMORY_PARTS;
                if described.is_some_and(is_other)
                    && let Err(error) = describe(UNASKED, &mut described)
                {
                    return error.to_string();
                }
                continue;
            }
            Ok(Some(kind)) if kind == ControlKind::Probe as u8 => continue,
            Ok(Some(_)) => decode::<ControlRequest>(&body),
            Ok(None) => return "it left".to_owned(),
            Err(error) => return error.to_string(),
        };
        let answered = match request {
            Ok(ControlRequest::Ping { id }) => reply(sender, &ControlReply::Pong { id }),
            Ok(ControlRequest::Describe { id }) => describe(id, &mut described),
            Ok(request) => {
                waiting.fetch_add(usize::from(supersedes(&request)), Ordering::AcqRel);
                // The other thread ends after this one.
                let _ = work.send(request);
                Ok(())
            }
            Err(error) => return error.to_string(),
        };
        if let Err(error) = answered {
            return error.to_string();
        }
    }
}

/// Sends something else than the coordinator expects, if a fault says so.
#[cfg(debug_assertions)]
fn inject(sender: &MessageSender, point: FaultPoint) {
    let _ = match fault::hit_between_steps(point) {
        Some(FaultAction::Garbage) => sender.send(ControlKind::Json as u8, &[&fault::garbage()]),
        // An answer that was not asked for.
        Some(FaultAction::Lie) => {
            let loaded = ControlReply::Loaded { id: 2, weight_bytes: 1, kv_bytes: u64::MAX };
            reply(sender, &loaded)
        }
        _ => Ok(()),
    };
}

/// Whether what is being loaded or fetched is not wanted any more once this request has come.
fn supersedes(request: &ControlRequest) -> bool {
    matches!(
        request,
        ControlRequest::Load { .. }
            | ControlRequest::Fetch { .. }
            | ControlRequest::Link { .. }
            | ControlRequest::Unload { .. }
    )
}

fn reply(sender: &MessageSender, reply: &ControlReply) -> Result<(), MessageError> {
    sender.send(ControlKind::Json as u8, &[&encode(reply)])
}

/// The stage of one coordinator.
struct StageSession {
    node: Arc<NodeShared>,
    sender: MessageSender,
    /// Whether the connection has ended.
    is_over: Arc<AtomicBool>,
    /// Requests in the queue for which what is being loaded or fetched is given up.
    waiting: Arc<AtomicUsize>,
    /// The memory of its stage.
    held: Arc<AtomicU64>,
    /// Also when its weights come.
    coordinator: LastHeard,
    stage: Option<StageInUse>,
    /// Tensors that were fetched for a stage that is to come.
    fetched: Option<Arc<PinnedTensors>>,
}

enum StageInUse {
    Idle(Box<LoadedStage>),
    Running(RunningChain),
}

impl StageSession {
    fn run(mut self, requests: &Receiver<ControlRequest>) {
        for request in requests {
            self.waiting.fetch_sub(usize::from(supersedes(&request)), Ordering::AcqRel);
            let replied = match request {
                ControlRequest::Load { id, stage } => self.load(id, &stage),
                ControlRequest::Fetch { id, stage } => self.fetch(id, &stage),
                ControlRequest::Link { id, chain, index, next } => self.link(id, chain, index, next),
                ControlRequest::Reach { id, address } => self.reach(id, address),
                ControlRequest::Unload { id } => {
                    drop(self.take_stage());
                    self.held.store(0, Ordering::Release);
                    ControlReply::Unloaded { id }
                }
                ControlRequest::Ping { id } => ControlReply::Pong { id },
                ControlRequest::Describe { id } => {
                    ControlReply::Facts { id, facts: self.node.facts(self.held.load(Ordering::Acquire)) }
                }
            };
            if let ControlReply::Failed { why, .. } = &replied {
                warn!("a request of the coordinator failed: {why}");
            }
            if reply(&self.sender, &replied).is_err() {
                break;
            }
        }
        self.take_stage();
    }

    /// The stage, after its chain has ended.
    fn take_stage(&mut self) -> Option<LoadedStage> {
        let stage = match self.stage.take()? {
            StageInUse::Idle(stage) => Some(*stage),
            StageInUse::Running(chain) => chain.stop(),
        };
        self.held.store(stage.as_ref().map_or(0, LoadedStage::memory_bytes), Ordering::Release);
        stage
    }

    fn load(&mut self, id: u64, spec: &StageSpec) -> ControlReply {
        let loaded = self.take_stage().filter(|stage| stage.is(spec));
        if loaded.is_none() {
            self.held.store(0, Ordering::Release);
        }
        let mut report = |progress| self.report(id, progress);
        let stage = match loaded {
            Some(mut stage) => stage.restore(&mut report).map(|()| stage),
            None => LoadedStage::load(&self.node, spec, &self.coordinator, &mut report),
        };
        match stage {
            Ok(stage) => {
                self.held.store(stage.memory_bytes(), Ordering::Release);
                let (weight_bytes, kv_bytes) = (stage.weight_bytes(), stage.kv_bytes());
                self.fetched = None;
                self.stage = Some(StageInUse::Idle(Box::new(stage)));
                ControlReply::Loaded { id, weight_bytes, kv_bytes }
            }
            Err(why) => ControlReply::Failed { id, why },
        }
    }

    fn fetch(&mut self, id: u64, spec: &StageSpec) -> ControlReply {
        let mut report = |progress| self.report(id, progress);
        match loaded_stage::fetch(&self.node, spec, &self.coordinator, &mut report) {
            Ok(pinned) => {
                self.fetched = Some(pinned);
                ControlReply::Fetched { id }
            }
            Err(why) => ControlReply::Failed { id, why },
        }
    }

    /// Tells the coordinator how far its request is. Returns whether it still wants that.
    fn report(&self, id: u64, progress: LoadProgress) -> bool {
        let sent = match progress {
            LoadProgress::Missing { transfer, bytes } => {
                let sent = reply(&self.sender, &ControlReply::Missing { id, transfer, bytes });
                #[cfg(debug_assertions)]
                inject(&self.sender, FaultPoint::Weights);
                sent
            }
            LoadProgress::Loading { bytes, layers } => {
                reply(&self.sender, &ControlReply::Progress { id, bytes, layers })
            }
        };
        let is_superseded = self.waiting.load(Ordering::Acquire) > 0;
        sent.is_ok() && !is_superseded && !self.is_over.load(Ordering::Acquire)
    }

    fn link(&mut self, id: u64, chain: u64, index: u16, next: Option<SocketAddr>) -> ControlReply {
        let Some(mut stage) = self.take_stage() else {
            return ControlReply::Failed { id, why: "no stage is loaded".to_owned() };
        };
        stage.clear();
        let expected = &self.node.expected;
        let previous = expected.expect(ConnectionId { purpose: CHAIN, number: chain, index });
        let (next, is_last) = match next {
            None => (Err(expected.expect(ConnectionId { purpose: RESULTS, number: chain, index })), true),
            Some(address) => {
                let id_of_next = ConnectionId { purpose: CHAIN, number: chain, index: index.saturating_add(1) };
                let hello = id_of_next.hello(self.node.silence);
                let limit = WaitLimit::until(Instant::now() + LINK_DEADLINE);
                match MessageStream::connect(address, &self.node.key, &hello, &limit) {
                    Ok(stream) => (Ok(stream), false),
                    Err(error) => {
                        self.stage = Some(StageInUse::Idle(Box::new(stage)));
                        return ControlReply::Failed {
                            id,
                            why: format!("connect to the next stage at {address}: {error}"),
                        };
                    }
                }
            }
        };
        let (sender, deadline) = (self.sender.clone(), Instant::now() + LINK_DEADLINE);
        let report = move |fault: WireFault| {
            // An error means that the coordinator is gone, which ends the chain too.
            let _ = reply(&sender, &ControlReply::Fault { chain, fault });
        };
        match RunningChain::start(stage, previous, next, is_last, deadline, report) {
            Ok(running) => {
                self.stage = Some(StageInUse::Running(running));
                ControlReply::Linked { id }
            }
            Err(error) => ControlReply::Failed { id, why: format!("start a thread: {error}") },
        }
    }

    /// Measures the time to reach another node: a connection takes the round trips of TCP and of the handshake.
    fn reach(&self, id: u64, address: SocketAddr) -> ControlReply {
        let limit = WaitLimit::until(Instant::now() + REACH_DEADLINE);
        let hello = ConnectionId { purpose: CONTROL, number: 0, index: 0 }.hello(self.node.silence);
        let connected = MessageStream::connect(address, &self.node.key, &hello, &limit);
        let measured = connected.map_err(|error| error.to_string()).and_then(|stream| round_trip(stream, &limit));
        match measured {
            Ok(time) => ControlReply::RoundTrip { id, us: u64::try_from(time.as_micros()).unwrap_or(u64::MAX) },
            Err(why) => ControlReply::Failed { id, why: format!("reach {address}: {why}") },
        }
    }
}

/// The shortest of a few round trips.
fn round_trip(stream: MessageStream, limit: &WaitLimit<'_>) -> Result<Duration, String> {
    let MessageStream { sender, mut receiver } = stream;
    let (mut best, mut body) = (Duration::MAX, Vec::new());
    for id in 0..4 {
        let sent = Instant::now();
        let ping = encode(&ControlRequest::Ping { id });
        sender.send(ControlKind::Json as u8, &[&ping]).map_err(|error| error.to_string())?;
        let deadline = sent + limit.left().max(REACH_DEADLINE);
        let received =
            receiver.receive(Some(deadline), |_| Some(1 << 10), &mut body).map_err(|error| error.to_string())?;
        if received.is_none() {
            return Err("it left".to_owned());
        }
        best = best.min(sent.elapsed());
    }
    Ok(best)
}
