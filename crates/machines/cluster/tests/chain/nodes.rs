//! Nodes and a coordinator on loopback: joining, planning, weights, chains, and the loss of nodes.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::loopback::{oracle_models, whole};
use cluster::chain::{Chain, ChainBuilder, FormedChain, StepTimes};
use cluster::coordinator::{
    Arithmetic, ClusterModel, ClusterModelConfig, ClusterReport, Coordinator, CoordinatorOptions, Layout, NodeState,
    ReplanOptions,
};
use cluster::node::{NoObserver, Node, NodeOptions};
use cluster::wire::control::WireFacts;
use engine::{Executor, Health};
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::{Checkpoint, Footprint, ModelPart};
use net::ClusterKey;
use plan::{NodeFacts, Optimise, Workload};
use tempfile::TempDir;
use testing::cluster_chain::answers::{answers, options, requests};
use testing::cluster_chain::{DEADLINE, OPTIONS};
use types::{LayerRange, Rank};
use weights::{HashCache, StoreLimits, TensorStore};

/// Nodes are lost when they end. A busy machine may delay their signs of life.
const SILENCE: Duration = Duration::from_secs(60);

/// Nodes do not turn slow in a test that is not about this: on a busy machine all are.
const UNOBSERVED: Duration = Duration::from_secs(3600);

pub fn key(name: &str) -> ClusterKey {
    ClusterKey::from_passphrase(&format!("a passphrase for tests: {name}")).unwrap()
}

/// A node in a thread. Dropping it ends it, as the end of its process would.
pub struct TestNode {
    pub address: SocketAddr,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestNode {
    pub fn start(name: &str, key: ClusterKey, store: &Path, memory_max: Option<u64>) -> Self {
        Self::start_with(name, key, store, memory_max, 1e9)
    }

    /// A node that says that it reads so many bytes of weights in a second.
    pub fn start_with(
        name: &str,
        key: ClusterKey,
        store: &Path,
        memory_max: Option<u64>,
        weight_bytes_per_s: f64,
    ) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), name, key, store, memory_max, weight_bytes_per_s)
    }

    pub fn start_at(
        address: SocketAddr,
        name: &str,
        key: ClusterKey,
        store: &Path,
        memory_max: Option<u64>,
        weight_bytes_per_s: f64,
    ) -> Self {
        let limits = StoreLimits { bytes_max: 1 << 30, free_bytes_min: 0 };
        let level = CpuOptions::default().level;
        let facts = WireFacts {
            name: name.to_owned(),
            version: "test".to_owned(),
            level: level.into(),
            threads: 1,
            ranks: 1,
            memory_bytes: 1 << 30,
            weight_bytes_per_s,
            multiply_adds_per_s: 1e10,
            step_seconds: 1e-5,
        };
        let store = TensorStore::open(store, limits).unwrap();
        let observer = Box::new(NoObserver);
        let options =
            NodeOptions { key, store, silence: SILENCE, threads: 1, level, ranks: None, memory_max, facts, observer };
        let node = Node::bind(address, options).unwrap();
        let (address, is_over) = (node.address().unwrap(), Arc::<AtomicBool>::default());
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || node.serve(|| over.load(Ordering::Relaxed)).unwrap());
        Self { address, is_over, thread: Some(thread) }
    }

    pub fn stop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A coordinator whose own memory is `memory_free`.
pub fn coordinator(
    model: &Path,
    key: ClusterKey,
    peers: &[SocketAddr],
    split: Option<&[usize]>,
    memory_free: u64,
) -> Coordinator {
    coordinator_for((Checkpoint::open(model).unwrap(), None), key, peers, split, memory_free)
}

/// A coordinator of a model, or of a range of its layers.
pub fn coordinator_for(
    part: (Checkpoint, Option<LayerRange>),
    key: ClusterKey,
    peers: &[SocketAddr],
    split: Option<&[usize]>,
    memory_free: u64,
) -> Coordinator {
    observing_coordinator(part, key, peers, split, memory_free, UNOBSERVED)
}

/// A coordinator that looks this often whether nodes have turned slow.
fn observing_coordinator(
    (checkpoint, layers): (Checkpoint, Option<LayerRange>),
    key: ClusterKey,
    peers: &[SocketAddr],
    split: Option<&[usize]>,
    memory_free: u64,
    observation: Duration,
) -> Coordinator {
    let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
    let own = NodeFacts {
        name: "coordinator".to_owned(),
        address: None,
        level: cpu.level,
        threads: 1,
        memory_free,
        read_bytes_per_s: 1e9,
        multiply_adds_per_s: 1e10,
        step_seconds: 1e-5,
    };
    let workload = Workload { kv_tokens: 2048, positions: 100, batch: 4, prompt_tokens: 100, chunk_rows: 64 };
    let cache = TempDir::new().unwrap();
    let hashes = HashCache::new(cache.path());
    let name = "test".to_owned();
    let config = ClusterModelConfig { name, checkpoint, layers, options: OPTIONS, cpu, own, workload };
    let model = ClusterModel::new(config, &hashes, &|_| {}).unwrap();
    let options = CoordinatorOptions {
        key,
        silence: SILENCE,
        optimise: Optimise::Latency,
        arithmetic: Arithmetic::Best,
        layout: split.map_or(Layout::Planned, |split| Layout::Split(split.to_vec())),
        peers: peers.to_vec(),
        settle: Duration::from_secs(5),
        replan: ReplanOptions { hold: Duration::ZERO, observation },
    };
    Coordinator::start(options, model).unwrap()
}

fn formed(coordinator: &mut Coordinator) -> FormedChain<CpuBackend> {
    coordinator.poll(DEADLINE).expect("a chain is formed")
}

fn wait_for(coordinator: &Coordinator, holds: impl Fn(&ClusterReport) -> bool) -> ClusterReport {
    let end = Instant::now() + DEADLINE;
    loop {
        let report = coordinator.report();
        if holds(&report) {
            return report;
        }
        assert!(Instant::now() < end, "{report:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

pub type NodeChain = Chain<CpuBackend, Coordinator>;

pub fn chain(mut coordinator: Coordinator) -> NodeChain {
    let formed = formed(&mut coordinator);
    let times = coordinator.times();
    Chain::new(coordinator, formed, times, DEADLINE)
}

/// So little memory that a coordinator has no layers.
fn memory_without_layers(model: &Path) -> u64 {
    memory_for(&Checkpoint::open(model).unwrap(), ModelPart::coordinator(0))
}

/// Just enough memory for a part of a model.
pub fn memory_for(checkpoint: &Checkpoint, part: ModelPart) -> u64 {
    let backend = CpuBackend::new(CpuOptions { threads: 1, level: Level::Scalar, ..CpuOptions::default() }).unwrap();
    let needed = Footprint::new(&backend, checkpoint, &OPTIONS, part, Rank::SINGLE).unwrap().total();
    needed + needed / 100
}

/// The nodes that have layers.
pub fn used(chain: &NodeChain) -> Vec<SocketAddr> {
    chain.builder().report().stages.iter().filter_map(|(address, _)| *address).collect()
}

#[test]
fn nodes_receive_their_layers_and_answer_as_one_process() {
    for model in oracle_models() {
        let (expected, _) = answers(whole(&model), requests(&model), options(64));
        let stores = [(); 2].map(|()| TempDir::new().unwrap());
        let nodes: Vec<_> =
            stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
        let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
        // The second time the nodes have their weights already.
        for _ in 0..2 {
            let chain = chain(coordinator(&model, key("one"), &peers, Some(&[1, 1]), u64::MAX >> 1));
            assert_eq!(chain.builder().report().stages.len(), 3, "{:?}", chain.builder().report());
            let (found, _) = answers(chain, requests(&model), options(64));
            assert!(found == expected, "{}", model.display());
        }
    }
}

#[test]
fn a_node_with_another_key_is_named_and_not_used() {
    let model = oracle_models().remove(0);
    let store = TempDir::new().unwrap();
    let stranger = TestNode::start("stranger", key("another"), store.path(), None);
    let coordinator = coordinator(&model, key("one"), &[stranger.address], None, u64::MAX >> 1);
    let report =
        wait_for(&coordinator, |report| report.nodes.iter().any(|node| matches!(node.state, NodeState::Failed { .. })));
    let NodeState::Failed { why } = &report.nodes[0].state else { panic!("{report:?}") };
    assert!(why.contains("key"), "{why}");
    // The coordinator has all layers itself.
    let (found, _) = answers(chain(coordinator), requests(&model), options(64));
    assert!(found == answers(whole(&model), requests(&model), options(64)).0);
}

#[test]
fn other_nodes_take_over_when_one_is_lost() {
    let model = oracle_models().remove(0);
    let (expected, _) = answers(whole(&model), requests(&model), options(32));
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let mut nodes: Vec<_> =
        stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    let memory = memory_without_layers(&model);
    let mut chain = chain(coordinator(&model, key("one"), &peers, None, memory));
    let used = used(&chain);
    assert_eq!(used.len(), 1, "{used:?}");
    let (first, rest) = answers(chain, requests(&model), options(32));
    assert!(first == expected);
    chain = rest;
    nodes.iter_mut().find(|node| node.address == used[0]).unwrap().stop();
    let (second, rest) = answers(chain, requests(&model), options(32));
    assert!(second == expected);
    let after = self::used(&rest);
    assert!(after.len() == 1 && after != used, "{used:?}, then {after:?}");
}

/// Does what an engine without requests does, until the chain has a stage on this node.
pub fn wait_until_used(mut chain: NodeChain, node: SocketAddr, mut meanwhile: impl FnMut(&NodeChain)) -> NodeChain {
    let end = Instant::now() + DEADLINE;
    while chain.poll_health(Duration::from_millis(10)) != Health::Ready || used(&chain) != [node] {
        assert!(Instant::now() < end, "{:?}", chain.builder().report());
        meanwhile(&chain);
    }
    chain
}

#[test]
fn a_faster_node_that_joins_later_takes_over() {
    let model = oracle_models().remove(0);
    let (expected, _) = answers(whole(&model), requests(&model), options(32));
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let slow = TestNode::start_with("slow", key("one"), stores[0].path(), None, 1e6);
    let memory = memory_without_layers(&model);
    let chain = chain(coordinator(&model, key("one"), &[slow.address], None, memory));
    assert_eq!(used(&chain), [slow.address]);
    let (first, chain) = answers(chain, requests(&model), options(32));
    assert!(first == expected);
    let fast = TestNode::start_with("fast", key("one"), stores[1].path(), None, 1e9);
    assert!(chain.builder().finder().found(fast.address));
    let chain = wait_until_used(chain, fast.address, |_| {});
    let (second, chain) = answers(chain, requests(&model), options(32));
    assert!(second == expected);
    assert_eq!((used(&chain), chain.builder().report().chains), (vec![fast.address], 2));
}

#[test]
fn a_node_that_turns_slow_gives_its_layers_to_another() {
    let model = oracle_models().remove(0);
    let (expected, _) = answers(whole(&model), requests(&model), options(32));
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let nodes: Vec<_> = stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    let part = (Checkpoint::open(&model).unwrap(), None);
    let memory = memory_without_layers(&model);
    let observation = Duration::from_millis(100);
    let chain = chain(observing_coordinator(part, key("one"), &peers, None, memory, observation));
    let slow = used(&chain)[0];
    let other = peers.iter().copied().find(|peer| *peer != slow).unwrap();
    // Steps in which the node takes a second. Its own steps would be too short to tell.
    let chain = wait_until_used(chain, other, |chain| {
        let whole = Duration::from_secs(1);
        chain.builder().times().record(StepTimes { compute_us: &[0, 1_000_000], whole, rows: 1, state_rows: 1 });
    });
    let report = chain.builder().report();
    let node = report.nodes.iter().find(|node| node.address == slow).unwrap();
    assert!(node.not_used.as_ref().is_some_and(|why| why.contains("times as long")), "{node:?}");
    let (found, chain) = answers(chain, requests(&model), options(32));
    assert!(found == expected);
    assert_eq!(used(&chain), [other]);
}
