//! `consort serve` as a process: it listens at once, loads the model in the background, serves requests, and ends on
//! signals.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // helpers of tests

use std::io::{Read, Write, stderr};
use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use testing::oracle;
use testing::serving::{Server, ask, metric};

fn start(options: &[&str]) -> Server {
    start_under("true", options)
}

/// `limits`: a shell command that sets limits of the process.
fn start_under(limits: &str, options: &[&str]) -> Server {
    Server::listen(limits, oracle("qwen3/model-f32").to_str().unwrap(), options, &[])
}

const COMPLETIONS: &str = "POST /v1/completions";

#[test]
fn it_answers_and_finishes_what_it_began_when_told_to_stop() {
    let server = start(&["--served-model-name", "small", "--served-model-name", "tiny"]);
    server.wait_until_ready();
    let answer = server.ask(COMPLETIONS, r#"{"model": "tiny", "prompt": "a", "max_tokens": 4}"#);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""model":"small""#), "{answer}");

    let body = r#"{"prompt": "a", "max_tokens": 200, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.open(COMPLETIONS, body);
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
    let server = start(&["--grace", "3600"]);
    server.wait_until_ready();
    // Longer than the test waits: only the second signal ends it.
    let body = r#"{"prompt": "a", "n": 128, "max_tokens": 1000, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.open(COMPLETIONS, body);
    stream.read_exact(&mut [0; 12]).unwrap();
    server.signal("INT");
    server.log.line_with("shutting down");
    let ready = server.ask("GET /ready", "");
    assert!(ready.starts_with("HTTP/1.1 503") && ready.contains(r#""state":"draining""#), "{ready}");
    let metrics = server.ask("GET /metrics", "");
    assert!(metrics.starts_with("HTTP/1.1 200") && metrics.contains("consort_connections "), "{metrics}");
    let refused = server.ask(COMPLETIONS, r#"{"prompt": "a"}"#);
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains(r#""code":"shutting_down""#), "{refused}");
    server.signal("INT");
    let (code, log) = server.end();
    assert_eq!(code, Some(130), "{log}");
}

#[test]
fn answers_that_take_too_long_are_ended_with_an_error() {
    let server = start(&["--grace", "0"]);
    server.wait_until_ready();
    let body = r#"{"prompt": "a", "n": 128, "max_tokens": 1000, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.open(COMPLETIONS, body);
    stream.read_exact(&mut [0; 12]).unwrap();
    server.signal("TERM");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(r#""code":"shutting_down""#) && !rest.contains("[DONE]"), "{rest}");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn logs_are_json_where_asked_for_and_numbers_are_numbers() {
    let server = start(&["--log", "json", "--strict-model"]);
    let line = |words: &str| serde_json::from_str::<Value>(&server.log.line_with(words)).unwrap();
    let ready = line("ready: ");
    assert_eq!((&ready["level"], &ready["threads"]), (&json!("INFO"), &json!(1)));
    assert_eq!(ready["url"], format!("http://{}", server.address));
    for field in ["context", "kv_tokens", "kv_bytes", "memory_bytes", "seconds"] {
        assert!(ready[field].is_number(), "{field}: {ready}");
    }
    assert!(ready["cpu"].is_string(), "{ready}");
    // Probes and files of the page are not logged.
    for path in ["/health", "/ready", "/metrics", "/status", "/", "/page/icon.svg"] {
        server.ask(&format!("GET {path}"), "");
    }
    server.ask(COMPLETIONS, r#"{"prompt": "a", "max_tokens": 4, "ignore_eos": true}"#);
    let line = serde_json::from_str::<Value>(&server.log.next_line()).unwrap();
    let answer =
        if line["message"] == "answer" { line } else { serde_json::from_str(&server.log.next_line()).unwrap() };
    assert_eq!((&answer["message"], &answer["ended"]), (&json!("answer"), &json!("length")), "{answer}");
    assert_eq!(answer["completion_tokens"], 4);
    for field in ["prompt_tokens", "first_token_ms", "tokens_per_s", "ms"] {
        assert!(answer[field].is_number(), "{field}: {answer}");
    }
    // What a client sends is cut.
    let body = format!(r#"{{"prompt": "a", "model": "{}"}}"#, "x".repeat(1 << 20));
    assert!(server.ask(COMPLETIONS, &body).starts_with("HTTP/1.1 404"));
    let line = server.log.line_with("does not exist");
    assert!(line.len() < 1000, "{} bytes", line.len());
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn keys_are_read_again_and_the_admin_port_needs_none() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "first\nsecond\n").unwrap();
    let server = start(&["--api-key-file", keys.path().to_str().unwrap(), "--admin", "127.0.0.1:0"]);
    let status = |key: &str| {
        let answer = ask(&server.address, "GET /v1/models", &format!("x-api-key: {key}\r\n"), "");
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    assert_eq!(["first", "second", "third"].map(status), [200, 200, 401]);
    std::fs::write(keys.path(), "second\nthird\n").unwrap();
    server.signal("HUP");
    server.log.line_with("the API keys were read again");
    assert_eq!(["first", "second", "third"].map(status), [401, 200, 200]);
    std::fs::write(keys.path(), "# none\n").unwrap();
    server.signal("HUP");
    server.log.line_with("the API keys stay as they are");
    assert_eq!(["first", "second", "third"].map(status), [401, 200, 200]);

    let admin = server.admin.as_deref().unwrap();
    assert!(server.ask("GET /metrics", "").starts_with("HTTP/1.1 401"));
    for path in ["/health", "/metrics", "/status"] {
        let answer = ask(admin, &format!("GET {path}"), "", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    let metrics = ask(admin, "GET /metrics", "", "");
    let refused = metrics.lines().find(|line| line.starts_with("consort_requests_refused_total")).unwrap();
    assert!(refused.contains(r#"reason="invalid_api_key""#) || refused.contains(r#"reason="missing_api_key""#));
    assert!(ask(admin, "GET /v1/models", "", "").starts_with("HTTP/1.1 404"));
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
}

/// Reads a stream to its end. Returns its text and the longest time without a part of it.
fn timed(mut stream: TcpStream) -> (String, Duration) {
    let (mut text, mut bytes, mut longest) = (String::new(), [0; 1 << 16], Duration::ZERO);
    loop {
        let begun = Instant::now();
        let read = stream.read(&mut bytes).unwrap();
        longest = longest.max(begun.elapsed());
        if read == 0 {
            return (text, longest);
        }
        text += &String::from_utf8_lossy(&bytes[..read]);
    }
}

/// Where few files may be open, connections leave some of them for everything else.
#[test]
fn with_few_descriptors_probes_and_streams_are_answered_however_many_connections_there_are() {
    let server = start_under("ulimit -n 256", &[]);
    server.wait_until_ready();
    let body = r#"{"prompt": "a", "n": 8, "max_tokens": 400, "stream": true, "ignore_eos": true}"#;
    let mut stream = server.open(COMPLETIONS, body);
    stream.read_exact(&mut [0; 12]).unwrap();
    let stream = thread::spawn(move || timed(stream));
    // Silence, half a preface of HTTP/2, half a header, half a body.
    let half_body = format!("{COMPLETIONS} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{{");
    let beginnings = ["", "PRI * HTTP/2.0", "GET /health HTTP/1.1\r\nho", &half_body];
    let open = |beginning: &&str| {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        // The server may have dropped it already.
        let _ = stream.write_all(beginning.as_bytes());
        stream
    };
    let idle: Vec<_> = beginnings.iter().cycle().take(400).map(open).collect();
    assert!(server.ask("GET /health", "").starts_with("HTTP/1.1 200"));
    let (text, longest) = stream.join().unwrap();
    assert!(text.contains("data: [DONE]"), "{text}");
    // Not by a macro, whose output the test harness keeps to itself.
    writeln!(stderr(), "the longest gap of a stream beside {} connections: {longest:?}", idle.len()).unwrap();
    let metrics = server.ask("GET /metrics", "");
    let value = |name: &str| metric(&metrics, name);
    assert_eq!(value("consort_descriptors_max "), 256.0);
    assert!(value("consort_descriptors ") < 200.0 && value("consort_connections_evicted_total ") > 0.0, "{metrics}");
    drop(idle);
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
}

#[test]
fn a_model_that_cannot_be_loaded_ends_it_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    // It can be opened, and has no tokenizer.
    let files = std::fs::read_dir(oracle("qwen3/model-f32")).unwrap().map(|file| file.unwrap());
    for file in files.filter(|file| file.file_name() != "tokenizer.json") {
        std::os::unix::fs::symlink(file.path(), folder.path().join(file.file_name())).unwrap();
    }
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
        ["--cors", "nonsense"],
        ["--admin", "9000"],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_consort")).arg("serve").args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("listening"), "{args:?}");
    }
}
