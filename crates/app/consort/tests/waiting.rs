//! What users see while a part of the model is away: which layers they wait for, that the wait ends, and what was lost.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[path = "command_line/pty.rs"]
#[allow(dead_code)] // tests of the command line use more of it
mod pty;

use serde_json::{Value, json};

use pty::Pty;
use testing::bounded::wait_until;
use testing::cake_programs::worker;
use testing::serving::{Server, consort, kill};
use testing::swarm_peer::SwarmPeer;
use testing::watchdog::watched;
use testing::{needs, oracle};

/// Of four layers.
const MODEL: &str = "qwen3/model-f32";
const KEY: &str = "a key for tests of cake";
const REQUEST: &str =
    r#"{"model": "m", "prompt": "a b c", "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": true}"#;

fn waiting_for(server: &Server) -> Value {
    let answer = server.ask("GET /v1/cluster", "");
    let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    body["waiting_for"].clone()
}

/// Has a stream lose the machine that `lose` ends, and waits for its end. The server tells what it waits for: layers 2..4
/// if `layers` says so, for a reason with one of `words`. The stream ends with an error that has the others.
fn check_loss(server: &Server, lose: impl FnOnce(), layers: Value, [reason, error]: [&str; 2]) {
    assert_eq!(waiting_for(server), Value::Null);
    let mut answer = server.begin_answer(REQUEST);
    answer.interrupt(lose);
    wait_until("the server tells what it waits for", || {
        let waiting = waiting_for(server);
        let is_told = waiting["layers"] == layers && waiting["reason"].as_str().is_some_and(|why| why.contains(reason));
        is_told && waiting["since"].is_u64() && waiting["seconds"].is_f64()
    });
    let rest = answer.rest();
    let told = rest.lines().find(|line| line.contains("rank_lost")).unwrap_or_else(|| panic!("{rest}"));
    assert!(told.contains(error), "{told}");
    assert!(!rest.contains("[DONE]"), "{rest}");
}

#[test]
fn a_stream_on_a_cake_worker_that_is_gone_ends_in_time_and_names_it() {
    if !needs::python() {
        return;
    }
    watched(|| {
        let model = oracle(MODEL);
        let mut worker = worker(&["--key", KEY, "--model", model.to_str().unwrap()]);
        let address = worker.address.to_string();
        let options = ["--cake-worker", &address, "--cluster-key", KEY, "--split", "2", "--replay", "3"];
        let server = Server::start_under("true", &model, &options, &[]);
        // The reason names the layers.
        let lost = format!("cake worker {address} with layers 2..4");
        let told = format!("it was not replaced within 3 s: stage 1: a part of the model was lost: {lost}");
        check_loss(&server, || worker.kill(), Value::Null, [&lost, &told]);
    });
}

#[test]
fn a_stream_on_peers_that_are_gone_ends_in_time_and_names_their_layers() {
    watched(|| {
        let model = oracle(MODEL);
        let first = SwarmPeer::start(&model, "0..2", &[]);
        let mut second = SwarmPeer::start(&model, "2..4", &["--bootstrap", &first.address]);
        let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &first.address, "--replay", "3"];
        let server = Server::start_under("true", &model, &swarm, &[]);
        let told = "nobody has run layers 2..4 for 3 s: ";
        check_loss(&server, || second.kill(), json!({"start": 2, "end": 4}), ["the connection ended", told]);
    });
}

/// Dropping it ends the process.
struct Terminal(Option<Pty>);

impl Drop for Terminal {
    fn drop(&mut self) {
        self.0.iter().for_each(|pty| kill("KILL", pty.id()));
    }
}

#[test]
fn a_chat_tells_which_layers_it_waits_for_and_goes_on_when_they_are_there() {
    watched(|| {
        let model = oracle(MODEL);
        let first = SwarmPeer::start(&model, "0..2", &[]);
        let mut second = SwarmPeer::start(&model, "2..4", &["--bootstrap", &first.address]);
        let cache = tempfile::tempdir().unwrap();
        let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &first.address];
        let args = [&["chat", model.to_str().unwrap(), "--stats=always", "--max-tokens", "5"][..], &swarm].concat();
        let mut command = consort(&args);
        command.env("XDG_CACHE_HOME", cache.path());
        let mut chat = Terminal(Some(Pty::start(command, 200)));
        let pty = chat.0.as_mut().unwrap();
        pty.read_to("/exit leaves.");
        pty.read_to("> ");
        second.kill();
        pty.send(b"a b c\r");
        pty.read_to("waiting for layers 2..4, ");
        let again = SwarmPeer::start(&model, "2..4", &["--bootstrap", &first.address]);
        pty.read_to("tokens/s");
        pty.read_to("> ");
        drop(again);
        pty.send(b"a b c\r");
        pty.read_to("waiting for layers 2..4, ");
        // As long as the documents say.
        pty.read_to("nobody has run layers 2..4 for 30 s: ");
        pty.read_to("> ");
        pty.send(b"/exit\r");
        assert_eq!(chat.0.take().unwrap().end().0, Some(0));
    });
}
