//! The programs of `tests/cake`, and the small models of `fixtures/oracle` that they run.
#![allow(dead_code)] // each test program uses only some of these

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::Value;
use types::TokenId;

/// How many tokens are generated.
pub const TOKENS: usize = 6;

/// A folder within `fixtures/oracle`.
pub fn oracle(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fixtures/oracle").join(path)
}

pub struct Prompt {
    pub tokens: Vec<TokenId>,
    pub greedy: Vec<TokenId>,
}

/// Short prompts of a model, with their greedy continuations: `f32`, or `bf16w` for weights in bf16.
pub fn prompts(model: &str, arithmetic: &str) -> Vec<Prompt> {
    prompts_named(model, arithmetic, &["len1", "short"])
}

pub fn prompts_named(model: &str, arithmetic: &str, names: &[&str]) -> Vec<Prompt> {
    let manifest: Value = serde_json::from_slice(&fs::read(oracle(model).join("manifest.json")).unwrap()).unwrap();
    let tokens = |ids: &Value| ids.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect();
    let all = manifest["prompts"].as_array().unwrap().iter();
    let chosen = all.filter(|prompt| names.contains(&prompt["name"].as_str().unwrap()));
    let prompt = |prompt: &Value| Prompt {
        tokens: tokens(&prompt["ids"]),
        greedy: tokens(&prompt["greedy"][arithmetic]["tokens"]),
    };
    chosen.map(prompt).collect()
}

/// A program of `tests/cake`.
pub fn python(program: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg("-B").arg(program);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/cake"));
    command
}

/// What a master program printed: the tokens of each prompt, and what it said about the set-up.
pub fn run_master(arguments: &[&str], prompts: &[Prompt]) -> (Vec<Vec<TokenId>>, String) {
    let ids: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.tokens.iter().map(|token| token.0).collect()).collect();
    let count = ["--tokens", &TOKENS.to_string()];
    let output =
        python("master.py").args(arguments).args(count).arg(serde_json::to_string(&ids).unwrap()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    let line = |line: &str| serde_json::from_str::<Vec<u32>>(line).unwrap().into_iter().map(TokenId).collect();
    (printed.lines().map(line).collect(), said)
}

/// A worker program. Dropping it ends the process.
pub struct PythonWorker {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub address: SocketAddr,
}

impl PythonWorker {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = python("worker.py").args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        Self { child, stdout, address: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    /// The next line that it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PythonWorker {
    fn drop(&mut self) {
        self.kill();
        let mut rest = String::new();
        let _ = self.stdout.read_to_string(&mut rest);
    }
}
