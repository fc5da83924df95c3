//! `BlockHost`: which block this node serves. It takes the one that the swarm needs most, or the one that it is told, and moves
//! when another one needs it clearly more.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use directory::{
    BlockUse, ModelDigest, MoveDecision, PeerCapacity, ServedBlock, ServiceState, Speed, choose_block, consider_move,
};
use engine::Executor;
use libp2p_node::Identity;
use tokio::time::sleep;
use tracing::{info, warn};
use types::{DType, LayerRange};

use super::announcer::{Announcer, BlockState, measure};
use super::{Following, SwarmNode};
use crate::block::{BlockHandle, BlockLimits, BlockShape};
use crate::view::now;

/// What a block may be before it is measured.
const SPEED_GUESS: Speed =
    Speed { layer_seconds: 0.01, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e7 };
/// How often a node looks whether there are layers that nobody serves: this time to twice of it.
const REPAIR: Duration = Duration::from_secs(5);
/// How long a node waits before it loads a block again that could not be loaded.
const RETRY: Duration = Duration::from_secs(10);
/// How often a node looks whether its block was rebuilt.
const LOOK: Duration = Duration::from_millis(500);

/// A block whose weights are loaded.
pub struct LoadedBlock {
    pub executor: Box<dyn Executor>,
    pub shape: BlockShape,
}

/// Loads blocks of the model, one after the other.
pub trait BlockLoader: Send + 'static {
    fn load(&mut self, layers: LayerRange) -> Result<LoadedBlock, String>;
}

#[derive(Clone, Debug)]
pub struct BlockHostOptions {
    pub model: ModelDigest,
    /// All layers of the model.
    pub layers: usize,
    pub dtype: DType,
    /// The block to serve; `None`: the one that the swarm needs most.
    pub fixed: Option<LayerRange>,
    /// Layers that fit into memory.
    pub layers_max: usize,
    pub limits: BlockLimits,
    /// Of this node's access to the network.
    pub bytes_per_s: f32,
    /// How long a node learns of others before it chooses a block.
    pub settle: Duration,
    /// How often it considers to move.
    pub consider: Duration,
    /// How long sessions may go on in a block that the node leaves.
    pub drain: Duration,
}

/// What a node serves, for people.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockHostState {
    Choosing,
    Loading(LayerRange),
    Serving(LayerRange),
    Draining { layers: LayerRange, next: LayerRange },
    Failed { layers: LayerRange, why: String },
}

/// Serves blocks until it is dropped.
pub struct BlockHost {
    watch: BlockHostWatch,
    _task: Following,
}

/// What a [`BlockHost`] serves, also when that has ended.
#[derive(Clone)]
pub struct BlockHostWatch {
    state: Arc<Mutex<BlockHostState>>,
    block: Arc<Mutex<Option<BlockHandle>>>,
}

impl BlockHost {
    pub fn start(
        node: SwarmNode,
        identity: Identity,
        options: BlockHostOptions,
        loader: impl BlockLoader,
        changed: impl Fn(&BlockHostState) + Send + 'static,
    ) -> Self {
        let state = Arc::new(Mutex::new(BlockHostState::Choosing));
        let block = Arc::<Mutex<Option<BlockHandle>>>::default();
        let (shared, shared_block) = (Arc::clone(&state), Arc::clone(&block));
        let set = move |new: BlockHostState| {
            changed(&new);
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = new;
        };
        let set_block =
            move |new: BlockHandle| *shared_block.lock().unwrap_or_else(PoisonError::into_inner) = Some(new);
        let task = tokio::spawn(serve(node, identity, options, Box::new(loader), set, set_block));
        Self { watch: BlockHostWatch { state, block }, _task: Following(task) }
    }

    pub fn watch(&self) -> BlockHostWatch {
        self.watch.clone()
    }
}

impl BlockHostWatch {
    pub fn state(&self) -> BlockHostState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The block that is served, or that is being loaded.
    pub fn block(&self) -> Option<BlockHandle> {
        self.block.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn serve(
    node: SwarmNode,
    identity: Identity,
    options: BlockHostOptions,
    mut loader: Box<dyn BlockLoader>,
    set: impl Fn(BlockHostState),
    set_block: impl Fn(BlockHandle),
) {
    let BlockHostOptions { model, layers: all, .. } = options;
    let _following = node.follow(Some(model));
    let own = node.handle().peer();
    let mut capacity = PeerCapacity {
        layers_max: options.layers_max.max(1),
        layer_tokens_per_s: SPEED_GUESS.layer_tokens_per_s.into(),
    };
    let mut next = options.fixed;
    if next.is_none() {
        sleep(options.settle).await;
    }
    let mut announcer: Option<Announcer> = None;
    loop {
        let chosen = next.or_else(|| choose_block(&node.view().coverage(&model, all, Some(&own)), capacity, random()));
        let Some(layers) = chosen else { return };
        set(BlockHostState::Loading(layers));
        let block = BlockHandle::warming_up();
        node.server().set_block(model, block.clone());
        set_block(block.clone());
        let joining = BlockState {
            layers,
            state: ServiceState::Joining,
            block: None,
            block_use: BlockUse::AnyRange,
            speed: Speed { bytes_per_s: options.bytes_per_s, ..SPEED_GUESS },
        };
        match &announcer {
            Some(announcer) => announcer.set(joining),
            None => {
                let (handle, view) = (node.handle().clone(), Arc::clone(node.view()));
                announcer = Some(Announcer::start(identity.clone(), handle, view, model, options.dtype, joining));
            }
        }
        let Some(announcer) = &announcer else { return };
        let loaded = tokio::task::spawn_blocking(move || {
            let loaded = loader.load(layers);
            (loader, loaded)
        });
        let Ok((again, loaded)) = loaded.await else {
            set(BlockHostState::Failed { layers, why: "the loading thread ended".to_owned() });
            return;
        };
        loader = again;
        let served = match loaded {
            Ok(LoadedBlock { executor, shape }) => {
                block.serve(executor, shape, options.limits).map(|()| shape).map_err(|error| error.to_string())
            }
            Err(why) => Err(why),
        };
        let speed = match &served {
            Ok(_) => measure(&block, options.bytes_per_s).await,
            Err(why) => Err(why.clone()),
        };
        let (shape, speed) = match (served, speed) {
            (Ok(shape), Ok(speed)) => (shape, speed),
            (_, Err(why)) | (Err(why), _) => {
                warn!(%layers, %why, "the block could not be loaded");
                set(BlockHostState::Failed { layers, why });
                sleep(RETRY).await;
                continue;
            }
        };
        capacity.layer_tokens_per_s = speed.layer_tokens_per_s.into();
        let block_use = if shape.has_parts { BlockUse::AnyRange } else { BlockUse::Whole };
        let mut serving =
            BlockState { layers, state: ServiceState::Serving, block: Some(block.clone()), block_use, speed };
        announcer.set(serving.clone());
        info!(%layers, layer_ms = speed.layer_seconds * 1e3, "the block is served");
        set(BlockHostState::Serving(layers));

        let (since, mut considered, mut rebuilds) = (now(), Instant::now(), 0);
        let to = loop {
            let time = REPAIR.min(options.consider).mul_f64(1.0 + random());
            announce_for(time, &block, announcer, &mut serving, &mut rebuilds).await;
            if options.fixed.is_some() {
                continue;
            }
            let coverage = node.view().coverage(&model, all, None);
            // Peers that came at the same time may have chosen the same layers, and a peer may have left.
            let has_gap = coverage.planned().iter().any(|tokens_per_s| *tokens_per_s <= 0.0);
            if !has_gap && considered.elapsed() < options.consider {
                continue;
            }
            considered = Instant::now();
            let decision =
                consider_move(&coverage, ServedBlock { layers, since }, capacity, now(), [random(), random()]);
            if let MoveDecision::Move(to) = decision {
                break to;
            }
        };
        info!(%layers, %to, "the node moves to layers that need it more");
        set(BlockHostState::Draining { layers, next: to });
        block.drain();
        announcer.set(BlockState { state: ServiceState::Draining { next: Some(to) }, ..serving });
        let started = Instant::now();
        while block.stats().sessions > 0 && started.elapsed() < options.drain {
            sleep(Duration::from_millis(200)).await;
        }
        // It waits for the thread that owns the weights, so that their memory is free for the next ones.
        let _ = tokio::task::spawn_blocking(move || block.close()).await;
        next = Some(to);
    }
}

/// Waits. Meanwhile a block that was rebuilt, perhaps on other machines, is measured again. `rebuilds`: how often it was rebuilt when
/// it was measured last.
async fn announce_for(
    time: Duration,
    block: &BlockHandle,
    announcer: &Announcer,
    serving: &mut BlockState,
    rebuilds: &mut u64,
) {
    let started = Instant::now();
    while started.elapsed() < time {
        sleep(LOOK.min(time)).await;
        let stats = block.stats();
        if stats.rebuilds == *rebuilds || stats.is_rebuilding {
            continue;
        }
        *rebuilds = stats.rebuilds;
        match measure(block, serving.speed.bytes_per_s).await {
            Ok(speed) => {
                serving.speed = speed;
                announcer.set(serving.clone());
                info!(layers = %serving.layers, layer_ms = speed.layer_seconds * 1e3, "the block is served again");
            }
            Err(why) => warn!(layers = %serving.layers, %why, "the block was rebuilt and could not be measured"),
        }
    }
}

/// Uniform in 0..1.
fn random() -> f64 {
    (engine::fresh_seed() >> 11) as f64 / (1_u64 << 53) as f64
}
