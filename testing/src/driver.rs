//! Runs a model of `fixtures/oracle` on any backend, sequence by sequence, and compares it with its manifest.

use std::fs;
use std::path::PathBuf;

use kernels::{Backend, PAGE_TOKENS, Rows, Span, StepInputs, StepLimits};
use model::{Block, Checkpoint, Collective, Embedding, Limits, LmHead, LoadOptions, SingleRank};
use serde_json::Value as Json;
use types::{DType, LayerRange, Rank};

use crate::oracle;

pub const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "gemma3"];

/// The folders of `fixtures/oracle`: each architecture, and one with odd sizes.
pub const MODELS: [&str; 7] = ["llama", "qwen2", "qwen3", "mistral", "mistral_odd", "qwen3_moe", "gemma3"];

const ROWS: usize = 320;
const PAGES: usize = 41;

pub struct Fixture {
    folder: PathBuf,
    pub manifest: Json,
}

pub struct Prompt {
    pub name: String,
    pub ids: Vec<u32>,
    json: Json,
}

/// `[rows, cols]` of f32 from a golden file.
pub struct Golden {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Fixture {
    pub fn open(architecture: &str) -> Self {
        let folder = oracle(architecture);
        let manifest = fs::read(folder.join("manifest.json")).unwrap();
        Self { folder, manifest: serde_json::from_slice(&manifest).unwrap() }
    }

    pub fn path(&self, inside: &str) -> PathBuf {
        self.folder.join(inside)
    }

    /// The folder of a variant: f32, bf16 or bf16-sharded.
    pub fn variant(&self, name: &str) -> Option<PathBuf> {
        Some(self.path(self.manifest["variants"][name].as_str()?))
    }

    /// The folder of the variant with the most golden files, and their name: f32, or bf16 if there is no f32 variant.
    pub fn primary(&self) -> (PathBuf, &str) {
        let golden = self.manifest["primary"].as_str().unwrap();
        (self.variant(golden.trim_end_matches('w')).unwrap(), golden)
    }

    pub fn prompts(&self) -> Vec<Prompt> {
        let prompts = self.manifest["prompts"].as_array().unwrap().iter();
        prompts
            .map(|json| Prompt {
                name: json["name"].as_str().unwrap().into(),
                ids: ids(&json["ids"]),
                json: json.clone(),
            })
            .collect()
    }

    pub fn prompt(&self, name: &str) -> Prompt {
        self.prompts().into_iter().find(|prompt| prompt.name == name).unwrap()
    }

    pub fn golden(&self, entry: &Json) -> Option<Golden> {
        let bytes = fs::read(self.path(entry["file"].as_str()?)).unwrap();
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Some(Golden { shape: entry["shape"].as_array().unwrap().iter().map(count).collect(), values })
    }

    /// Logits of a prompt, and their positions.
    pub fn logits(&self, prompt: &Prompt, result: &str) -> Option<(Golden, Vec<usize>)> {
        let golden = self.golden(&prompt.json["logits"][result])?;
        let last = prompt.ids.len() - 1;
        let positions = match &prompt.json["positions"] {
            _ if result.ends_with("_last") => vec![last],
            Json::Array(listed) if result == self.primary().1 => listed.iter().map(count).collect(),
            _ => (0..=last).collect(),
        };
        assert_eq!(golden.shape[0], positions.len());
        Some((golden, positions))
    }

    pub fn decode_logits(&self, prompt: &Prompt) -> Option<Golden> {
        self.golden(&prompt.json["decode_logits"])
    }

    /// The tolerance that the fixtures' README states for f32.
    pub fn tolerance(&self) -> f32 {
        if self.manifest["name"] == "qwen3_moe" { 5e-4 } else { 2e-4 }
    }
}

impl Prompt {
    pub fn argmax(&self) -> Vec<u32> {
        ids(&self.json["argmax"])
    }

    pub fn greedy(&self, result: &str) -> Vec<u32> {
        ids(&self.json["greedy"][result]["tokens"])
    }
}

/// A sequence's page table, and how many of its tokens have been computed.
#[derive(Default)]
pub struct Sequence {
    pages: Vec<u32>,
    computed: usize,
}

/// A whole model in this thread: embedding, a chain of blocks and LM head. In a group, one rank's shard of it.
pub struct Driver<'a, B: Backend> {
    backend: &'a B,
    pub embedding: Embedding<B>,
    pub lm_head: LmHead<B>,
    pub blocks: Vec<Block<B>>,
    step: B::Step,
    hidden: B::Buffer,
    width: usize,
    free: Vec<u32>,
}

impl<'a, B: Backend> Driver<'a, B> {
    pub fn new(backend: &'a B, from: &Checkpoint, keep: Option<DType>) -> Self {
        let all = from.description().layers.len() as u32;
        Self::split(backend, from, keep, &[all], Rank::SINGLE)
    }

    /// Splits the layers into blocks that end before the layers `ends`, for one rank.
    pub fn split(backend: &'a B, from: &Checkpoint, keep: Option<DType>, ends: &[u32], rank: Rank) -> Self {
        let options = load_options(from, keep);
        let step = options.limits.step;
        let mut start = 0;
        let blocks = ends.iter().map(|end| {
            let range = LayerRange::new(std::mem::replace(&mut start, *end), *end).unwrap();
            let mut done = 0;
            let block = Block::load(backend, from, range, rank, &options, &mut |layers| done = layers).unwrap();
            assert_eq!((done, block.layers()), (range.count(), range));
            block
        });
        let embedding = Embedding::load(backend, from, &options, rank).unwrap();
        Self {
            backend,
            blocks: blocks.collect(),
            lm_head: LmHead::load(backend, from, &options, rank, &embedding).unwrap(),
            embedding,
            step: backend.step(step).unwrap(),
            hidden: backend.buffer(ROWS, from.description().hidden).unwrap(),
            width: from.description().hidden,
            // Scattered, so that a kernel that assumes adjacent pages fails.
            free: (0..PAGES as u32).map(|i| i * 17 % PAGES as u32).collect(),
        }
    }

    pub fn close(&mut self, sequence: Sequence) {
        self.free.extend(sequence.pages);
    }

    /// Runs more tokens of several sequences in one step. Returns the logits of all of their rows, in order; empty on all
    /// ranks but rank 0. `after` is called with the residual stream before the first block and after each block.
    pub fn advance_with(
        &mut self,
        batch: &mut [(&mut Sequence, &[u32])],
        collective: &dyn Collective<B>,
        after: &mut dyn FnMut(Vec<f32>),
    ) -> Vec<f32> {
        let (mut tokens, mut spans, mut pages) = (vec![], vec![], vec![]);
        for (sequence, more) in batch.iter_mut() {
            let known = sequence.computed + more.len();
            while sequence.pages.len() * PAGE_TOKENS < known {
                sequence.pages.push(self.free.pop().unwrap());
            }
            spans.push(Span {
                row: tokens.len() as u32,
                rows: more.len() as u32,
                position: sequence.computed as u32,
                pages_start: pages.len() as u32,
                pages_len: sequence.pages.len() as u32,
            });
            tokens.extend_from_slice(more);
            pages.extend_from_slice(&sequence.pages);
            sequence.computed = known;
        }
        let rows = tokens.len();
        let logit_rows: Vec<u32> = (0..rows as u32).collect();
        let inputs = StepInputs { tokens: &tokens, spans: &spans, pages: &pages, logit_rows: &logit_rows };
        self.backend.begin(&mut self.step, inputs).unwrap();

        self.embedding.embed(self.backend, &self.step, rows, &mut self.hidden, collective).unwrap();
        after(read(self.backend, &self.hidden, rows, self.width));
        for block in &mut self.blocks {
            let layers = block.layers();
            block.forward(self.backend, &self.step, Rows::prefill(rows), layers, &mut self.hidden, collective).unwrap();
            after(read(self.backend, &self.hidden, rows, self.width));
        }
        let vocab = self.lm_head.vocab();
        let logits = self.lm_head.logits(self.backend, &self.step, rows, &self.hidden, collective).unwrap();
        logits.map_or_else(Vec::new, |logits| read(self.backend, logits, rows, vocab))
    }

    pub fn advance(&mut self, batch: &mut [(&mut Sequence, &[u32])]) -> Vec<f32> {
        self.advance_with(batch, &SingleRank, &mut |_| {})
    }

    /// Prefills a prompt, `chunk` tokens per step. Returns the logits of every position, and the sequence.
    pub fn prefill(&mut self, ids: &[u32], chunk: usize) -> (Vec<f32>, Sequence) {
        let mut sequence = Sequence::default();
        let logits = ids.chunks(chunk).flat_map(|part| self.advance(&mut [(&mut sequence, part)])).collect();
        (logits, sequence)
    }

    /// The greedy continuation of a prompt, and the logits from which each token was sampled.
    pub fn greedy(&mut self, ids: &[u32], count: usize) -> (Vec<u32>, Vec<f32>) {
        let vocab = self.lm_head.vocab();
        let (mut logits, mut sequence) = self.prefill(ids, ids.len());
        let (mut tokens, mut taken) = (vec![], vec![]);
        while tokens.len() < count {
            let last = &logits[logits.len() - vocab..];
            tokens.push(argmax(last));
            taken.extend_from_slice(last);
            logits = self.advance(&mut [(&mut sequence, &tokens[tokens.len() - 1..])]);
        }
        self.close(sequence);
        (tokens, taken)
    }
}

/// The options with which a driver loads.
pub fn load_options(from: &Checkpoint, keep: Option<DType>) -> LoadOptions {
    let step = StepLimits { rows: ROWS, sequences: 8, pages: 4 * PAGES };
    let positions = from.description().positions_max;
    LoadOptions { keep, limits: Limits { step, logit_rows: ROWS, kv_pages: PAGES, positions } }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, best) as u32
}

/// The largest difference; NaN counts as infinity.
pub fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let apart = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    a.iter().zip(b).map(apart).fold(0.0, f32::max)
}

fn read<B: Backend>(backend: &B, buffer: &B::Buffer, rows: usize, cols: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * cols];
    backend.read(buffer, 0..rows, &mut out).unwrap();
    out
}

fn ids(list: &Json) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| count(id) as u32).collect()
}

fn count(number: &Json) -> usize {
    number.as_u64().unwrap() as usize
}
