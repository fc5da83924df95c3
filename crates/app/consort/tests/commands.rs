//! The commands that run a model, through the binary, on the small models of `fixtures/oracle`.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use kernels::cpu::Level;
use serde_json::Value;
use testing::{bounded, needs, oracle};

/// The largest difference to Hugging Face's f32 logits that another order of summation explains.
const DENSE_TOLERANCE: f32 = 2e-4;
const EXPERTS_TOLERANCE: f32 = 5e-4;

fn manifest(architecture: &str) -> Value {
    serde_json::from_slice(&fs::read(oracle(architecture).join("manifest.json")).unwrap()).unwrap()
}

fn prompt<'a>(manifest: &'a Value, name: &str) -> &'a Value {
    manifest["prompts"].as_array().unwrap().iter().find(|prompt| prompt["name"] == name).unwrap()
}

fn ids(value: &Value) -> String {
    let ids: Vec<_> = value.as_array().unwrap().iter().map(Value::to_string).collect();
    ids.join(",")
}

/// Uses empty caches and no network: only the fixtures are available.
fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    let nowhere = env!("CARGO_TARGET_TMPDIR");
    command.args(args).env("HF_HOME", nowhere).env("XDG_CACHE_HOME", nowhere).env("XDG_STATE_HOME", nowhere);
    command.env("HF_HUB_OFFLINE", "1").env("PATH", nowhere).stdin(Stdio::null());
    // Many of these processes run at once.
    command.env("CONSORT_THREADS", "1").env("CONSORT_CONFIG", "");
    command
}

fn run(args: &[&str]) -> Output {
    bounded::output(&mut consort(args))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The output of a command that must succeed.
fn succeed(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A command must fail with `code`, without output, and with an error that contains `why`.
fn check_refused(args: &[&str], code: i32, why: &str) {
    let output = run(args);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty() && stderr.contains(why), "{args:?}: {stderr}");
    if code == 1 {
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

fn check_greedy(model: &str, prompt: &Value, expected: &Value, options: &[&str]) {
    let path = oracle(model);
    let tokens = ids(&prompt["ids"]);
    let mut args = vec!["debug", "tokens", path.to_str().unwrap(), "--tokens", &tokens, "--max-tokens", "32"];
    args.extend(options);
    let found: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(&found, expected, "{model} {} {options:?}", prompt["name"]);
}

#[test]
fn debug_tokens_gives_the_oracles_greedy_tokens() {
    for architecture in ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "gemma3"] {
        let manifest = manifest(architecture);
        for name in ["len1", "short", "mid"] {
            let prompt = prompt(&manifest, name);
            check_greedy(&format!("{architecture}/model-f32"), prompt, &prompt["greedy"]["f32"]["tokens"], &[]);
        }
    }
    let manifest = manifest("mistral_odd");
    for name in ["len1", "short", "mid"] {
        let (prompt, options) = (prompt(&manifest, name), ["--compute", "f32"]);
        check_greedy("mistral_odd/model-bf16", prompt, &prompt["greedy"]["bf16w"]["tokens"], &options);
    }
}

#[test]
fn debug_tokens_are_the_same_in_any_chunk_and_on_any_number_of_threads() {
    let manifest = manifest("qwen3");
    let prompt = prompt(&manifest, "mid");
    for options in [["--chunk", "1"], ["--chunk", "7"], ["--chunk", "64"], ["--threads", "2"]] {
        check_greedy("qwen3/model-f32", prompt, &prompt["greedy"]["f32"]["tokens"], &options);
    }
}

#[test]
fn every_instruction_set_of_this_cpu_gives_the_same_greedy_tokens() {
    let manifest = manifest("llama");
    let prompt = prompt(&manifest, "short");
    let expected = &prompt["greedy"]["f32"]["tokens"];
    check_greedy("llama/model-f32", prompt, expected, &["--cpu-level", "scalar"]);
    let path = oracle("llama/model-f32");
    for level in [Level::Avx2, Level::Avx512, Level::Amx] {
        let tokens = ids(&prompt["ids"]);
        let args = ["debug", "tokens", path.to_str().unwrap(), "--tokens", &tokens];
        let output = bounded::output(consort(&args).env("CONSORT_CPU", level.name()));
        if needs::level(level, Level::detect()) {
            assert!(output.status.success(), "{}", text(&output.stderr));
            assert_eq!(&serde_json::from_slice::<Value>(&output.stdout).unwrap(), expected, "{level}");
        } else {
            assert!(text(&output.stderr).contains(&format!("does not have {level}")), "{}", text(&output.stderr));
        }
    }
}

#[test]
fn debug_logits_writes_those_of_every_position() {
    for (architecture, tolerance) in [("llama", DENSE_TOLERANCE), ("qwen3_moe", EXPERTS_TOLERANCE)] {
        let manifest = manifest(architecture);
        let prompt = prompt(&manifest, "short");
        let expected = fs::read(oracle(architecture).join(prompt["logits"]["f32"]["file"].as_str().unwrap())).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("logits.bin");
        let model = oracle(&format!("{architecture}/model-f32"));
        let (model, out_name, tokens) = (model.to_str().unwrap(), out.to_str().unwrap(), ids(&prompt["ids"]));
        for chunk in ["512", "5"] {
            let args = ["debug", "logits", model, "--tokens", &tokens, "--out", out_name, "--chunk", chunk];
            assert_eq!(succeed(&args), "");
            let found = fs::read(&out).unwrap();
            assert_eq!(found.len(), expected.len());
            let floats = |bytes: &[u8]| {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
            };
            let difference = |(a, b): (&f32, &f32)| (a - b).abs();
            let worst = floats(&found).iter().zip(&floats(&expected)).map(difference).fold(0.0, f32::max);
            assert!(worst <= tolerance, "{architecture} in chunks of {chunk}: {worst}");
        }
    }
}

#[test]
fn run_answers_with_the_oracles_text_and_reports_it_as_json() {
    let manifest = manifest("qwen3");
    let prompt = prompt(&manifest, "chat");
    let (system, user) = (prompt["messages"][0]["content"].as_str(), prompt["messages"][1]["content"].as_str());
    let model = oracle("qwen3/model-f32");
    let greedy = ["--temperature", "0", "--max-tokens", "16"];
    let mut args = vec!["run", model.to_str().unwrap(), user.unwrap(), "--system", system.unwrap()];
    args.extend(greedy);
    let plain = run(&args);
    assert!(plain.status.success(), "{}", text(&plain.stderr));

    args.push("--json");
    let report: Value = serde_json::from_str(&succeed(&args)).unwrap();
    let expected: Vec<_> = prompt["greedy"]["f32"]["tokens"].as_array().unwrap()[..16].to_vec();
    assert_eq!(report["tokens"].as_array().unwrap(), &expected);
    assert_eq!(report["prompt_tokens"], prompt["length"]);
    assert_eq!(report["finish_reason"], "length");
    assert!(report["timings"]["decode_s"].as_f64().unwrap() > 0.0);
    assert_eq!(format!("{}\n", report["text"].as_str().unwrap()), text(&plain.stdout));
}

#[test]
fn run_reads_a_raw_prompt_from_standard_input() {
    let model = oracle("llama/model-f32");
    let model = model.to_str().unwrap();
    let options = ["--raw", "--json", "--temperature", "0", "--max-tokens", "4"];
    let mut args = vec!["run", model, "-"];
    args.extend(options);
    let mut child = consort(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Morning near often\n").unwrap();
    let piped: Value = serde_json::from_slice(&bounded::output_of(child).stdout).unwrap();
    args[2] = "Morning near often";
    let given: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!((&piped["tokens"], &piped["prompt_tokens"]), (&given["tokens"], &given["prompt_tokens"]));
}

#[test]
fn a_gguf_brings_its_own_tokenizer_and_template() {
    for (folder, file) in
        [("qwen3/model-f32", "qwen3/gguf/tiny-qwen3-q8_0.gguf"), ("llama/model-f32", "llama/gguf/tiny-llama-f16.gguf")]
    {
        let [folder, file] = [folder, file].map(|model| {
            let model = oracle(model);
            let args = ["run", model.to_str().unwrap(), "Morning!", "--json", "--max-tokens", "1"];
            serde_json::from_str::<Value>(&succeed(&args)).unwrap()
        });
        assert_eq!(folder["prompt_tokens"], file["prompt_tokens"]);
    }
}

#[test]
fn the_same_seed_gives_the_same_answer_and_another_seed_another() {
    let model = oracle("qwen2/model-f32");
    let answer = |seed: &str| {
        let args = ["run", model.to_str().unwrap(), "Hello", "--seed", seed, "--json", "--max-tokens", "24"];
        let options = ["--temperature", "2", "--top-p", "1", "--top-k", "0", "--min-p", "0"];
        let report: Value = serde_json::from_str(&succeed(&[&args[..], &options[..]].concat())).unwrap();
        report["tokens"].clone()
    };
    assert_eq!(answer("1"), answer("1"));
    assert_ne!(answer("1"), answer("2"));
}

#[test]
fn chat_keeps_a_conversation_until_it_is_cleared() {
    let model = oracle("llama/model-f32");
    let args = ["chat", model.to_str().unwrap(), "--temperature", "0", "--max-tokens", "5"];
    let converse = |lines: &str| {
        let mut child =
            consort(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = bounded::output_of(child);
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let once = converse("Hello\n");
    assert!(!once.trim().is_empty());
    assert_eq!(converse("Hello\n/clear\nHello\n/exit\nnever read\n"), once.repeat(2));
    assert_ne!(converse("Hello\nHello\n"), once.repeat(2));
}

#[test]
fn mistakes_get_one_clear_sentence() {
    let model = oracle("llama/model-f32");
    let model = model.to_str().unwrap();
    let gguf = oracle("llama/gguf/tiny-llama-q8_0.gguf");
    check_refused(&["run", "a", "b", "c"], 2, "`c` is one word too many");
    check_refused(&["run", model, "x", "--quant", "q9"], 2, "use q8_0");
    check_refused(&["run", model, "x", "--cpu-level", "mmx"], 2, "possible values");
    check_refused(&["debug", "tokens", model, "--tokens", "1,x"], 2, "invalid");
    check_refused(&["run", model, "x", "--threads", "99999999999"], 2, "CPUs");
    check_refused(&["bench", model, "-t", "1,99999999999"], 2, "CPUs");
    check_refused(&["bench", model, "-p", "0", "-n", "18446744073709551615"], 1, "made for");
    check_refused(&["run", "hello", "world"], 1, "neither a file, a folder, a name of the catalogue");
    check_refused(&["run", "no/where", "x"], 1, "HF_HUB_OFFLINE");
    check_refused(&["run", "./missing.gguf", "x"], 1, "no such file");
    check_refused(&["run", gguf.to_str().unwrap(), "x", "--quant", "q4_0"], 1, "cannot be turned into q4_0");
    check_refused(&["debug", "tokens", model, "--tokens", "1,999999"], 1, "outside the vocabulary");
    check_refused(&["debug", "logits", model, "--tokens", "1", "--out", "/"], 1, "create /");
}

#[test]
fn whoever_stops_reading_gets_no_complaint() {
    let model = oracle("llama/model-f32");
    let args = ["run", model.to_str().unwrap(), "Hello", "--max-tokens", "64", "--temperature", "0"];
    let mut child = consort(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = bounded::output_of(child);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}
