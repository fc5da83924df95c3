//! The small models of `fixtures/oracle`, our worker in this process, and the programs of `tests/cake`.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use cake::{
    CakeAnnouncement, CakeGpu, CakeKey, CakeLoader, CakeStageError, CakeWorker, CakeWorkerSettings, ExecutorLoader,
    answer_queries,
};
use engine::{Executor, Stage};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use serde_json::Value;
use types::{LayerRange, TokenId};

/// How many tokens are generated.
pub const TOKENS: usize = 6;
pub const KEY: &str = "a key for tests";
pub const LIMITS: Limits =
    Limits { step: StepLimits { rows: 64, sequences: 16, pages: 128 }, logit_rows: 64, kv_pages: 64, positions: 400 };
pub const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };

/// A folder within `fixtures/oracle`.
pub fn oracle(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(path)
}

pub fn layers(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

pub fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

pub struct Prompt {
    pub tokens: Vec<TokenId>,
    pub greedy: Vec<TokenId>,
}

/// Short prompts of a model, with their greedy continuations: `f32`, or `bf16w` for weights in bf16.
pub fn prompts(model: &str, arithmetic: &str) -> Vec<Prompt> {
    prompts_named(model, arithmetic, &["len1", "short"])
}

pub fn prompts_named(model: &str, arithmetic: &str, names: &[&str]) -> Vec<Prompt> {
    let manifest: Value = serde_json::from_slice(&fs::read(oracle(model).join("manifest.json")).unwrap()).unwrap();
    let tokens = |ids: &Value| ids.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect();
    let all = manifest["prompts"].as_array().unwrap().iter();
    let chosen = all.filter(|prompt| names.contains(&prompt["name"].as_str().unwrap()));
    let prompt = |prompt: &Value| Prompt {
        tokens: tokens(&prompt["ids"]),
        greedy: tokens(&prompt["greedy"][arithmetic]["tokens"]),
    };
    chosen.map(prompt).collect()
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
    let settings = CakeWorkerSettings { key: key.clone(), store: store.to_owned(), model: model.map(Path::to_owned) };
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

/// A program of `tests/cake`.
pub fn python(program: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg("-B").arg(program);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cake"));
    command
}

/// What a master program printed: the tokens of each prompt, and what it said about the set-up.
pub fn run_master(arguments: &[&str], prompts: &[Prompt]) -> (Vec<Vec<TokenId>>, String) {
    let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.tokens.iter().map(|token| token.0).collect()).collect();
    let count = ["--tokens", &TOKENS.to_string()];
    let output =
        python("master.py").args(arguments).args(count).arg(serde_json::to_string(&ids).unwrap()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| serde_json::from_str::<Vec<u32>>(line).unwrap().into_iter().map(TokenId).collect();
    (printed.lines().map(line).collect(), said)
}

/// A worker program. Dropping it ends the process.
pub struct PythonWorker {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub address: SocketAddr,
}

impl PythonWorker {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = python("worker.py").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        Self { child, stdout, address: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    /// The next line that it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PythonWorker {
    fn drop(&mut self) {
        self.kill();
        let mut rest = String::new();
        let _ = self.stdout.read_to_string(&mut rest);
    }
}
