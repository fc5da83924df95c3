//! The programs of `tests/kwaai`.

pub mod listener;
pub mod node;

use std::net::SocketAddr;
use std::process::Command;

use serde::Deserialize;

use crate::python::PythonServer;

/// A program of `tests/kwaai`.
pub fn python(program: &str) -> Command {
    crate::python::python("kwaai", program)
}

/// What a coordinator generated for a prompt.
#[derive(Deserialize)]
pub struct Generated {
    pub tokens: Vec<u32>,
    /// Before each token.
    pub logits: Vec<Vec<f32>>,
}

/// Runs a program that ends by itself, and returns what it printed.
pub async fn run(mut command: Command) -> String {
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}\n{said}");
    printed
}

/// Generates with the coordinator program on the servers at `shards`.
pub async fn generate(
    shards: &[SocketAddr],
    arguments: &[&str],
    prompts: &[Vec<u32>],
    tokens: usize,
) -> Vec<Generated> {
    let mut command = python("coordinator.py");
    for shard in shards {
        command.args(["--shard", &shard.to_string()]);
    }
    command.args(arguments).args(["--tokens", &tokens.to_string()]).arg(serde_json::to_string(prompts).unwrap());
    run(command).await.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A block server.
pub fn block_server(arguments: &[&str]) -> PythonServer {
    server("server.py", arguments)
}

pub fn registry(arguments: &[&str]) -> PythonServer {
    server("registry.py", arguments)
}

fn server(program: &str, arguments: &[&str]) -> PythonServer {
    let mut program = python(program);
    program.args(arguments);
    PythonServer::start(program)
}
