//! `Announcer`: issues the signed record of the block that this node serves.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use directory::{
    BlockRecord, BlockUse, Coordinate, ModelDigest, NEIGHBOURS_MAX, Neighbour, Reach, RecordError, ServiceState,
    SignedRecord, Speed,
};
use engine::Phase;
use libp2p_node::{Identity, InlinedKeys, NodeHandle, Reachability};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};
use types::{DType, LayerRange};

use super::Following;
use crate::block::{BlockHandle, BlockRows, Client};
use crate::view::{SwarmView, now};

/// How often a record is issued, and how long it lives.
const ISSUE: Duration = Duration::from_secs(5);
/// How often the announcer looks whether the block is being rebuilt, which it announces at once.
const LOOK: Duration = Duration::from_millis(250);
const LIFETIME_MS: u32 = 45_000;
/// Rows of the run that measures how much a block can do at once.
const BATCH_ROWS: usize = 32;
/// Runs of one row that are measured.
const SINGLE_RUNS: usize = 4;

/// The block to announce.
#[derive(Clone, Debug)]
pub struct BlockState {
    pub layers: LayerRange,
    pub state: ServiceState,
    /// `None` while its weights are loading.
    pub block: Option<BlockHandle>,
    pub block_use: BlockUse,
    pub speed: Speed,
}

/// Issues records until it is dropped.
pub struct Announcer {
    shared: Arc<Shared>,
    _issuing: Following,
}

struct Shared {
    identity: Identity,
    handle: NodeHandle,
    view: Arc<SwarmView>,
    model: ModelDigest,
    dtype: DType,
    state: Mutex<BlockState>,
    coordinate: Mutex<Coordinate>,
}

impl Announcer {
    pub fn start(
        identity: Identity,
        handle: NodeHandle,
        view: Arc<SwarmView>,
        model: ModelDigest,
        dtype: DType,
        state: BlockState,
    ) -> Self {
        let (state, coordinate) = (Mutex::new(state), Mutex::new(Coordinate::ORIGIN));
        let shared = Arc::new(Shared { identity, handle, view, model, dtype, state, coordinate });
        let issuing = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            if let Err(error) = issuing.handle.provide(&model.0).await {
                warn!(%error, "the node is found by its neighbours only");
            }
            let mut ticks = interval(LOOK);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut issued: Option<(Instant, bool)> = None;
            loop {
                ticks.tick().await;
                let is_rebuilding = issuing.is_rebuilding();
                if issued.is_none_or(|(at, was)| was != is_rebuilding || at.elapsed() >= ISSUE) {
                    issuing.issue();
                    issued = Some((Instant::now(), is_rebuilding));
                }
            }
        });
        Self { shared, _issuing: Following(task) }
    }

    /// Announces another state at once.
    pub fn set(&self, state: BlockState) {
        *lock(&self.shared.state) = state;
        self.shared.issue();
    }

    pub fn state(&self) -> BlockState {
        lock(&self.shared.state).clone()
    }
}

impl Shared {
    fn is_rebuilding(&self) -> bool {
        lock(&self.state).block.as_ref().is_some_and(|block| block.stats().is_rebuilding)
    }

    fn issue(&self) {
        self.adjust_coordinate();
        let record = self.record();
        let signed = SignedRecord::sign(record, &self.identity);
        let verified = signed.and_then(|signed| signed.verify(&InlinedKeys, now()));
        match verified.map_err(|error: RecordError| error.to_string()).map(|record| self.view.insert(record)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!(%error, "the own record is not taken"),
            Err(error) => warn!(%error, "the block cannot be announced"),
        }
    }

    fn record(&self) -> BlockRecord {
        let BlockState { layers, state, block, block_use, mut speed } = lock(&self.state).clone();
        let stats = block.map(|block| block.stats()).unwrap_or_default();
        // It takes no sessions until it is rebuilt.
        let state = if stats.is_rebuilding { ServiceState::Joining } else { state };
        speed.queue_seconds = (stats.queue.mean_s as f32).clamp(0.0, 600.0);
        let issued = now();
        let reach = match self.handle.reachability() {
            Reachability::Relayed => Reach::Relayed,
            Reachability::Direct | Reachability::Unknown => Reach::Direct,
        };
        BlockRecord {
            peer: self.handle.peer(),
            // Later than any that this peer has issued before, also if it was restarted.
            sequence: issued.0,
            issued,
            lifetime_ms: LIFETIME_MS,
            model: self.model,
            layers,
            block_use,
            dtype: self.dtype,
            state,
            reach,
            speed,
            kv_tokens_free: u32::try_from(stats.tokens_free).unwrap_or(u32::MAX).min(1 << 30),
            coordinate: Some(*lock(&self.coordinate)),
            neighbours: self.neighbours(),
        }
    }

    fn neighbours(&self) -> Vec<Neighbour> {
        let connected = self.handle.peers().into_iter();
        let mut neighbours: Vec<Neighbour> = connected
            .filter(|connected| connected.peer != self.handle.peer())
            .filter_map(|connected| {
                let round_trip_seconds = connected.round_trip?.as_secs_f32().min(60.0);
                Some(Neighbour { peer: connected.peer, round_trip_seconds })
            })
            .collect();
        neighbours.sort_by_key(|neighbour| neighbour.peer);
        neighbours.dedup_by_key(|neighbour| neighbour.peer);
        neighbours.sort_by(|a, b| a.round_trip_seconds.total_cmp(&b.round_trip_seconds));
        neighbours.truncate(NEIGHBOURS_MAX);
        neighbours
    }

    fn adjust_coordinate(&self) {
        let mut coordinate = *lock(&self.coordinate);
        for connected in self.handle.peers() {
            let known = self.view.record(&self.model, &connected.peer).and_then(|record| record.coordinate);
            if let (Some(other), Some(time)) = (known, connected.round_trip) {
                let [a, b] = [engine::fresh_seed(), engine::fresh_seed()];
                let part = |bits: u64| (bits & 0xffff) as f32 - 32768.0;
                let direction = [part(a), part(a >> 16), part(b)];
                coordinate = coordinate.adjusted(&other, time.as_secs_f32(), direction);
            }
        }
        *lock(&self.coordinate) = coordinate;
    }
}

/// Runs some rows of zeros through a block, to find out how fast it is.
pub(super) async fn measure(block: &BlockHandle, bytes_per_s: f32) -> Result<Speed, String> {
    let shape = block.shape().ok_or("the block has ended")?;
    let rows = BATCH_ROWS.min(shape.rows_max);
    let tokens = (rows + SINGLE_RUNS).min(shape.positions_max);
    let client = Client::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let mut session = block.open(client, shape.layers, tokens).await.map_err(|error| error.to_string())?;
    let mut run = async |position: usize, phase: Phase, rows: usize| {
        // Not zeros: a norm would divide by next to nothing.
        let activations = (0..rows * shape.hidden).map(|index| (index % 7) as f32 * 0.1 - 0.3).collect();
        let ran = session.run(BlockRows { position, phase, activations, state_rows: 1 }).await;
        ran.map(|ran| ran.compute.as_secs_f32()).map_err(|error| error.to_string())
    };
    // The first run brings weights into caches.
    run(0, Phase::Prefill, rows).await?;
    let batch = run(0, Phase::Prefill, rows).await?;
    let mut single = f32::INFINITY;
    for position in rows..tokens {
        single = single.min(run(position, Phase::Decode, 1).await?);
    }
    let layers = shape.layers.count() as f32;
    Ok(Speed {
        layer_seconds: (single / layers).clamp(1e-6, 60.0),
        layer_tokens_per_s: (rows as f32 * layers / batch).clamp(1e-3, 1e7),
        queue_seconds: 0.0,
        bytes_per_s,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
