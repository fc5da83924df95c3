//! Single ranks: replies to valid and invalid lines.

use std::fs;
use std::io::Write;
use std::process::Command;

use kernels::cpu::CpuOptions;
use serde_json::{Value, json};

use crate::rank::{Rank, check_error, load_dense};

#[test]
fn the_lines_of_the_protocol_page_are_answered_as_it_says() {
    let mut rank = Rank::start(1, 4);
    rank.check(&json!({"op": "ping"}), &json!({"op": "pong", "rank": 1, "world_size": 4, "cuda_device": 3}));
    rank.refused(&json!({"op": "explode"}), "unknown_op");
    rank.refused(&json!({"op": "nccl_sanity_check"}), "nccl_not_initialised");
    rank.refused(&json!({"op": "init", "comm_id": "not digits"}), "nccl_init_failed");
    rank.refused(&json!({"op": "clear_kv_cache", "model_id": "none"}), "model_not_loaded");
    rank.refused(&json!({"op": "generate_step", "model_id": "none", "tokens": [1], "offset": 0}), "model_not_loaded");
    rank.refused(&json!({"op": "unload_model", "model_id": "none"}), "model_not_loaded");
    rank.shut_down();

    let mut alone = Rank::start(0, 1);
    alone.check(&json!({"op": "init", "comm_id": "deadbeef"}), &json!({"op": "init_ok"}));
    let sum = json!({"op": "nccl_sanity_result", "observed_sum": 1});
    alone.check(&json!({"op": "nccl_sanity_check"}), &sum);
    alone.shut_down();
}

#[test]
fn bad_lines_are_refused_in_their_turn_and_the_rank_lives_on() {
    let mut rank = Rank::start(0, 1);
    let lines =
        ["nonsense", "", "   ", "[1,2]", "{\"op\":7}", "{\"op\":\"ping\"", "{\"op\":\"step\",\"id\":9}", "null"];
    lines.iter().for_each(|line| rank.send(line));
    rank.input.as_mut().unwrap().write_all(b"\xff\xfe\n").unwrap();
    rank.send("{\"op\":\"ping\"}");
    for _ in 0..lines.len() - 2 + 1 {
        check_error(&rank.reply(), "bad_request");
    }
    assert_eq!(rank.reply()["op"], "pong", "blank lines are passed over");
    rank.check(
        &json!({"op": "ping", "new_field": [1, {}]}),
        &json!({"op":"pong","rank":0,"world_size":1,"cuda_device":3}),
    );
    rank.shut_down();
}

#[test]
fn what_can_not_be_loaded_is_refused_by_kind() {
    let mut rank = Rank::start(0, 1);
    let good = load_dense("llama", "m");
    let changed = |key: &str, value: Value| {
        let mut request = good.clone();
        request[key] = value;
        request
    };
    rank.refused(&changed("config_json", json!("{\"model_type\": \"abacus\"}")), "unsupported_arch");
    rank.refused(&changed("config_json", json!("{")), "load_failed");
    rank.refused(&changed("safetensors_paths", json!(["/nowhere/model.safetensors"])), "load_failed");
    rank.refused(&changed("safetensors_paths", json!(["model.safetensors"])), "bad_request");
    rank.refused(&changed("safetensors_paths", json!([])), "load_failed");
    rank.shut_down();
}

#[test]
fn weights_are_quantised_by_candles_names() {
    let mut rank = Rank::start(0, 1);
    let quantised = |name: &str| {
        let mut request = load_dense("llama", "m");
        request["quant"] = json!(name);
        request
    };
    for name in ["q8_1", "Q8K", "q8_0m", "int4", ""] {
        let reply = rank.ask(&quantised(name));
        check_error(&reply, "load_failed");
        assert!(reply["message"].as_str().unwrap().contains(&format!("{name:?}")), "{reply}");
    }
    // Rows of this model have 64 elements: a superblock has 256.
    for name in ["q2k", "q3_k", "Q4K", "q4km", "q4_k_m", "q5k", "Q5_K_M", "q6k"] {
        let reply = rank.ask(&quantised(name));
        check_error(&reply, "load_failed");
        assert!(reply["message"].as_str().unwrap().contains("multiple of 256"), "{reply}");
    }
    // Parameters of the layers and the head. The embedding is not counted: see the test of footprints.
    const LINEAR: u64 = 4 * 49_152 + 320 * 64;
    for (name, block_bytes) in [
        ("f32", None),
        ("F16", None),
        ("bf16", None),
        ("q4_0", Some(18)),
        ("Q41", Some(20)),
        ("q5_0", Some(22)),
        ("q51", Some(24)),
        ("Q8_0", Some(34)),
    ] {
        rank.check(&quantised(name), &json!({"op": "load_dense_shard_ok"}));
        let step = json!({"op": "generate_step", "model_id": "m", "tokens": vec![1; 200], "offset": 0});
        rank.check(&step, &json!({"op": "generate_step_ok"}));
        let stats = rank.ask(&json!({"op": "stats", "id": 1}));
        let weights = stats["stats"]["weight_bytes"].as_u64().unwrap();
        if let Some(block_bytes) = block_bytes {
            let linear = LINEAR / 32 * block_bytes;
            let expected = linear..linear + linear / 5;
            assert!(expected.contains(&weights), "{name}: {weights}, not {expected:?}");
        }
        rank.check(&json!({"op": "unload_model", "model_id": "m"}), &json!({"op": "unloaded"}));
    }
    rank.shut_down();
}

#[test]
fn threads_are_limited_for_foreign_leaders_too() {
    let loaded = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["--worker", "--rank", "0", "--tp-size", "1"]).args(arguments);
        let mut rank = Rank::spawn(command);
        rank.check(&load_dense("llama", "m"), &json!({"op": "load_dense_shard_ok"}));
        // Counts all threads: a thread has its name only once it runs.
        let count = fs::read_dir(format!("/proc/{}/task", rank.child.id())).unwrap().count();
        rank.shut_down();
        count
    };
    let limited = loaded(&["--threads-max", "1"]);
    assert_eq!(loaded(&[]) - limited, CpuOptions::default().threads - 1, "threads beside the first");
}
