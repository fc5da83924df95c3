//! Chains over loopback, formed by the test.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cluster::chain::{Chain, ChainBuilder, ChainLink, ChainTimes, FormedChain};
use cluster::node::{StageConnections, StageShape};
use cluster::purpose::{CHAIN, ConnectionId};
use cluster::wire::chain::ChainKind;
use engine::{CoordinatorStage, LocalExecutor, Stage};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, ModelPart};
use net::{ClusterKey, MessageSender, MessageStream, WaitLimit, respond};
use types::LayerRange;

use testing::cluster_chain::{DEADLINE, OPTIONS};

pub fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

pub fn whole(model: &Path) -> LocalExecutor<CpuBackend> {
    LocalExecutor::load(backend(), &Checkpoint::open(model).unwrap(), &OPTIONS, &mut |_| {}).unwrap()
}

/// All models of `fixtures/oracle` in f32.
pub fn oracle_models() -> Vec<PathBuf> {
    let oracle = testing::oracle("");
    let folders = std::fs::read_dir(oracle).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = folders.map(|folder| folder.join("model-f32")).filter(|path| path.exists()).collect();
    models.sort();
    assert!(models.len() >= 5, "{models:?}");
    models
}

/// Forms a chain whenever it is asked to, each with its own split of the layers.
pub struct Splits {
    model: PathBuf,
    /// The numbers of layers of the coordinator and of the stages, of each chain to come. The last one is not used.
    splits: Vec<Vec<usize>>,
    is_wanted: bool,
    /// How many chains were formed.
    pub formed: Arc<AtomicUsize>,
    /// The connections of the current chain, for faults.
    pub connections: Arc<std::sync::Mutex<Vec<MessageSender>>>,
}

impl ChainBuilder<CpuBackend> for Splits {
    fn rebuild(&mut self, _: &str, _: Option<Box<CoordinatorStage<CpuBackend>>>) {
        self.is_wanted = true;
    }

    fn poll(&mut self, _: Duration) -> Option<FormedChain<CpuBackend>> {
        if !std::mem::take(&mut self.is_wanted) {
            return None;
        }
        self.formed.fetch_add(1, Ordering::Relaxed);
        let split = if self.splits.len() > 1 { self.splits.remove(0) } else { self.splits[0].clone() };
        Some(form(&self.model, &split, &self.connections))
    }
}

pub type TestChain = Chain<CpuBackend, Splits>;

/// A chain with the first of these splits; after a loss it gets the next one.
pub fn chain(model: &Path, splits: &[&[usize]]) -> TestChain {
    let splits = splits.iter().map(|split| split.to_vec()).collect();
    let mut builder = Splits {
        model: model.to_owned(),
        splits,
        is_wanted: true,
        formed: Arc::default(),
        connections: Arc::default(),
    };
    let formed = builder.poll(Duration::ZERO).unwrap();
    Chain::new(builder, formed, Arc::<ChainTimes>::default(), DEADLINE)
}

/// Starts a thread for each stage, and connects them.
fn form(model: &Path, split: &[usize], connections: &std::sync::Mutex<Vec<MessageSender>>) -> FormedChain<CpuBackend> {
    let checkpoint = Checkpoint::open(model).unwrap();
    let mut split = split.to_vec();
    let last = split.len() - 1;
    // The last one has what is left: the models have different numbers of layers.
    split[last] = checkpoint.description().layers.len() - split[..last].iter().sum::<usize>();
    let ends = CoordinatorStage::load(backend(), &checkpoint, &OPTIONS, ModelPart::coordinator(split[0]), &mut |_| {})
        .unwrap();
    let hidden = checkpoint.description().hidden;
    let shape = StageShape { rows_max: OPTIONS.limits.step.rows, hidden };
    let (mut start, mut previous, mut first) = (split[0], None, None);
    for (index, count) in split[1..].iter().enumerate() {
        let layers = LayerRange::new(start as u32, (start + count) as u32).unwrap();
        start += count;
        let mut stage = Stage::load(backend(), &checkpoint, &OPTIONS, layers, &mut |_| {}).unwrap();
        let incoming = previous.take().unwrap_or_else(|| {
            let (near, far) = pair();
            first = Some(near);
            far
        });
        let (next, far) = pair();
        previous = Some(far);
        connections.lock().unwrap().extend([incoming.sender.clone(), next.sender.clone()]);
        let is_last = index + 2 == split.len();
        thread::spawn(move || {
            cluster::node::run(&mut stage, shape, StageConnections { previous: incoming, next, is_last })
        });
    }
    let link = first.map(|first| {
        let bytes_max = ChainKind::States.bytes_max(shape.rows_max, hidden);
        ChainLink::new(split.len() - 1, first, previous.unwrap(), bytes_max, Arc::new(|_| {})).unwrap()
    });
    FormedChain { stage: Box::new(ends), link }
}

/// Two ends of an encrypted connection.
pub fn pair() -> (MessageStream, MessageStream) {
    let key = ClusterKey::from_passphrase("a passphrase for tests").unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let limit = || WaitLimit::until(Instant::now() + DEADLINE);
    let hello = ConnectionId { purpose: CHAIN, number: 1, index: 0 }.hello(Duration::from_secs(10));
    let respond = |stream: TcpStream| respond(stream, &key, &limit(), |_| Ok(())).unwrap().1;
    thread::scope(|scope| {
        let near = scope.spawn(|| MessageStream::connect(address, &key, &hello, &limit()).unwrap());
        let far = MessageStream::new(respond(listener.accept().unwrap().0)).unwrap();
        (near.join().unwrap(), far)
    })
}
