//! `consort join`, and chains with it, through the binary: with ranks, and exact.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use testing::bounded::{self, wait_until};
use testing::joined_node::{JoinedNode, KEY};
use testing::oracle;
use testing::serving::{Server, apart, completion, consort, is_gone, kill, text};

const PROMPT: &str = "3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3";
/// The largest difference of logits from those of one process: partial sums are rounded.
const APART_MAX: f32 = 1e-3;

/// What `consort debug` prints of a model, with a cache of its own.
fn debug(what: &str, model: &Path, options: &[&str]) -> Vec<u8> {
    let cache = TempDir::new().unwrap();
    let file = cache.path().join("out");
    let mut command = consort(&["debug", what, model.to_str().unwrap(), "--tokens", PROMPT]);
    command.env("XDG_CACHE_HOME", cache.path()).args(options);
    if what == "logits" {
        command.arg("--out").arg(&file);
    }
    let output = bounded::output(&mut command);
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    if what == "logits" { fs::read(file).unwrap() } else { output.stdout }
}

fn logits(model: &Path, options: &[&str]) -> Vec<f32> {
    let bytes = debug("logits", model, options);
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn a_machine_that_joins_with_two_ranks_gives_the_tokens_of_one_process() {
    let (node, model) = (JoinedNode::start(&["--tensor-parallel", "2"]), oracle("llama/model-f32"));
    let cluster = ["--node", &node.address, "--split", "3", "--cluster-key", KEY];
    assert_eq!(debug("tokens", &model, &cluster), debug("tokens", &model, &[]));
    let (whole, shared) = (logits(&model, &[]), logits(&model, &cluster));
    assert!(whole != shared, "the ranks take part");
    assert!(apart(&whole, &shared) <= APART_MAX, "{}", apart(&whole, &shared));
    assert_eq!(logits(&model, &cluster), shared, "again");
    // Exact stages run in one process.
    assert_eq!(logits(&model, &[&cluster[..], &["--exact"]].concat()), whole);
    wait_until("the ranks have ended", || node.ranks().is_empty());
}

#[test]
fn machines_with_other_instructions_are_exact_when_asked() {
    let (node, model) = (JoinedNode::start(&["--cpu-level", "scalar"]), oracle("llama/gguf/tiny-llama-q8_0.gguf"));
    // By default, the level decides about these.
    let math = ["--decode-math", "int8", "--prompt-math", "int8"];
    let cluster = [&["--node", &node.address, "--split", "2", "--cluster-key", KEY][..], &math].concat();
    let lowest = logits(&model, &[&["--cpu-level", "scalar"][..], &math].concat());
    for exact in ["--exact", "--exact=scalar"] {
        assert_eq!(logits(&model, &[&cluster[..], &[exact]].concat()), lowest, "{exact}");
    }
    assert!(!debug("tokens", &model, &cluster).is_empty());
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_rank_of_a_stage_is_killed() {
    let (node, model) = (JoinedNode::start(&["--tensor-parallel", "2"]), oracle("qwen3/model-f32"));
    let cache = TempDir::new().unwrap();
    let options = ["--node", &node.address, "--split", "1", "--cluster-key", KEY];
    let server = Server::start_under("true", &model, &options, &[("XDG_CACHE_HOME", cache.path().to_str().unwrap())]);
    let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
    let whole = completion(&server.ask("POST /v1/completions", &request.replace("STREAM", "false")));
    assert!(!whole.is_empty());
    for index in [0, 1] {
        let before = node.ranks();
        assert_eq!(before.len(), 2);
        let mut answer = server.begin_answer(&request.replace("STREAM", "true"));
        answer.interrupt(|| kill("KILL", before[index]));
        assert_eq!(answer.finish(), whole);
        wait_until("the lost rank is replaced", || node.ranks().len() == 2);
        assert!(node.ranks().contains(&before[1 - index]), "the other one stays, with its weights");
    }
    let ranks = node.ranks();
    drop(node);
    wait_until("ranks end with their node", || ranks.iter().all(|&pid| is_gone(pid)));
}

#[test]
fn options_that_do_not_go_together_are_refused() {
    let model = oracle("llama/model-f32");
    let refused = |options: &[&str], why: &str| {
        let args = [&["debug", "tokens", model.to_str().unwrap(), "--tokens", "1"], options].concat();
        let output = bounded::output(&mut consort(&args));
        assert!(!output.status.success() && output.stdout.is_empty());
        assert!(text(&output.stderr).contains(why), "{options:?}: {}", text(&output.stderr));
    };
    refused(&["--node", "127.0.0.1:1", "--tensor-parallel", "2"], "do not go with --cluster, --node and --plan");
    refused(&["--exact"], "it needs --cluster, --node or --plan");
    refused(&["--exact=mmx", "--node", "127.0.0.1:1"], "mmx");
    let above = ["--exact=avx2", "--cpu-level", "scalar", "--node", "127.0.0.1:1", "--cluster-key", KEY];
    refused(&above, "this machine computes with scalar");
}
