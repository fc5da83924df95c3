//! `consort serve` as a process: it listens at once, loads the model in the background, serves requests, and ends on
//! signals.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests

mod bounded;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use bounded::{Log, WAIT_MAX, ended};

struct Server {
    child: Child,
    log: Log,
    address: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle/qwen3/model-f32");
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["serve", model.to_str().unwrap(), "--port", "0", "--threads", "1"]).args(args);
        let mut child = command.env_remove("CONSORT_LOG").stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let line = log.line_with("listening on http://");
        let address = line.split("http://").nth(1).unwrap();
        let address = address.split([' ', '"']).next().unwrap().trim().to_owned();
        Self { child, log, address }
    }

    fn wait_until_ready(&self) {
        self.log.line_with("ready: ");
        assert!(self.exchange("GET /ready HTTP/1.1", "").starts_with("HTTP/1.1 200"));
    }

    fn send(&self, line: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        let head = "host: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n";
        write!(stream, "{line}\r\n{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
        stream
    }

    fn exchange(&self, line: &str, body: &str) -> String {
        let mut answer = String::new();
        self.send(line, body).read_to_string(&mut answer).unwrap();
        answer
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.child.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    }

    /// The exit status of the process, and the rest of its log.
    fn end(mut self) -> (Option<i32>, String) {
        let rest = self.log.rest();
        (ended(&mut self.child).code(), rest)
    }
}

const COMPLETIONS: &str = "POST /v1/completions HTTP/1.1";

#[test]
fn it_answers_and_finishes_what_it_began_when_told_to_stop() {
    let server = Server::start(&["--served-model-name", "small", "--served-model-name", "tiny"]);
    server.wait_until_ready();
    let answer = server.exchange(COMPLETIONS, r#"{"model": "tiny", "prompt": "a", "max_tokens": 4}"#);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""model":"small""#), "{answer}");

    let body = r#"{"prompt": "a", "max_tokens": 200, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.send(COMPLETIONS, body);
    let mut first = [0; 12];
    stream.read_exact(&mut first).unwrap();
    server.signal("TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
    let (code, log) = server.end();
    assert_eq!(code, Some(0), "{log}");
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let server = Server::start(&["--grace", "3600"]);
    server.wait_until_ready();
    // Longer than the test waits: only the second signal ends it.
    let body = r#"{"prompt": "a", "n": 128, "max_tokens": 1000, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.send(COMPLETIONS, body);
    stream.read_exact(&mut [0; 12]).unwrap();
    server.signal("INT");
    server.log.line_with("shutting down");
    server.signal("INT");
    let (code, log) = server.end();
    assert_eq!(code, Some(130), "{log}");
}

#[test]
fn answers_that_take_too_long_are_ended_with_an_error() {
    let server = Server::start(&["--grace", "0"]);
    server.wait_until_ready();
    let body = r#"{"prompt": "a", "n": 128, "max_tokens": 1000, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.send(COMPLETIONS, body);
    stream.read_exact(&mut [0; 12]).unwrap();
    server.signal("TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(r#""code":"shutting_down""#) && !rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn logs_are_json_where_asked_for() {
    let server = Server::start(&["--log", "json"]);
    let line = server.log.line_with("ready: ");
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["level"], "INFO");
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_model_that_cannot_be_loaded_ends_it_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    let path = folder.path().to_str().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_consort")).args(["serve", path, "--port", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("listening") && log.lines().last().unwrap().starts_with("error: "), "{log}");
}

#[test]
fn options_that_make_no_sense_are_refused_before_anything_starts() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "# none yet\n").unwrap();
    for args in [
        ["--tls-cert", "nowhere.pem"],
        ["--api-key", ""],
        ["--api-key-file", keys.path().to_str().unwrap()],
        ["--kv-memory", "much"],
        ["--speculate", "99"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_consort")).arg("serve").args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("listening"), "{args:?}");
    }
}
