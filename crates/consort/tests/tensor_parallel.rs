//! `--tensor-parallel`, through the binary and with real rank processes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;

const ARCHITECTURES: [&str; 6] = ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "gemma3"];
/// How far logits may be from those of one process: partial sums are rounded.
const APART_MAX: f32 = 1e-3;
/// With quantised weights activations are rounded to int8, and one whose last bit differs may be rounded the other way.
const APART_INT8_MAX: f32 = 0.25;

fn oracle(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(path)
}

fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(args).env("CONSORT_THREADS", "1").env_remove("CONSORT_LOG").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    consort(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ids(value: &Value) -> String {
    value.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(",")
}

fn tokens(model: &Path, prompt: &str, max: usize, options: &[&str]) -> Vec<u32> {
    let max = max.to_string();
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", prompt, "--max-tokens", &max];
    let output = run(&[&args, options].concat());
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn logits(model: &Path, prompt: &str, options: &[&str]) -> Vec<f32> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("logits");
    let args = [
        "debug",
        "logits",
        model.to_str().unwrap(),
        "--tokens",
        prompt,
        "--chunk",
        "7",
        "--out",
        file.to_str().unwrap(),
    ];
    let output = run(&[&args, options].concat());
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    fs::read(file).unwrap().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn greedy_tokens_are_the_oracles_on_any_number_of_ranks() {
    for architecture in ARCHITECTURES {
        let manifest = fs::read(oracle(architecture).join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let prompt = &manifest["prompts"][0];
        let greedy: Vec<u32> = serde_json::from_value(prompt["greedy"]["f32"]["tokens"].clone()).unwrap();
        let model = oracle(architecture).join("model-f32");
        for ranks in ["1", "2", "3", "4"] {
            let found = tokens(&model, &ids(&prompt["ids"]), greedy.len(), &["--tensor-parallel", ranks]);
            assert_eq!(found, greedy, "{architecture} on {ranks} ranks");
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

/// A server with ranks, and what it writes to its log.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(ranks: &str) -> Self {
        let model = oracle("qwen3/model-f32");
        let args = ["serve", model.to_str().unwrap(), "--port", "0", "--tensor-parallel", ranks];
        let args = [&args[..], &["--served-model-name", "m"]].concat();
        let mut child = consort(&args).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = log.find(|line| line.contains("listening on http://")).unwrap();
        let address = line.split("http://").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        // Read on, so that it never waits for anybody to read.
        thread::spawn(move || log.for_each(drop));
        let server = Self { child, address };
        server.wait_until_ready();
        server
    }

    fn open(&self, request: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
        write!(stream, "{request} HTTP/1.1\r\n{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    fn ask(&self, request: &str, body: &str) -> String {
        let mut answer = String::new();
        self.open(request, body).read_to_string(&mut answer).unwrap();
        answer
    }

    fn wait_until_ready(&self) {
        while !self.ask("GET /ready", "").starts_with("HTTP/1.1 200") {
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| parent_and_state(pid).is_some_and(|(of, state)| of == parent && state != "Z")).collect()
}

fn parent_and_state(pid: u32) -> Option<(u32, String)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.to_owned();
    Some((fields.next()?.parse().ok()?, state))
}

fn is_gone(pid: u32) -> bool {
    parent_and_state(pid).is_none_or(|(_, state)| state == "Z")
}

fn kill(signal: &str, pid: u32) {
    assert!(Command::new("sh").args(["-c", &format!("kill -{signal} {pid}")]).status().unwrap().success());
}

/// The text of a completion, streamed or not.
fn completion(answer: &str) -> String {
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let pieces = body.lines().filter_map(|line| line.strip_prefix("data: ").or(line.starts_with('{').then_some(line)));
    let values = pieces.filter_map(|piece| serde_json::from_str::<Value>(piece).ok());
    values.filter_map(|value| value["choices"][0]["text"].as_str().map(str::to_owned)).collect()
}

#[test]
fn an_answer_goes_on_with_the_same_text_when_a_rank_is_killed() {
    let server = Server::start("2");
    let request = r#"{"model": "m", "prompt": "a b c", "max_tokens": 60, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;
    let whole = completion(&server.ask("POST /v1/completions", &request.replace("STREAM", "false")));
    assert!(!whole.is_empty());
    for index in [0, 1] {
        let before = server.ranks();
        assert_eq!(before.len(), 2);
        let mut stream = BufReader::new(server.open("POST /v1/completions", &request.replace("STREAM", "true")));
        let mut answer = String::new();
        while !answer.contains("\"text\"") {
            assert_ne!(stream.read_line(&mut answer).unwrap(), 0, "{answer}");
        }
        kill("KILL", before[index]);
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(completion(&answer), whole, "{answer}");
        server.wait_until_ready();
        let after = server.ranks();
        assert_eq!(after.len(), 2);
        assert!(after.contains(&before[1 - index]), "the other one stays, with its weights");
    }
}

#[test]
fn no_rank_outlives_its_supervisor() {
    let mut server = Server::start("3");
    let ranks = server.ranks();
    assert_eq!(ranks.len(), 3);
    kill("KILL", server.child.id());
    server.child.wait().unwrap();
    while !ranks.iter().all(|&rank| is_gone(rank)) {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_end_with_an_orderly_shutdown() {
    let mut server = Server::start("2");
    let ranks = server.ranks();
    kill("TERM", server.child.id());
    assert!(server.child.wait().unwrap().success());
    assert!(ranks.iter().all(|&rank| is_gone(rank)));
}
