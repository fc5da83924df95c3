//! What a server on several machines tells of them: `/v1/cluster` and the metrics of stages, with real nodes on loopback.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::process::{Child, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use testing::bounded::{Log, wait_until};
use testing::oracle;
use testing::reserved_port::ReservedPort;
use testing::serving::{Server, completion, consort, metric};

const KEY: &str = "a key that only tests have";
const REQUEST: &str = r#"{"model": "m", "prompt": "a b c", "max_tokens": 30, "temperature": 0, "ignore_eos": true}"#;

/// A running `consort join`.
struct JoinedNode {
    child: Child,
    address: String,
    _log: Log,
    _store: TempDir,
}

impl JoinedNode {
    fn start(name: &str, listen: &str) -> Self {
        Self::start_with(name, listen, &[])
    }

    fn start_with(name: &str, listen: &str, options: &[&str]) -> Self {
        let store = tempfile::tempdir().unwrap();
        let folder = store.path().to_str().unwrap();
        let mut command = consort(&["join", "--listen", listen, "--no-mdns", "--name", name, "--store", folder]);
        let mut child = command.args(options).env("CONSORT_CLUSTER_KEY", KEY).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let line = log.line_with("listening on ");
        let address = line.split("listening on ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
        Self { child, address, _log: log, _store: store }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for JoinedNode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(server: &Server, path: &str) -> String {
    let answer = server.ask(&format!("GET {path}"), "");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    body.to_owned()
}

fn cluster(server: &Server) -> Value {
    serde_json::from_str(&get(server, "/v1/cluster")).unwrap()
}

/// Names and layers of the stages.
fn parts(cluster: &Value) -> Vec<(String, Value)> {
    let stages = cluster["stages"].as_array().unwrap().iter();
    stages.map(|stage| (stage["name"].as_str().unwrap().to_owned(), stage["layers"].clone())).collect()
}

fn is_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|value| value > 0.0)
}

#[test]
fn two_nodes_are_told_with_their_layers_and_times() {
    let (attic, cellar) = (JoinedNode::start("attic", "127.0.0.1:0"), JoinedNode::start("cellar", "127.0.0.1:0"));
    let peers = format!("{},{}", attic.address, cellar.address);
    let server = Server::start_with(&["--node", &peers, "--split", "1,2"], &[("CONSORT_CLUSTER_KEY", KEY)]);
    let before = cluster(&server);
    let layers = |start: usize, end: usize| json!({"start": start, "end": end});
    let expected = [("this machine", layers(0, 1)), ("attic", layers(1, 2)), ("cellar", layers(2, 4))];
    assert_eq!(parts(&before), expected.map(|(name, layers)| (name.to_owned(), layers)), "{before}");
    assert_eq!((&before["kind"], &before["state"], &before["layers"]), (&json!("chain"), &json!("ready"), &json!(4)));
    assert_eq!((&before["chains"], &before["bits"]), (&json!(1), &json!("same")));
    assert_eq!(before["stages"][1]["compute_s"], Value::Null, "nothing ran yet");

    assert!(!completion(&server.ask("POST /v1/completions", REQUEST)).is_empty());
    let after = cluster(&server);
    assert!(after["steps"]["count"].as_u64().unwrap() >= 30, "{after}");
    assert!(is_positive(&after["steps"]["seconds"]) && is_positive(&after["steps"]["between_s"]), "{after}");
    for stage in after["stages"].as_array().unwrap() {
        assert!(is_positive(&stage["compute_s"]) && is_positive(&stage["hop"]["seconds"]), "{stage}");
        assert!(is_positive(&stage["hop"]["bytes"]) && is_positive(&stage["memory"]["weight_bytes"]), "{stage}");
        assert!(is_positive(&stage["memory"]["free_bytes"]) && is_positive(&stage["threads"]), "{stage}");
    }
    assert_eq!(after["stages"][2]["address"], cellar.address.as_str());
    let states: Vec<_> = after["nodes"].as_array().unwrap().iter().map(|node| node["state"].clone()).collect();
    assert_eq!(states, ["used", "used"]);
    assert!(is_positive(&after["speed"]["answer_tokens_per_s"]), "{after}");
    assert!(is_positive(&after["speed"]["predicted_tokens_per_s"]), "{after}");

    let metrics = get(&server, "/metrics");
    for (stage, node, layers) in [(0, "this machine", 1.0), (1, "attic", 1.0), (2, "cellar", 2.0)] {
        let series = |name: &str| format!("consort_stage_{name}{{model=\"m\",stage=\"{stage}\",node=\"{node}\"}}");
        assert_eq!(metric(&metrics, &series("layers")), layers);
        for name in ["steps_total", "compute_seconds_total", "hop_seconds_total", "activations_bytes_total"] {
            assert!(metric(&metrics, &series(name)) > 0.0, "{name} of {node}:\n{metrics}");
        }
    }
    assert_eq!(metric(&metrics, "consort_chains_formed_total"), 1.0);
    assert_eq!(metric(&metrics, "consort_cluster_nodes{model=\"m\",state=\"used\"}"), 2.0);
}

#[test]
fn a_lost_node_is_told_with_the_reason_and_the_next_chain_without_it() {
    let (mut attic, cellar) = (JoinedNode::start("attic", "127.0.0.1:0"), JoinedNode::start("cellar", "127.0.0.1:0"));
    let peers = format!("{},{}", attic.address, cellar.address);
    let server = Server::start_with(&["--node", &peers], &[("CONSORT_CLUSTER_KEY", KEY)]);
    assert_eq!(cluster(&server)["nodes"].as_array().unwrap().len(), 2);
    attic.kill();
    let lost = |cluster: &Value| {
        let nodes = cluster["nodes"].as_array().unwrap();
        nodes.iter().find(|node| node["address"] == attic.address.as_str()).cloned().unwrap()
    };
    wait_until("the loss is told", || lost(&cluster(&server))["state"] == "failed");
    assert!(lost(&cluster(&server))["reason"].as_str().is_some_and(|why| !why.is_empty()));
    server.wait_until_ready();
    assert!(!completion(&server.ask("POST /v1/completions", REQUEST)).is_empty());
    let after = cluster(&server);
    assert!(parts(&after).iter().all(|(name, _)| name != "attic"), "{after}");
}

#[test]
fn a_server_that_waits_for_machines_says_what_it_waits_for() {
    // It lends less than a layer takes.
    let attic = JoinedNode::start_with("attic", "127.0.0.1:0", &["--memory", "1K"]);
    let unused = ReservedPort::reserve();
    let peers = format!("{},{}", attic.address, unused.address());
    let model = oracle("qwen3/model-f32");
    let options = ["--node", &peers, "--split", "1,0"];
    let server = Server::listen("true", model.to_str().unwrap(), &options, &[("CONSORT_CLUSTER_KEY", KEY)]);
    wait_until("it waits", || cluster(&server)["waiting"].is_string());
    let told = cluster(&server);
    assert_eq!((&told["kind"], &told["state"], &told["stages"]), (&json!("chain"), &json!("loading"), &json!([])));
    let absent = &told["nodes"][1];
    assert_eq!((&absent["address"], &absent["name"]), (&json!(unused.address().to_string()), &Value::Null));
    assert_eq!(told["nodes"][0]["name"], "attic");
    assert_eq!(told["nodes"][0]["state"], "spare", "{told}");
}
