//! `chat --url`: against a real server, and against one that misbehaves.

use std::sync::mpsc::channel;
use std::thread;

use serde_json::Value;
use testing::reserved_port::ReservedPort;
use testing::serving::Server;

use crate::chat_server::ChatServer;
use crate::{check_refused, oracle, piped, text};

const SHORT: [&str; 4] = ["--temperature", "0", "--max-tokens", "9"];

/// The answers and the notes to these lines.
fn converse(options: &[&str], lines: &str) -> (String, String) {
    let output = piped(&[&["chat"], options].concat(), lines.as_bytes());
    assert!(output.status.success(), "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_server_answers_as_its_model_does_here() {
    let server = Server::start(&["--api-key", "a-key"]);
    let url = format!("http://{}", server.address);
    let lines = "/system Be brief.\nHello\nBye\n/retry\n";
    let here = converse(&[&[oracle("qwen3/model-f32").as_str()], &SHORT[..]].concat(), lines);
    let remote = [&["--url", &url, "--api-key", "a-key", "--stats"], &SHORT[..]].concat();
    let there = converse(&remote, lines);
    assert_eq!(there.0, here.0);
    let first = there.1.lines().next().unwrap();
    assert!(first.starts_with("m. "), "the server's model is taken: {first}");
    assert!(there.1.contains("(cut off: max_tokens is 9)") && there.1.contains("9 tokens, "), "{}", there.1);
    // `/v1` may be part of the address, and a model may be named.
    let url_of_api = format!("{url}/v1");
    let named = [&["--url", &url_of_api, "--api-key", "a-key", "--model", "m"], &SHORT[..]].concat();
    assert_eq!(converse(&named, lines).0, here.0);
    let refused = converse(&["--url", &url, "--model", "m"], "Hello\n");
    assert!(refused.0.is_empty() && refused.1.contains("wants a key"), "{}", refused.1);
    check_refused(&["chat", "--url", &url, "--api-key", "wrong"], 1, "does not accept this key");
}

#[test]
fn wrong_options_and_servers_that_are_not_there_are_told() {
    let unused = ReservedPort::reserve();
    let url = format!("http://{}", unused.address());
    check_refused(&["chat", "--url", &url], 1, "connection refused");
    check_refused(&["chat", "--url", "localhost:8000"], 2, "write it as http://HOST:PORT");
    check_refused(&["chat", "m", "--model", "n"], 2, "cannot be used with");
    let refused = check_refused(&["chat", "--url", &url, "--context", "64"], 2, "--context is for a model");
    assert!(refused.contains("--url"), "{refused}");
    check_refused(&["chat", "--url", &url, "--tensor-parallel", "2"], 2, "--tensor-parallel is for a model");
}

#[test]
fn a_server_that_misbehaves_gets_one_error_and_the_chat_goes_on() {
    let (server, lines) = (ChatServer::start(), "one\ntwo\nthree\nfour\n/model other\n/retry\n");
    let url = server.url.clone();
    let (finish, finished) = channel();
    thread::spawn(move || finish.send(converse(&["--url", &url], lines)));
    let next = |message: &str| assert_eq!(server.asked(), message);
    next("one");
    server.text("begun");
    server.close();
    next("two");
    server.bytes(b"data: <garbage>\n\n");
    server.close();
    next("three");
    server.bytes(&b"x".repeat(3 << 20));
    server.close();
    next("four");
    server.bytes(b"data: {\"error\": {\"message\": \"out of memory\"}}\n\n");
    server.close();
    let last = server.request();
    assert_eq!((&last["model"], last["messages"].as_array().unwrap().len()), (&Value::from("other"), 1));
    server.end_with("good");
    let (out, notes) = finished.recv_timeout(testing::bounded::WAIT_MAX).unwrap();
    assert_eq!(out, "begun\ngood\n", "{notes}");
    let errors: Vec<_> = notes.lines().filter(|line| line.starts_with("error: ")).collect();
    let expected =
        ["in the middle of the answer", "sent no answer, but: <garbage>", "longer than 1024 KiB", "out of memory"];
    assert_eq!(errors.len(), expected.len(), "{notes}");
    for (error, why) in errors.iter().zip(expected) {
        assert!(error.contains(why), "{error}");
    }
}
