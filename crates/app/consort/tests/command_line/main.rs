//! The command line as people use it: pipes, wrong usage, commands of a chat, and what only happens in a terminal. Through
//! the binary, on the small models of `fixtures/oracle`.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests

mod chat;
mod chat_server;
mod configuration;
mod help;
mod pages;
mod ps;
mod pty;
mod remote_chat;
mod run;
mod servers;
mod services;
mod show;
mod terminal;

use std::fs;
use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use testing::bounded;

fn oracle(path: &str) -> String {
    let path = testing::oracle(path);
    path.to_str().unwrap().to_owned()
}

/// The model in `qwen3/model-f32` with a change in one of its JSON files.
fn changed_model(file: &str, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(oracle("qwen3/model-f32")).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join(file);
    let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
    folder
}

/// Uses empty caches and no network: only the fixtures are available.
fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    let nowhere = env!("CARGO_TARGET_TMPDIR");
    command.args(args).env("HF_HOME", nowhere).env("XDG_CACHE_HOME", nowhere).env("XDG_STATE_HOME", nowhere);
    command.env("HF_HUB_OFFLINE", "1").env("PATH", nowhere).env("CONSORT_THREADS", "1");
    command.env_remove("CONSORT_API_KEY").env_remove("NO_COLOR").env("CONSORT_CONFIG", "").env_remove("RUST_LOG");
    command.env_remove("OPENAI_API_KEY");
    command
}

/// Runs a command with this standard input.
fn piped(args: &[&str], input: &[u8]) -> Output {
    let mut command = consort(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that fails early does not read its input.
    let _ = child.stdin.take().unwrap().write_all(input);
    bounded::output_of(child)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The output of a command that must succeed.
fn succeed(args: &[&str]) -> String {
    let output = piped(args, b"");
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// A command must fail with `code`, without output, and with an error that contains `why`.
fn check_refused(args: &[&str], code: i32, why: &str) -> String {
    let output = piped(args, b"");
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
    assert!(output.stdout.is_empty() && stderr.contains(why), "{args:?}: {stderr}");
    stderr
}
