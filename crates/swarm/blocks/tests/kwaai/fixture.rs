//! Small models of `fixtures/oracle`, our servers of their blocks, and what one process gives.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use blocks::block::{BlockHandle, BlockLimits, BlockShape, Client};
use blocks::kwaai::{KwaaiLimits, KwaaiServer, serve_local};
use engine::{EmbeddingAndHead, Executor, LocalExecutor, Phase, Prefix, RequestedOutput, Stage, StepOutput, StepPlan};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use serde_json::Value;
use tokio::net::TcpListener;
use types::{LayerRange, TokenId};

pub const LIMITS: Limits =
    Limits { step: StepLimits { rows: 16, sequences: 8, pages: 128 }, logit_rows: 16, kv_pages: 256, positions: 400 };
pub const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };

/// The largest difference of a logit that rounding activations to f16, once for each server, makes in these models.
pub const TOLERANCE: f32 = 0.02;

/// How a server is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Calls in envelopes: a connection stands in for a stream of libp2p.
    Enveloped,
    /// The local TCP bypass.
    Local,
}

pub const FORMS: [Form; 2] = [Form::Enveloped, Form::Local];

impl Form {
    /// For the programs.
    pub fn argument(self) -> &'static [&'static str] {
        if self == Self::Local { &["--local"] } else { &[] }
    }
}

pub fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

pub struct Model {
    pub path: PathBuf,
    pub checkpoint: Checkpoint,
}

impl Model {
    /// A model within `fixtures/oracle`.
    pub fn open(name: &str) -> Self {
        let path = testing::oracle(name);
        let checkpoint = Checkpoint::open(&path).unwrap();
        Self { path, checkpoint }
    }

    pub fn layers(&self) -> u32 {
        self.checkpoint.description().layers.len() as u32
    }

    pub fn hidden(&self) -> usize {
        self.checkpoint.description().hidden
    }

    pub fn vocab(&self) -> usize {
        self.checkpoint.description().vocab
    }

    /// With so many pages of K/V.
    pub fn stage(&self, layers: LayerRange, kv_pages: usize) -> Stage<CpuBackend> {
        let options = LoadOptions { limits: Limits { kv_pages, ..LIMITS }, ..OPTIONS };
        Stage::load(backend(), &self.checkpoint, &options, layers, &mut |_| {}).unwrap()
    }

    pub fn embedding_and_head(&self) -> EmbeddingAndHead<CpuBackend> {
        EmbeddingAndHead::load(backend(), &self.checkpoint, &OPTIONS).unwrap()
    }

    pub fn prompt(&self, name: &str) -> Vec<u32> {
        let manifest = fs::read(self.path.join("../manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let prompt = manifest["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap();
        prompt["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// What one process gives: the greedy tokens, and the logits before each.
    pub fn greedy(&self, prompt: &[u32], tokens: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
        let mut local = LocalExecutor::load(backend(), &self.checkpoint, &OPTIONS, &mut |_| {}).unwrap();
        let session = local.open(LIMITS.positions, Prefix::NONE).unwrap().session;
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        let (mut position, mut answer, mut logits) = (0, Vec::new(), Vec::new());
        while answer.len() < tokens {
            let (rest, phase) = match &prompt[position.min(prompt.len())..] {
                [] => (&answer[answer.len() - 1..], Phase::Decode),
                prompt => (&prompt[..prompt.len().min(LIMITS.step.rows)], Phase::Prefill),
            };
            let run: Vec<_> = rest.iter().map(|&token| TokenId(token)).collect();
            plan.clear();
            plan.push(session, phase, position, &run, RequestedOutput::Logits { rows: 1 });
            local.submit(&plan).unwrap();
            local.collect(&mut output).unwrap();
            position += run.len();
            if position >= prompt.len() {
                let row = output.values(&output.logits[0]).to_vec();
                answer.push(greedy(&row));
                logits.push(row);
            }
        }
        (answer, logits)
    }
}

pub fn greedy(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}

/// The largest difference of two rows of logits.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

pub fn layers(start: u32, end: u32) -> LayerRange {
    LayerRange::new(start, end).unwrap()
}

/// What a block has room for.
#[derive(Clone, Copy)]
pub struct Room {
    pub kv_pages: usize,
    pub limits: BlockLimits,
}

impl Default for Room {
    fn default() -> Self {
        Self { kv_pages: LIMITS.kv_pages, limits: BlockLimits::default() }
    }
}

/// A block of a model that serves.
pub fn block(model: &Model, range: LayerRange) -> BlockHandle {
    let block = BlockHandle::warming_up();
    serve_block(&block, model, range, Room::default());
    block
}

pub fn serve_block(block: &BlockHandle, model: &Model, layers: LayerRange, room: Room) {
    let shape = BlockShape {
        layers,
        has_parts: false,
        hidden: model.hidden(),
        positions_max: LIMITS.positions,
        rows_max: LIMITS.step.rows,
    };
    block.serve(Box::new(model.stage(layers, room.kv_pages)), shape, room.limits).unwrap();
}

/// Our server of a block.
pub fn kwaai_server(model: &Model, range: LayerRange, limits: KwaaiLimits) -> KwaaiServer {
    kwaai_server_with(model, range, limits, Room::default()).1
}

/// The same of a block that has other room, and its block.
pub fn kwaai_server_with(
    model: &Model,
    range: LayerRange,
    limits: KwaaiLimits,
    room: Room,
) -> (BlockHandle, KwaaiServer) {
    let block = BlockHandle::warming_up();
    serve_block(&block, model, range, room);
    let server = KwaaiServer::new(block.clone(), model.layers() as usize, limits);
    server.set_embed_and_head(model.embedding_and_head());
    (block, server)
}

/// Serves on the loopback addresses until the runtime ends.
pub async fn listen(server: KwaaiServer, form: Form) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    match form {
        Form::Local => {
            tokio::spawn(serve_local(server, listener));
        }
        Form::Enveloped => {
            tokio::spawn(async move {
                loop {
                    let (stream, from) = listener.accept().await.unwrap();
                    let server = server.clone();
                    // An error means that there was no answer; the other side sees that.
                    tokio::spawn(async move { server.serve_stream(Client::Address(from.ip()), stream).await });
                }
            });
        }
    }
    address
}
