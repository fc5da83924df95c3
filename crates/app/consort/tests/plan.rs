//! `consort plan`, and `--plan` of the other commands, with real nodes on loopback.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;

use testing::joined_node::{JoinedNode, KEY};
use testing::reserved_port::ReservedPort;
use testing::serving::{Server, consort, text, tokens};
use testing::{bounded, oracle};

/// Of four layers.
const MODEL: &str = "qwen3/model-f32";
const PROMPT: &str = "3,1,4,1,5,9,2,6";
const TOKENS: usize = 12;

/// `consort plan` of the model, with a cache of its own.
fn plan(options: &[&str]) -> Output {
    let cache = TempDir::new().unwrap();
    let model = oracle(MODEL);
    let mut command = consort(&["plan", model.to_str().unwrap(), "--cluster-key", KEY]);
    bounded::output(command.env("XDG_CACHE_HOME", cache.path()).args(options))
}

fn planned(options: &[&str]) -> String {
    let output = plan(options);
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// Greedy tokens of the model, and what is said on standard error.
fn generated(options: &[&str]) -> (Vec<u32>, String) {
    let cache = TempDir::new().unwrap();
    let (model, max) = (oracle(MODEL), TOKENS.to_string());
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", PROMPT, "--max-tokens", &max];
    let mut command = consort(&[&args, options].concat());
    let output = bounded::output(command.env("XDG_CACHE_HOME", cache.path()).env("CONSORT_CLUSTER_KEY", KEY));
    assert!(output.status.success(), "{options:?}: {}", text(&output.stderr));
    (serde_json::from_slice(&output.stdout).unwrap(), text(&output.stderr))
}

fn write(folder: &TempDir, name: &str, text: &str) -> String {
    let file = folder.path().join(name);
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

/// The table of a stage in a plan.
fn stage(node: &str, address: &str, layers: &str) -> String {
    format!("\n[[stage]]\nnode = \"{node}\"\naddress = \"{address}\"\nlayers = \"{layers}\"\n")
}

#[test]
fn a_plan_says_who_is_used_and_its_file_once_edited_is_what_runs() {
    let [attic, cellar] = ["attic", "cellar"].map(|name| JoinedNode::start(&["--name", name]));
    let stranger = JoinedNode::start_with_key("another passphrase of the tests", &["--name", "stranger"]);
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("plan.toml");
    let peers = [&attic, &cellar, &stranger].map(|node| node.address.as_str()).join(",");
    let options = ["--node", &peers, "--split", "1,2,0", "--save", file.to_str().unwrap()];
    let table = planned(&options);
    for words in ["model-f32: 4 layers", "this machine *", "tok/s  without", "bits: as on one machine"] {
        assert!(table.contains(words), "{words}: {table}");
    }
    let layers = |table: &str, node: &str| {
        let row = table.lines().find(|line| line.starts_with(node)).unwrap_or_else(|| panic!("{node}: {table}"));
        row.trim_start_matches(node).split_whitespace().next().unwrap().to_owned()
    };
    assert_eq!(["this machine *", "attic", "cellar"].map(|node| layers(&table, node)), ["0..1", "1..2", "2..4"]);
    let unused = format!("\nnot used: {}: the other side refused: ", stranger.address);
    assert!(table.contains(&unused), "{table}");
    stranger.log.line_with("not connected to a machine that has another cluster key");

    let saved = fs::read_to_string(&file).unwrap();
    let expected = [stage("attic", &attic.address, "1..2"), stage("cellar", &cellar.address, "2..4")].concat();
    assert!(saved.starts_with("# Which node") && saved.ends_with(&expected), "{saved}");
    assert_eq!(planned(&["--plan", file.to_str().unwrap(), "--save", "-"]), saved, "the same plan again");

    // The coordinator's table goes, and the two nodes change places.
    let (head, _) = saved.split_once("\n[coordinator]").unwrap();
    let stages = [stage("cellar", &cellar.address, "0..3"), stage("attic", &attic.address, "3..4")].concat();
    fs::write(&file, format!("{head}{stages}")).unwrap();
    let (found, said) = generated(&["--plan", file.to_str().unwrap()]);
    assert_eq!(found, tokens(&oracle(MODEL), PROMPT, TOKENS, &[]));
    assert!(said.contains("layers 0..3 on cellar, 3..4 on attic"), "{said}");
    cellar.log.line_with("receiving weights");
    for (node, layers) in [(&cellar, "layers=0..3"), (&attic, "layers=3..4")] {
        for words in ["layers are loaded", "layers run in a chain", "layers are unloaded"] {
            let line = node.log.line_with(words);
            assert!(line.contains(layers) && line.contains("model=\"model-f32\""), "{line}");
        }
    }
    let environment = [("CONSORT_CLUSTER_KEY", KEY), ("XDG_CACHE_HOME", folder.path().to_str().unwrap())];
    let server = Server::start_under("true", &oracle(MODEL), &["--plan", file.to_str().unwrap()], &environment);
    let answer = server.ask("GET /v1/cluster", "");
    let cluster: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let stages = cluster["stages"].as_array().unwrap().iter();
    let stages: Vec<_> = stages.map(|stage| (stage["name"].clone(), stage["layers"].clone())).collect();
    let range = |start: usize, end: usize| json!({"start": start, "end": end});
    let expected = [("this machine", Value::Null), ("cellar", range(0, 3)), ("attic", range(3, 4))];
    assert_eq!(stages, expected.map(|(name, layers)| (json!(name), layers)), "{cluster}");
}

#[test]
fn a_topology_of_cake_says_what_runs() {
    let node = JoinedNode::start(&["--name", "attic"]);
    let folder = TempDir::new().unwrap();
    let topology = format!("worker:\n  host: '{}'\n  layers: [model.layers.1-3]\n", node.address);
    let whole = tokens(&oracle(MODEL), PROMPT, TOKENS, &[]);
    for name in ["topology.yml", "topology"] {
        let (found, said) = generated(&["--plan", &write(&folder, name, &topology)]);
        assert_eq!(found, whole, "{name}");
        assert!(said.contains("layers 0..1 on this machine, 1..4 on attic"), "{said}");
    }
    // Without layers, it is a list of machines.
    let hosts = write(&folder, "hosts.yaml", &format!("worker: {{host: '{}'}}\n", node.address));
    let table = planned(&["--plan", &hosts]);
    assert!(table.contains("\nattic") && !table.contains("cannot be kept"), "{table}");
}

#[test]
fn a_machine_that_is_missing_gives_way_to_another_plan() {
    let node = JoinedNode::start(&["--name", "attic"]);
    let (folder, unused) = (TempDir::new().unwrap(), ReservedPort::reserve());
    let missing = unused.address().to_string();
    let head = "version = 1\nmodel = \"m\"\nlayers = 4\n";
    let stages = [stage("attic", &node.address, "0..2"), stage("cellar", &missing, "2..4")].concat();
    let file = write(&folder, "plan.toml", &format!("{head}{stages}"));
    let (found, said) = generated(&["--plan", &file]);
    assert_eq!(found, tokens(&oracle(MODEL), PROMPT, TOKENS, &[]));
    assert!(said.contains("the plan that was given cannot be kept"), "{said}");
    assert!(said.contains(&format!("not used: {missing}: ")), "{said}");
    let output = plan(&["--plan", &file]);
    let (table, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success() && table.contains(&format!("not used: {missing}: ")), "{table}{said}");
    assert!(said.contains("line 13: node \"cellar\" is not in the cluster"), "{said}");
}

#[test]
fn without_another_machine_the_plan_is_for_this_one() {
    let unused = ReservedPort::reserve();
    let missing = unused.address().to_string();
    let table = planned(&["--node", &missing, "--context", "64", "--max-running", "2", "--optimise", "throughput"]);
    assert!(table.contains("planned for the throughput of 2 sequences"), "{table}");
    assert!(table.contains("this machine *  0..4 "), "{table}");
    assert!(table.contains(&format!("not used: {missing}: ")), "{table}");
    let small = plan(&["--node", &missing, "--kv-tokens", "1000000000000"]);
    assert!(!small.status.success() && text(&small.stderr).contains("not used: "), "{}", text(&small.stderr));
}

#[test]
fn what_is_wrong_in_a_plan_is_said_before_anything_starts() {
    let folder = TempDir::new().unwrap();
    let model = oracle(MODEL);
    let check = |options: &[&str], code: i32, expected: &str| {
        let args =
            [&["debug", "tokens", model.to_str().unwrap(), "--tokens", "1", "--cluster-key", KEY], options].concat();
        let output = bounded::output(&mut consort(&args));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{options:?}: {said}");
        assert!(output.stdout.is_empty() && said.contains(expected), "{expected}: {said}");
    };
    let wrong = |name: &str, content: &str, code: i32, expected: &str| {
        check(&["--plan", &write(&folder, name, content)], code, expected);
    };
    let head = "version = 1\nmodel = \"m\"\nlayers = 4\n";
    let [first, second] = [stage("a", "127.0.0.1:1", "0..2"), stage("b", "127.0.0.1:2", "1..4")];
    let overlapping = format!("{head}{first}{second}");
    wrong("a.toml", &overlapping, 2, "line 13: layers 1..4 of node \"b\" do not follow: layer 2 is next");
    wrong("a", &overlapping.replace("layers = 4", "layers = four"), 2, "line 3: ");
    let larger = overlapping.replace("1..4", "2..5").replace("layers = 4", "layers = 5");
    wrong("a.toml", &larger, 1, "line 3: the plan is for 5 layers, the model has 4");
    let topology = "a: {host: 'x:1', layers: [model.layers.0-2]}\nb: {host: 'y:1', layers: [model.layers.2-3]}\n";
    wrong("a.yaml", topology, 1, "line 2: layer 2 of worker \"b\" belongs to worker \"a\" too");
    wrong("a.toml", topology, 2, "line 1: ");
    wrong("a", "kitchen and den", 2, "neither a plan");
    check(&["--plan", folder.path().join("none").to_str().unwrap()], 2, "No such file");
    check(&["--plan", "/dev/zero"], 2, "it is longer than");
    let file = write(&folder, "b.toml", &overlapping.replace("1..4", "2..4"));
    check(&["--plan", &file, "--node", "127.0.0.1:1", "--split", "4"], 2, "cannot be used with");
    check(&["--plan", &file, "--tensor-parallel", "2"], 2, "do not go with --cluster, --node and --plan");
    let why = match cfg!(feature = "cake") {
        true => "do not work together with --cluster, --node and --plan",
        false => "build it with `--features cake`",
    };
    check(&["--plan", &file, "--cake-worker", "127.0.0.1:1"], 2, why);
}
