//! Our worker in this process.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cake::{
    CakeAnnouncement, CakeGpu, CakeKey, CakeLoader, CakeStageError, CakeStoreLimits, CakeWorker, CakeWorkerSettings,
    ExecutorLoader, answer_queries,
};
use engine::{Executor, Stage};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use types::LayerRange;

pub const KEY: &str = "a key for tests";
pub const LIMITS: Limits =
    Limits { step: StepLimits { rows: 64, sequences: 16, pages: 128 }, logit_rows: 64, kv_pages: 64, positions: 400 };
pub const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };

pub fn layers(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

pub fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

/// Loads stages on the CPU.
pub fn loader() -> Arc<dyn CakeLoader> {
    let load = |checkpoint: &Checkpoint, layers| {
        let stage = Stage::load(backend(), checkpoint, &OPTIONS, layers, &mut |_| {});
        stage.map(|stage| Box::new(stage) as Box<dyn Executor>).map_err(|error| CakeStageError(error.to_string()))
    };
    Arc::new(ExecutorLoader::new(Box::new(load), Box::new(|_| LIMITS.positions)))
}

/// Where a worker listens: for masters, and for queries.
pub struct Addresses {
    pub worker: SocketAddr,
    pub discovery: SocketAddr,
}

/// Runs `test` against a worker in this process.
pub fn with_worker(key: Option<&str>, store: &Path, model: Option<&Path>, test: impl FnOnce(&Addresses)) {
    let key = key.map(|key| CakeKey::new(key).unwrap());
    let store_limits = CakeStoreLimits { bytes_max: 1 << 30, free_bytes_min: 0 };
    let (store, model) = (store.to_owned(), model.map(Path::to_owned));
    let settings = CakeWorkerSettings { key: key.clone(), store, store_limits, model };
    let worker = CakeWorker::new(settings, loader()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let addresses = Addresses { worker: listener.local_addr().unwrap(), discovery: socket.local_addr().unwrap() };
    let announcement = CakeAnnouncement {
        cluster_hash: key.as_ref().map_or(String::new(), CakeKey::cluster_hash),
        worker_name: "worker".to_owned(),
        port: addresses.worker.port(),
        gpus: vec![CakeGpu { name: "CPU".to_owned(), vram_bytes: 1 << 30, tflops: 2.0 }],
        backend: "cpu".to_owned(),
        hostname: String::new(),
        os: String::new(),
    };
    let is_over = OverOnDrop(AtomicBool::new(false));
    let over = || is_over.0.load(Ordering::Relaxed);
    thread::scope(|scope| {
        scope.spawn(|| worker.serve(&listener, &over).unwrap());
        scope.spawn(|| answer_queries(&socket, &announcement, &over).unwrap());
        // Also if the test fails: otherwise the scope would wait for ever.
        let _ends = EndScope(&is_over);
        test(&addresses);
    });
}

struct OverOnDrop(AtomicBool);

struct EndScope<'a>(&'a OverOnDrop);

impl Drop for EndScope<'_> {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
