//! Tokens and logits of chains with a stage of ranks, against one process.

use std::path::Path;

use cluster::coordinator::Arithmetic;
use engine::{Engine, Executor, ExecutorError, inspect};
use kernels::cpu::Level;
use model::Checkpoint;
use types::TokenId;

use crate::rank;
use testing::cluster_chain::answers::{answers, options, requests};
use testing::cluster_chain::prompt;
use testing::cluster_chain::setup::{TestNode, chain, oracle_model, wait_for, whole_at};

/// Those that tensor parallelism supports.
const MODELS: [&str; 7] = ["llama", "qwen2", "qwen3", "mistral", "mistral_odd", "qwen3_moe", "gemma3"];
/// How far logits may differ from those of one process: partial sums are rounded.
const APART_MAX: f32 = 1e-3;
const TOKENS: usize = 16;

fn layers(model: &Path) -> usize {
    Checkpoint::open(model).unwrap().description().layers.len()
}

fn logits<E: Executor>(executor: &mut E, tokens: &[TokenId]) -> Vec<f32> {
    let mut all = Vec::new();
    inspect::logits::<_, ExecutorError>(executor, tokens, 32, |row| {
        all.extend_from_slice(row);
        Ok(())
    })
    .unwrap();
    all
}

/// Logits and greedy tokens of a prompt, which is computed again from the prefix cache.
fn outputs<E: Executor>(mut executor: E, tokens: &[TokenId]) -> (Vec<f32>, Vec<TokenId>) {
    let logits = logits(&mut executor, tokens);
    let mut engine = Engine::with_options(executor, options(24));
    let greedy = inspect::greedy(&mut engine, tokens, TOKENS).unwrap();
    assert_eq!(inspect::greedy(&mut engine, tokens, TOKENS).unwrap(), greedy, "from the prefix cache");
    assert!(engine.stats().prefix_hit_tokens > 0);
    (logits, greedy)
}

/// Compares a chain with one process, and with itself.
fn check(model: &Path, nodes: &[&TestNode], split: &[usize]) {
    let (name, tokens) = (model.display(), prompt(model, 70, 3));
    let level = Level::detect();
    let (expected, greedy) = outputs(whole_at(model, level), &tokens);
    let run = || outputs(chain(model, nodes, Some(split), level, Arithmetic::Best), &tokens);
    let (found, found_greedy) = run();
    let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(found.len() == expected.len() && apart <= APART_MAX, "{name} as {split:?}: {apart}");
    assert_eq!(found_greedy, greedy, "{name} as {split:?}");
    assert!(run() == (found, found_greedy), "{name} as {split:?} again");
}

pub fn all_models() {
    let node = TestNode::start(2, Level::detect());
    for name in MODELS {
        let model = oracle_model(name);
        check(&model, &[&node], &[layers(&model) - 1]);
    }
}

pub fn every_place() {
    let level = Level::detect();
    let (shared, plain) = (TestNode::start(2, level), [(); 2].map(|()| TestNode::start(1, level)));
    let model = oracle_model("llama");
    assert_eq!(layers(&model), 4);
    check(&model, &[&shared], &[4]);
    check(&model, &[&shared, &plain[0]], &[1, 3]);
    check(&model, &[&plain[0], &shared, &plain[1]], &[1, 1, 1]);
    check(&model, &[&plain[0], &plain[1], &shared], &[1, 1, 2]);
}

pub fn unshared() {
    let (level, model) = (Level::detect(), oracle_model("llama"));
    let node = TestNode::start(9, level);
    let chain = chain(&model, &[&node], None, level, Arithmetic::Best);
    let report = wait_for(&chain, |report| report.nodes.iter().any(|node| node.not_used.is_some()));
    assert_eq!(report.stages.iter().filter(|(address, _)| address.is_some()).count(), 0, "{report:?}");
    let why = report.nodes[0].not_used.as_ref().unwrap();
    assert!(why.contains("cannot be shared by 9 ranks"), "{why}");
    let expected = answers(whole_at(&model, level), requests(&model), options(64)).0;
    assert!(answers(chain, requests(&model), options(64)).0 == expected);
}

pub fn exact() {
    let (level, model) = (Level::detect(), oracle_model("llama"));
    let node = TestNode::start(2, level);
    let chain = chain(&model, &[&node], Some(&[3]), level, Arithmetic::Common);
    assert_eq!(rank::pids(), [0_u32; 0], "the node runs its layers itself");
    let (found, chain) = answers(chain, requests(&model), options(64));
    assert!(found == answers(whole_at(&model, level), requests(&model), options(64)).0);
    assert_eq!(chain.builder().report().stages.len(), 2);
}
