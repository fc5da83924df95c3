//! `--tensor-parallel`, through the binary and with real rank processes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::net::TcpStream;
use std::path::Path;

use kernels::StepLimits;
use kernels::cpu::CpuOptions;
use model::{Checkpoint, Limits, LoadOptions};
use ranks::group::{Deadlines, Group, GroupConfig};
use ranks::protocol::shard::ShardSpec;
use serde_json::Value;
use types::WorldSize;

use testing::bounded::{ended, wait_until};
use testing::oracle;
use testing::serving::{Server, apart, completion, ids, is_gone, kill, logits, run, text, tokens};
use testing::watchdog::watched;

const MODELS: [&str; 7] = ["llama", "qwen2", "qwen3", "mistral", "mistral_odd", "qwen3_moe", "gemma3"];
/// The largest difference of logits from those of one process: partial sums are rounded.
const APART_MAX: f32 = 1e-3;
/// With quantised weights, activations are rounded to int8, and a difference in the last bit may change the rounding.
const APART_INT8_MAX: f32 = 0.25;

#[test]
fn greedy_tokens_are_the_oracles_on_any_number_of_ranks() {
    for name in MODELS {
        let manifest = fs::read(oracle(name).join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let prompt = &manifest["prompts"][0];
        let (folder, result) = match manifest["primary"].as_str() {
            Some("f32") => ("model-f32", "f32"),
            _ => ("model-bf16", "bf16w"),
        };
        let greedy: Vec<u32> = serde_json::from_value(prompt["greedy"][result]["tokens"].clone()).unwrap();
        let model = oracle(name).join(folder);
        for ranks in ["1", "2", "3", "4"] {
            let options = ["--compute", "f32", "--tensor-parallel", ranks];
            let found = tokens(&model, &ids(&prompt["ids"]), greedy.len(), &options);
            assert_eq!(found, greedy, "{name} on {ranks} ranks");
        }
    }
}

#[test]
fn logits_are_near_those_of_one_process_and_repeat_bit_for_bit() {
    for (model, options, apart_max) in [
        ("llama/model-f32", &[][..], APART_MAX),
        ("qwen3_moe/model-f32", &[], APART_MAX),
        ("llama/model-bf16-sharded", &["--compute", "f32"], APART_MAX),
        ("llama/gguf/tiny-llama-q8_0.gguf", &["--prompt-math", "int8"], APART_INT8_MAX),
        ("qwen3/model-bf16", &["--quant", "q8_0", "--prompt-math", "int8"], APART_INT8_MAX),
    ] {
        let (model, prompt) = (oracle(model), "3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3");
        let whole = logits(&model, prompt, options);
        for ranks in ["2", "3"] {
            let options = [options, &["--tensor-parallel", ranks]].concat();
            let found = logits(&model, prompt, &options);
            let apart = apart(&found, &whole);
            assert!(apart <= apart_max, "{} {options:?}: {apart}", model.display());
            assert_eq!(logits(&model, prompt, &options), found, "{} again", model.display());
        }
    }
}

#[test]
fn what_ranks_can_not_share_is_refused() {
    let model = oracle("llama/model-f32");
    let output = run(&["debug", "tokens", model.to_str().unwrap(), "--tokens", "1", "--tensor-parallel", "9"]);
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(text(&output.stderr).contains("cannot be shared by 9 ranks"), "{}", text(&output.stderr));
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_both_numbers() {
    let model = oracle("llama/model-f32");
    let args = ["serve", model.to_str().unwrap(), "--port", "0", "--tensor-parallel", "2", "--kv-memory", "64T"];
    let output = run(&args);
    assert!(!output.status.success());
    let log = text(&output.stderr);
    assert!(log.contains("insufficient memory: ") && log.contains(" MiB are free"), "{log}");
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_rank_is_killed() {
    // Idle connections leave descriptors for a new rank.
    let server = Server::start_under("ulimit -n 256", &oracle("qwen3/model-f32"), &["--tensor-parallel", "2"], &[]);
    let _idle: Vec<_> = (0..300).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
    let whole = completion(&server.ask("POST /v1/completions", &request.replace("STREAM", "false")));
    assert!(!whole.is_empty());
    for index in [0, 1] {
        let before = server.ranks();
        assert_eq!(before.len(), 2);
        let mut answer = server.begin_answer(&request.replace("STREAM", "true"));
        answer.interrupt(|| kill("KILL", before[index]));
        assert_eq!(answer.finish(), whole);
        server.wait_until_ready();
        let after = server.ranks();
        assert_eq!(after.len(), 2);
        assert!(after.contains(&before[1 - index]), "the other one stays, with its weights");
    }
}

/// Replaces a file as a download does: the new one gets the name of the old one.
fn replace(path: &Path, bytes: &[u8]) {
    let new = path.with_extension("new");
    fs::write(&new, bytes).unwrap();
    fs::rename(new, path).unwrap();
}

#[test]
fn a_rank_that_finds_other_weights_is_refused_until_the_right_ones_are_back() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        for file in fs::read_dir(oracle("qwen3/model-f32")).unwrap().map(|file| file.unwrap().path()) {
            fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
        }
        let weights = folder.path().join("model.safetensors");
        let right = fs::read(&weights).unwrap();
        let header = 8 + usize::try_from(u64::from_le_bytes(right[..8].try_into().unwrap())).unwrap();
        let mut other = right.clone();
        other[header..].iter_mut().skip(3).step_by(4).for_each(|high_byte| *high_byte ^= 0x80);

        let digest = Checkpoint::open(folder.path()).unwrap().digest().to_string();
        let server = Server::start_under("true", folder.path(), &["--tensor-parallel", "2"], &[]);
        let whole = completion(&server.ask("POST /v1/completions", SLOW_REQUEST));
        assert!(!whole.is_empty());
        replace(&weights, &other);
        let before = server.ranks();
        kill("KILL", before[1]);
        wait_until("the new rank is refused by name and digest", || {
            let ready = server.ask("GET /ready", "");
            ready.starts_with("HTTP/1.1 503")
                && ready.contains(&format!("not {}…", &digest[..12]))
                && ["rank 0: ", "rank 1: "].iter().any(|rank| ready.contains(&format!("{rank}its model files are not")))
        });
        assert!(server.ask("GET /status", "").contains("its model files are not"));
        replace(&weights, &right);
        server.wait_until_ready();
        assert_eq!(completion(&server.ask("POST /v1/completions", SLOW_REQUEST)), whole);
        assert!(server.ranks().contains(&before[0]), "the other one stays, with its weights");
    });
}

#[test]
fn a_group_whose_ranks_have_other_weights_does_not_start() {
    let (model, other) = (oracle("qwen3/model-f32"), oracle("qwen3/model-bf16"));
    let checkpoint = Checkpoint::open(&model).unwrap();
    let step = StepLimits { rows: 8, sequences: 1, pages: 8 };
    let limits = Limits { step, logit_rows: 1, kv_pages: 8, positions: 64 };
    let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
    let config = GroupConfig {
        world: WorldSize::new(2).unwrap(),
        program: env!("CARGO_BIN_EXE_consort").into(),
        model_id: "model".to_owned(),
        shard: ShardSpec::new(model.to_str().unwrap().to_owned(), &LoadOptions { keep: None, limits }, cpu),
        limits,
        vocab: checkpoint.description().vocab,
        hidden: checkpoint.description().hidden,
        digest: Checkpoint::open(&other).unwrap().digest(),
        deadlines: Deadlines::default(),
        hosts: None,
        environment: Vec::new(),
    };
    let error = Group::start(config, &mut |_| {}).unwrap_err().to_string();
    assert!(error.starts_with("rank ") && error.contains("its model files are not those of the group"), "{error}");
}

const SLOW_REQUEST: &str =
    r#"{"model": "m", "prompt": "a b c", "max_tokens": 60, "temperature": 0, "ignore_eos": true}"#;

#[test]
fn a_rank_that_hangs_in_a_step_is_replaced_at_its_deadlines_and_the_answer_goes_on() {
    watched(|| {
        let folder = tempfile::tempdir().unwrap();
        let claim = folder.path().join("claimed");
        // During the second completion.
        let fault = format!("rank=1,at=step,after=90,do=slow,seconds=3600,once={}", claim.display());
        let options = ["--tensor-parallel", "2", "--rank-deadlines", "step=3,drain=3"];
        let server = Server::start_with(&options, &[("CONSORT_FAULT", &fault)]);
        let before = server.ranks();
        let whole = completion(&server.ask("POST /v1/completions", SLOW_REQUEST));
        assert!(!whole.is_empty() && !claim.exists());
        assert_eq!(completion(&server.ask("POST /v1/completions", SLOW_REQUEST)), whole);
        assert!(claim.exists());
        assert_eq!(before.iter().filter(|&&rank| is_gone(rank)).count(), 1, "the other one stays, with its weights");
        let metrics = server.ask("GET /metrics", "");
        for line in [
            r#"consort_replays_total{model="m"} 1"#,
            r#"consort_rank_restarts_total{model="m",rank="0"} 0"#,
            r#"consort_rank_restarts_total{model="m",rank="1"} 1"#,
        ] {
            assert!(metrics.contains(line), "{line}: {metrics}");
        }
    });
}

#[test]
fn a_request_whose_steps_take_too_long_every_time_ends_with_rank_lost() {
    watched(|| {
        let options = ["--tensor-parallel", "2", "--rank-deadlines", "step=0.5"];
        let server = Server::start_with(&options, &[("CONSORT_FAULT", "rank=1,at=step,do=slow,seconds=1")]);
        let before = server.ranks();
        let answer = server.ask("POST /v1/completions", SLOW_REQUEST);
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: "), "{answer}");
        // Rank 0 did not answer either: it waited for rank 1.
        assert!(
            answer.contains("rank_lost") && answer.contains("rank 1: it did not answer a step in time"),
            "{answer}"
        );
        let metrics = server.ask("GET /metrics", "");
        assert!(metrics.contains(r#"consort_replays_total{model="m"} 3"#), "{metrics}");
        server.wait_until_ready();
        assert_eq!(server.ranks(), before, "who answers while there is time to give way keeps its weights");
    });
}

#[test]
fn deadlines_that_make_no_sense_are_refused() {
    let model = oracle("llama/model-f32");
    for (given, words) in [
        ("step=0", "step is a number of seconds from 0.1 to 86400"),
        ("step=5m", "step is a number of seconds from 0.1 to 86400"),
        ("stop=5", "there is no deadline \"stop\", only start, join, "),
        ("60", "write NAME=SECONDS"),
    ] {
        let output = run(&["debug", "tokens", model.to_str().unwrap(), "--tokens", "1", "--rank-deadlines", given]);
        assert_eq!(output.status.code(), Some(2), "{given}");
        assert!(text(&output.stderr).contains(words), "{given}: {}", text(&output.stderr));
    }
}

#[test]
fn no_rank_outlives_its_supervisor() {
    let mut server = Server::start(&["--tensor-parallel", "3"]);
    let ranks = server.ranks();
    assert_eq!(ranks.len(), 3);
    kill("KILL", server.child.id());
    ended(&mut server.child);
    wait_until("the ranks of a killed supervisor are gone", || ranks.iter().all(|&rank| is_gone(rank)));
}

#[test]
fn ranks_end_with_an_orderly_shutdown() {
    let mut server = Server::start(&["--tensor-parallel", "2"]);
    let ranks = server.ranks();
    kill("TERM", server.child.id());
    assert!(ended(&mut server.child).success());
    assert!(ranks.iter().all(|&rank| is_gone(rank)));
}
