//! The programs of `tests/cake`, and the small models of `fixtures/oracle` that they run.

use std::fs;
use std::process::Command;

use serde_json::Value;
use types::TokenId;

use crate::oracle;
use crate::python::PythonServer;

/// How many tokens are generated.
pub const TOKENS: usize = 6;

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
    crate::python::python("cake", program)
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

/// A worker program.
pub fn worker(arguments: &[&str]) -> PythonServer {
    let mut program = python("worker.py");
    program.args(arguments);
    PythonServer::start(program)
}
