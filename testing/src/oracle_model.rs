//! The small qwen3 model of `fixtures/oracle`, with the prompts and answers of its manifest, and the paths of the others.

use std::fs;
use std::path::{Path, PathBuf};

use engine::LocalExecutor;
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use serde_json::Value;
use types::{DType, TokenId};

use crate::oracle;

pub const LIMITS: Limits =
    Limits { step: StepLimits { rows: 320, sequences: 16, pages: 128 }, logit_rows: 320, kv_pages: 64, positions: 400 };

pub struct Prompt {
    pub name: String,
    pub tokens: Vec<TokenId>,
    /// Its greedy continuation.
    pub greedy: Vec<TokenId>,
}

/// The model in f32, on one thread: tests run in parallel, and the pool's threads spin while they wait.
pub fn model(limits: Limits) -> LocalExecutor<CpuBackend> {
    model_on(1, limits)
}

pub fn model_on(threads: usize, limits: Limits) -> LocalExecutor<CpuBackend> {
    model_kept(None, threads, limits)
}

/// The model with its weights kept in another format.
pub fn model_kept(keep: Option<DType>, threads: usize, limits: Limits) -> LocalExecutor<CpuBackend> {
    let checkpoint = Checkpoint::open(&folder().join("model-f32")).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }).unwrap();
    let mut loaded = Vec::new();
    let options = LoadOptions { keep, limits };
    let local = LocalExecutor::load(backend, &checkpoint, &options, &mut |layers| loaded.push(layers)).unwrap();
    assert_eq!(loaded, [1, 2, 3, 4], "progress is told layer by layer");
    local
}

pub fn prompts() -> Vec<Prompt> {
    let prompts = prompts_of(&folder());
    assert!(prompts.iter().all(|prompt| prompt.greedy.len() == 32));
    prompts
}

fn prompts_of(folder: &Path) -> Vec<Prompt> {
    let manifest: Value = serde_json::from_slice(&fs::read(folder.join("manifest.json")).unwrap()).unwrap();
    let tokens = |ids: &Value| -> Vec<TokenId> {
        ids.as_array().into_iter().flatten().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
    };
    let prompt = |entry: &Value| Prompt {
        name: entry["name"].as_str().unwrap().to_owned(),
        tokens: tokens(&entry["ids"]),
        greedy: tokens(&entry["greedy"]["f32"]["tokens"]),
    };
    let prompts: Vec<Prompt> = manifest["prompts"].as_array().unwrap().iter().map(prompt).collect();
    assert!(prompts.len() >= 8 && prompts.iter().all(|prompt| !prompt.tokens.is_empty()));
    prompts
}

pub fn prompt(name: &str) -> Prompt {
    prompts().into_iter().find(|prompt| prompt.name == name).unwrap()
}

/// All models of `fixtures/oracle`: each architecture in the formats that it has.
pub fn oracle_models() -> Vec<PathBuf> {
    let oracle = folder().join("..");
    let inside = ["model-f32", "model-bf16", "gguf/tiny-llama-q8_0.gguf", "gguf/tiny-qwen3-q8_0.gguf"];
    let folders = fs::read_dir(oracle).unwrap().map(|entry| entry.unwrap().path());
    let mut models: Vec<_> = folders.flat_map(|folder| inside.map(|inside| folder.join(inside))).collect();
    models.retain(|path| path.exists());
    models.sort();
    assert!(models.len() >= 15, "{models:?}");
    models
}

/// The prompts of a model of `fixtures/oracle`.
pub fn oracle_prompts(model: &Path) -> Vec<Vec<TokenId>> {
    let folder = model.ancestors().find(|folder| folder.join("manifest.json").exists()).unwrap();
    prompts_of(folder).into_iter().map(|prompt| prompt.tokens).collect()
}

fn folder() -> PathBuf {
    oracle("qwen3")
}
