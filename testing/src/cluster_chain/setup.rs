//! Nodes with ranks or with forced CPU levels, and a coordinator, all on loopback.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use cluster::chain::{Chain, ChainBuilder};
use cluster::coordinator::{
    Arithmetic, ClusterModel, ClusterModelConfig, ClusterReport, Coordinator, CoordinatorOptions, Layout, ReplanOptions,
};
use cluster::node::{NoObserver, Node, NodeOptions, NodeRanks};
use cluster::wire::control::WireFacts;
use engine::LocalExecutor;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::Checkpoint;
use net::ClusterKey;
use plan::{NodeFacts, Optimise, Workload};
use ranks::group::Deadlines;
use tempfile::TempDir;
use types::{LayerRange, WorldSize};
use weights::{HashCache, StoreLimits, TensorStore};

use super::{DEADLINE, OPTIONS};
use crate::oracle;

/// Nodes are lost when they end. A busy machine may delay their signs of life.
const SILENCE: Duration = Duration::from_secs(60);

pub type NodeChain = Chain<CpuBackend, Coordinator>;

fn key() -> ClusterKey {
    ClusterKey::from_passphrase("a passphrase for tests").unwrap()
}

/// A node in a thread.
pub struct TestNode {
    pub address: SocketAddr,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _store: TempDir,
}

impl TestNode {
    /// A node with this level, whose layers are shared by so many ranks: processes of this program.
    pub fn start(ranks: u16, level: Level) -> Self {
        let folder = TempDir::new().unwrap();
        let store = TensorStore::open(folder.path(), StoreLimits { bytes_max: 1 << 30, free_bytes_min: 0 }).unwrap();
        let facts = WireFacts {
            name: format!("{ranks} ranks, {level}"),
            version: "test".to_owned(),
            level: level.into(),
            threads: u32::from(ranks),
            ranks,
            memory_bytes: 1 << 30,
            weight_bytes_per_s: 1e9,
            multiply_adds_per_s: 1e10,
            step_seconds: 1e-5,
        };
        let world = WorldSize::new(ranks).unwrap();
        let program = std::env::current_exe().unwrap();
        let ranks = (world != WorldSize::ONE).then(|| NodeRanks { world, program, deadlines: Deadlines::default() });
        let (key, silence, observer) = (key(), SILENCE, Box::new(NoObserver));
        let options = NodeOptions { key, store, silence, threads: 1, level, ranks, memory_max: None, facts, observer };
        let node = Node::bind("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let (address, is_over) = (node.address().unwrap(), Arc::<AtomicBool>::default());
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || node.serve(|| over.load(Ordering::Relaxed)).unwrap());
        Self { address, is_over, thread: Some(thread), _store: folder }
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

/// A chain whose nodes get so many layers each, and the coordinator the others before them. Without a split, it is planned.
pub fn chain(
    model: &Path,
    nodes: &[&TestNode],
    split: Option<&[usize]>,
    level: Level,
    arithmetic: Arithmetic,
) -> NodeChain {
    chain_for(cluster_model(model, None, level), nodes, split, arithmetic)
}

/// A model, or a range of its layers, whose coordinator has this level.
pub fn cluster_model(model: &Path, layers: Option<LayerRange>, level: Level) -> ClusterModel {
    let cpu = cpu(level);
    let own = NodeFacts {
        name: "coordinator".to_owned(),
        address: None,
        level,
        threads: 1,
        memory_free: u64::MAX >> 1,
        read_bytes_per_s: 1e9,
        multiply_adds_per_s: 1e10,
        step_seconds: 1e-5,
    };
    let workload = Workload { kv_tokens: 2048, positions: 100, batch: 4, prompt_tokens: 100, chunk_rows: 64 };
    let cache = TempDir::new().unwrap();
    let checkpoint = Checkpoint::open(model).unwrap();
    let name = "test".to_owned();
    let config = ClusterModelConfig { name, checkpoint, layers, options: OPTIONS, cpu, own, workload };
    ClusterModel::new(config, &HashCache::new(cache.path()), &|_| {}).unwrap()
}

/// As [`chain`], for what the cluster is to run.
pub fn chain_for(
    model: ClusterModel,
    nodes: &[&TestNode],
    split: Option<&[usize]>,
    arithmetic: Arithmetic,
) -> NodeChain {
    let options = CoordinatorOptions {
        key: key(),
        silence: SILENCE,
        optimise: Optimise::Latency,
        arithmetic,
        layout: split.map_or(Layout::Planned, |split| Layout::Split(split.to_vec())),
        peers: nodes.iter().map(|node| node.address).collect(),
        settle: DEADLINE,
        replan: ReplanOptions::default(),
    };
    let mut coordinator = Coordinator::start(options, model).unwrap();
    let formed = coordinator.poll(DEADLINE).expect("a chain is formed");
    let times = coordinator.times();
    Chain::new(coordinator, formed, times, DEADLINE)
}

fn cpu(level: Level) -> CpuOptions {
    CpuOptions { threads: 1, level, ..CpuOptions::default() }
}

/// The whole model in this process.
pub fn whole_at(model: &Path, level: Level) -> LocalExecutor<CpuBackend> {
    let backend = CpuBackend::new(cpu(level)).unwrap();
    LocalExecutor::load(backend, &Checkpoint::open(model).unwrap(), &OPTIONS, &mut |_| {}).unwrap()
}

pub fn wait_for(chain: &NodeChain, holds: impl Fn(&ClusterReport) -> bool) -> ClusterReport {
    let end = Instant::now() + DEADLINE;
    loop {
        let report = chain.builder().report();
        if holds(&report) {
            return report;
        }
        assert!(Instant::now() < end, "{report:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A model of `fixtures/oracle`, in f32 if there is one.
pub fn oracle_model(name: &str) -> PathBuf {
    let kinds = ["model-f32", "model-bf16"].map(|kind| oracle(name).join(kind));
    kinds.into_iter().find(|path| path.exists()).unwrap()
}
