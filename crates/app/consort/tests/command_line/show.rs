//! `show`: what is told about a model, compared with the files that it was made from.

use std::fs;

use serde_json::Value;

use crate::{check_refused, consort, oracle, succeed};
use testing::bounded;

fn report(args: &[&str]) -> Value {
    serde_json::from_str(&succeed(&[&["show", "--json"], args].concat())).unwrap()
}

fn config(architecture: &str) -> Value {
    serde_json::from_slice(&fs::read(oracle(&format!("{architecture}/model-f32/config.json"))).unwrap()).unwrap()
}

#[test]
fn the_sizes_are_those_of_the_config() {
    let (report, config) = (report(&[&oracle("qwen3/model-f32")]), config("qwen3"));
    for (ours, theirs) in [
        ("layers", "num_hidden_layers"),
        ("hidden", "hidden_size"),
        ("heads", "num_attention_heads"),
        ("kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("feed_forward", "intermediate_size"),
        ("vocabulary", "vocab_size"),
        ("context", "max_position_embeddings"),
    ] {
        assert_eq!(report[ours], config[theirs], "{ours}");
    }
    assert_eq!(report["architecture"], "qwen3");
    assert_eq!(report["weights"][0]["format"], "f32");
    assert_eq!(report["weights"][0]["bytes"].as_u64().unwrap(), 4 * report["parameters"].as_u64().unwrap());
    assert_eq!(report["chat_template"], true);
    let need = &report["need"];
    assert_eq!(need["fits"], true);
    let sum: u64 = ["weights_bytes", "kv_bytes", "working_bytes"].iter().map(|part| need[part].as_u64().unwrap()).sum();
    assert_eq!(need["total_bytes"], sum);
    assert!(report["ranks"].as_array().unwrap().contains(&Value::from(2)));
}

#[test]
fn options_change_what_it_would_need() {
    let model = oracle("qwen3/model-f32");
    let kv = |options: &[&str]| {
        let report = report(&[&[model.as_str()], options].concat());
        report["need"]["kv_bytes"].as_u64().unwrap()
    };
    assert_eq!(kv(&["--context", "64"]) * 2, kv(&["--context", "128"]));
    assert_eq!(report(&[&model, "--tensor-parallel", "2"])["need"]["ranks"], 2);
}

#[test]
fn of_experts_only_the_chosen_ones_are_active() {
    let (report, config) = (report(&[&oracle("qwen3_moe/model-f32")]), config("qwen3_moe"));
    assert_eq!(report["experts"], config["num_experts"]);
    assert_eq!(report["experts_used"], config["num_experts_per_tok"]);
    assert!(report["active_parameters"].as_u64().unwrap() < report["parameters"].as_u64().unwrap());
}

#[test]
fn a_gguf_is_shown_with_its_formats_and_template() {
    let model = oracle("qwen3/gguf/tiny-qwen3-q8_0.gguf");
    let shown = succeed(&["show", &model]);
    for words in
        ["architecture       qwen3", "q8_0 ", "chat template      yes", "memory needed", "possible ranks     1, 2"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    assert!(succeed(&["show", &model, "--template"]).contains("im_start"));
}

#[test]
fn a_pulled_model_is_found_by_its_name() {
    let home = tempfile::tempdir().unwrap();
    let repo = home.path().join("hub/models--maker--tiny");
    let snapshot = repo.join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), "abc").unwrap();
    let file = "tiny-llama-q8_0.gguf";
    fs::copy(oracle(&format!("llama/gguf/{file}")), snapshot.join(file)).unwrap();
    let mut command = consort(&["show", "maker/tiny:Q8_0", "--json"]);
    let output = bounded::output(command.env("HF_HOME", home.path()));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["name"], &report["architecture"]), (&"maker/tiny:Q8_0".into(), &"llama".into()));
}

#[test]
fn what_is_not_here_is_not_fetched() {
    check_refused(&["show", "no/where"], 1, "`consort pull no/where` fetches it");
    check_refused(&["show", "./missing.gguf"], 1, "no such file");
    check_refused(&["show"], 2, "required");
}
