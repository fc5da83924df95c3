//! What a server whose layers are served by a swarm tells of its peers, and what a peer tells of itself: `/v1/cluster` and metrics,
//! with real processes on loopback.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use testing::bounded::{Log, WAIT_MAX, wait_until};
use testing::oracle;
use testing::serving::{Server, ask, completion, consort, metric};

/// A running `consort swarm serve`.
struct SwarmPeer {
    child: Child,
    id: String,
    /// How others join the swarm through it.
    bootstrap: String,
    admin: String,
    _log: Log,
    _folder: TempDir,
}

impl SwarmPeer {
    fn start(layers: &str, options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (model, identity) = (oracle("qwen3/model-f32"), folder.path().join("identity"));
        let mut command = consort(&["swarm", "serve", model.to_str().unwrap(), "--layers", layers]);
        command.args(["--listen", "/ip4/127.0.0.1/tcp/0", "--no-lan", "--admin", "127.0.0.1:0", "--identity"]);
        let mut child = command.arg(identity).args(options).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let word_after = |words: &str| {
            let line = log.line_with(words);
            line.split(words).nth(1).unwrap().split([' ', '"']).next().unwrap().trim().to_owned()
        };
        let admin = word_after("probes and metrics on http://");
        let bootstrap = word_after("others join with --bootstrap ");
        let id = bootstrap.rsplit('/').next().unwrap().to_owned();
        Self { child, id, bootstrap, admin, _log: log, _folder: folder }
    }

    /// The name under which a server shows it.
    fn name(&self) -> &str {
        &self.id[self.id.len() - 8..]
    }

    fn metrics(&self) -> String {
        body_of(&ask(&self.admin, "GET /metrics", "", ""))
    }

    fn has_sessions(&self) -> bool {
        metric(&self.metrics(), "consort_block_sessions{") > 0.0
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for SwarmPeer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn body_of(answer: &str) -> String {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    body.to_owned()
}

fn cluster(server: &Server) -> Value {
    serde_json::from_str(&body_of(&server.ask("GET /v1/cluster", ""))).unwrap()
}

fn is_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|value| value > 0.0)
}

fn request(tokens: usize, is_streamed: bool) -> String {
    let request = json!({
        "model": "m", "prompt": "a b c", "max_tokens": tokens, "temperature": 0, "ignore_eos": true, "stream": is_streamed,
    });
    request.to_string()
}

fn node<'a>(told: &'a Value, peer: &SwarmPeer) -> &'a Value {
    let nodes = told["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["peer"]["id"] == peer.id.as_str()).unwrap_or_else(|| panic!("{}: {told}", peer.id))
}

/// The ids of the peers in the chain that was formed last. A peer may have two neighbouring spans.
fn chain(told: &Value) -> Vec<&str> {
    let stages = told["stages"].as_array().unwrap();
    let mut ids: Vec<&str> = stages.iter().filter_map(|stage| stage["peer"]["id"].as_str()).collect();
    ids.dedup();
    ids
}

#[test]
fn a_swarm_is_told_before_the_first_chain_while_it_runs_and_after_a_loss() {
    let attic = SwarmPeer::start("0..2", &[]);
    let model = oracle("qwen3/model-f32");
    let options =
        ["--served-model-name", "m", "--swarm", "--no-lan", "--swarm-wait", "120", "--bootstrap", &attic.bootstrap];
    let server = Server::listen("true", model.to_str().unwrap(), &options, &[]);

    // One peer is not enough.
    wait_until("a peer is known", || cluster(&server)["swarm"]["peers"] == 1);
    wait_until("it serves", || node(&cluster(&server), &attic)["peer"]["block"]["state"] == "serving");
    let told = cluster(&server);
    assert_eq!((&told["kind"], &told["state"], &told["layers"]), (&json!("swarm"), &json!("loading"), &json!(4)));
    assert_eq!((&told["stages"], &told["chains"]), (&json!([]), &json!(0)));
    let waiting = told["waiting"].as_str().unwrap();
    assert!(waiting.contains("no peer serves layers") && waiting.contains('2'), "{waiting}");
    let known = node(&told, &attic);
    assert_eq!((&known["name"], &known["state"]), (&json!(attic.name()), &json!("spare")));
    assert_eq!(known["reason"], "no chain is formed yet");
    assert_eq!(known["peer"]["block"]["layers"], json!({"start": 0, "end": 2}));
    assert_eq!(known["peer"]["reach"], "direct");
    assert!(is_positive(&known["peer"]["block"]["tokens_free"]) && is_positive(&known["peer"]["block"]["layer_s"]));
    assert_eq!(metric(&body_of(&server.ask("GET /metrics", "")), "consort_swarm_peers{"), 1.0);

    let through = ["--bootstrap", &*attic.bootstrap];
    let wait_until_serving = |peer: &SwarmPeer| {
        wait_until("the peer serves", || {
            let told = cluster(&server);
            let mut nodes = told["nodes"].as_array().unwrap().iter();
            nodes.any(|node| node["peer"]["id"] == peer.id.as_str() && node["peer"]["block"]["state"] == "serving")
        });
    };
    let first = SwarmPeer::start("2..4", &through);
    server.wait_until_ready();
    wait_until_serving(&first);
    let told = cluster(&server);
    assert_eq!((&told["waiting"], &told["swarm"]["peers"]), (&Value::Null, &json!(2)));
    assert!(is_positive(&told["speed"]["predicted_tokens_per_s"]), "{told}");

    // A chain runs. Another peer comes when it has been formed, so it is not in it.
    let tokens = 480;
    let text = completion(&server.ask("POST /v1/completions", &request(tokens, false)));
    assert!(!text.is_empty());
    wait_until("round trips are measured", || is_positive(&cluster(&server)["stages"][2]["peer"]["round_trip_s"]));
    let second = SwarmPeer::start("2..4", &through);
    wait_until_serving(&second);
    let mut others = [first, second];
    let [lost, spare] = [0, 1];
    let told = cluster(&server);
    assert_eq!(chain(&told), [&*attic.id, &*others[lost].id]);
    assert_eq!((&told["chains"], &told["swarm"]["replaced"]), (&json!(1), &json!(0)));
    let stages = told["stages"].as_array().unwrap();
    assert_eq!((&stages[0]["coordinator"], &stages[0]["layers"]), (&json!(true), &Value::Null));
    for (stage, range) in [(&stages[1], [0, 2]), (&stages[2], [2, 4])] {
        assert_eq!(stage["layers"], json!({"start": range[0], "end": range[1]}));
        assert!(is_positive(&stage["compute_s"]) && stage["peer"]["queue_s"].is_number(), "{stage}");
        // Not the number of tokens: a reply that comes after the step is done is not counted.
        assert!(is_positive(&stage["peer"]["runs"]), "{stage}");
        assert!(is_positive(&stage["hop"]["bytes"]) && is_positive(&stage["peer"]["returned_bytes"]), "{stage}");
        assert_eq!((&stage["hop"]["way"], &stage["peer"]["failures"]), (&json!("direct"), &json!(0)), "{stage}");
        assert!(stage["address"].as_str().unwrap().starts_with("/ip4/127.0.0.1/tcp/"), "{stage}");
    }
    assert!(is_positive(&stages[0]["hop"]["seconds"]) && is_positive(&stages[2]["hop"]["seconds"]), "{told}");
    assert!(is_positive(&told["steps"]["seconds"]) && is_positive(&told["steps"]["between_s"]), "{told}");
    let states = [&attic, &others[lost], &others[spare]].map(|peer| node(&told, peer)["state"].clone());
    assert_eq!(states, [json!("used"), json!("used"), json!("spare")]);
    assert_eq!(node(&told, &others[spare])["reason"], "a chain with it is not faster");
    let metrics = body_of(&server.ask("GET /metrics", ""));
    for (stage, peer) in [(1, &attic), (2, &others[lost])] {
        let series =
            |name: &str| format!("consort_stage_{name}{{model=\"m\",stage=\"{stage}\",node=\"{}\"}}", peer.name());
        assert_eq!(metric(&metrics, &series("layers")), 2.0);
        for name in ["steps_total", "compute_seconds_total", "returned_bytes_total", "round_trip_seconds"] {
            assert!(metric(&metrics, &series(name)) > 0.0, "{name}:\n{metrics}");
        }
        assert_eq!(metric(&metrics, &series("failures_total")), 0.0);
        let own = peer.metrics();
        assert_eq!(metric(&own, "consort_block_layers{"), 2.0);
        assert_eq!(metric(&own, "consort_block_serving{"), 1.0);
        assert!(metric(&own, "consort_block_steps_total{") >= tokens as f64, "{own}");
        assert!(metric(&own, "consort_block_step_seconds_total{") > 0.0, "{own}");
    }
    assert!(!metrics.contains(others[spare].name()), "peers that are not in the chain have no series:\n{metrics}");

    wait_until("the session is closed", || !others.iter().any(SwarmPeer::has_sessions));

    // A peer is killed while it runs; the answer stays the same. The chain may have either of the others, or both.
    let mut answer = server.begin_answer(&request(tokens, true));
    let lost = answer.interrupt(|| {
        let lost = others.iter().position(SwarmPeer::has_sessions).unwrap();
        others[lost].kill();
        lost
    });
    let spare = 1 - lost;
    assert_eq!(answer.finish(), text);
    let told = cluster(&server);
    assert_eq!(chain(&told), [&*attic.id, &*others[spare].id]);
    assert!(told["swarm"]["replaced"].as_u64().unwrap() >= 1 && is_positive(&told["swarm"]["replace_s"]), "{told}");
    let gone = node(&told, &others[lost]);
    assert_eq!(gone["state"], "spare", "{gone}");
    assert!(gone["reason"].as_str().unwrap().contains("failed lately"), "{gone}");
    assert!(is_positive(&gone["peer"]["failures"]) && is_positive(&gone["peer"]["score"]), "{gone}");
    let metrics = body_of(&server.ask("GET /metrics", ""));
    let stages = told["stages"].as_array().unwrap().len();
    let series =
        |stage| format!("consort_stage_layers{{model=\"m\",stage=\"{stage}\",node=\"{}\"}}", others[spare].name());
    assert_eq!((2..stages).map(|stage| metric(&metrics, &series(stage))).sum::<f64>(), 2.0);
    assert!(metric(&metrics, "consort_swarm_replaced_spans_total{") >= 1.0, "{metrics}");
    assert!(!metrics.contains(others[lost].name()), "a peer that has left the chain has no series:\n{metrics}");
}

#[test]
fn the_admin_port_of_a_peer_answers_its_own_hosts_only() {
    let peer = SwarmPeer::start("1..3", &[]);
    wait_until("it serves", || metric(&peer.metrics(), "consort_block_serving{") == 1.0);
    assert!(metric(&peer.metrics(), "consort_block_tokens_free{") > 0.0);
    assert_eq!(metric(&peer.metrics(), "consort_block_first_layer{"), 1.0);
    assert!(!peer.metrics().contains("fixtures/"), "a model on disk is called by its last name");
    assert!(ask(&peer.admin, "GET /health", "", "").starts_with("HTTP/1.1 200"));
    assert!(ask(&peer.admin, "GET /v1/cluster", "", "").starts_with("HTTP/1.1 404"));
    let mut stream = TcpStream::connect(&peer.admin).unwrap();
    stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: example.org\r\nconnection: close\r\n\r\n").unwrap();
    let mut refused = String::new();
    stream.read_to_string(&mut refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 403"), "{refused}");
}
