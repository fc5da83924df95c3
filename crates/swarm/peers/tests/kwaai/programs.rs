//! The programs of `tests/kwaai`.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde::Deserialize;

/// A program of `tests/kwaai`.
pub fn python(program: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg("-B").arg(program);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../tests/kwaai"));
    command
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

/// A program that serves. Dropping it ends the process.
pub struct PythonServer {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub address: SocketAddr,
}

impl PythonServer {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_program("server.py", arguments)
    }

    pub fn start_program(program: &str, arguments: &[&str]) -> Self {
        let mut child = python(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap();
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

    fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PythonServer {
    fn drop(&mut self) {
        self.kill();
        let mut rest = String::new();
        let _ = self.stdout.read_to_string(&mut rest);
    }
}
