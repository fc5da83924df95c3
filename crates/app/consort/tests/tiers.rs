//! A peer's block on tensor-parallel ranks, and on a chain of LAN machines of which one has ranks: three tiers in one chain, with
//! real processes on loopback. It gives the tokens of one process, also when each tier loses something.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use testing::bounded::wait_until;
use testing::joined_node::{JoinedNode, KEY};
use testing::oracle;
use testing::serving::{self, Server, apart, completion, kill, logits, text, tokens};
use testing::swarm_peer::SwarmPeer;

const PROMPT: &str = "3,1,4,1,5,9,2,6,5,3,5,8,9,7,9,3";
/// The largest difference of logits from those of one process: ranks round partial sums.
const APART_MAX: f32 = 1e-3;
const REQUEST: &str =
    r#"{"model": "m", "prompt": "a b c", "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": STREAM}"#;

/// Layer 0 in one process, layer 1 on two ranks, and layers 2 and 3 on a LAN: one on the peer's machine, one on a node with ranks.
struct Tiers {
    model: PathBuf,
    single: SwarmPeer,
    ranks: SwarmPeer,
    lan: SwarmPeer,
    nodes: [JoinedNode; 2],
}

impl Tiers {
    fn start() -> Self {
        let model = oracle("qwen3/model-f32");
        // The second one is a spare.
        let nodes = [(); 2].map(|()| JoinedNode::start(&["--tensor-parallel", "2"]));
        let single = SwarmPeer::start(&model, "0..1", &[]);
        let bootstrap = ["--bootstrap", &single.address];
        let ranks = SwarmPeer::start(&model, "1..2", &[&bootstrap[..], &["--tensor-parallel", "2"]].concat());
        let peers = nodes.each_ref().map(|node| node.address.as_str()).join(",");
        let cluster = ["--node", &peers, "--split", "1,0", "--cluster-key", KEY];
        let lan = SwarmPeer::start(&model, "2..4", &[&bootstrap[..], &cluster].concat());
        assert_eq!((ranks.ranks().len(), nodes[0].ranks().len(), nodes[1].ranks().len()), (2, 2, 0));
        Self { model, single, ranks, lan, nodes }
    }

    /// How a client joins.
    fn bootstrap(&self) -> String {
        [&self.single, &self.ranks, &self.lan].map(|peer| peer.address.as_str()).join(",")
    }
}

#[test]
fn a_chain_of_peers_ranks_and_lan_machines_gives_the_tokens_of_one_process() {
    let tiers = Tiers::start();
    let bootstrap = tiers.bootstrap();
    let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &bootstrap];
    assert_eq!(tokens(&tiers.model, PROMPT, 32, &swarm), tokens(&tiers.model, PROMPT, 32, &[]));
    let (whole, shared) = (logits(&tiers.model, PROMPT, &[]), logits(&tiers.model, PROMPT, &swarm));
    assert!(whole != shared, "the ranks take part");
    assert!(apart(&whole, &shared) <= APART_MAX, "{}", apart(&whole, &shared));
}

/// Runs `lose` in the middle of a stream, and `help` as soon as the server goes on. Returns the whole text.
fn text_with_loss(server: &Server, lose: impl FnOnce(), help: impl FnOnce()) -> String {
    let mut answer = server.begin_answer(&REQUEST.replace("STREAM", "true"));
    answer.interrupt(lose);
    help();
    answer.finish()
}

#[test]
fn answers_go_on_with_the_same_text_when_each_tier_loses_something() {
    let mut tiers = Tiers::start();
    let bootstrap = tiers.bootstrap();
    let expected = {
        let server = Server::start_under("true", &tiers.model, &[], &[]);
        completion(&server.ask("POST /v1/completions", &REQUEST.replace("STREAM", "false")))
    };
    assert!(!expected.is_empty());
    let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &bootstrap];
    let server = Server::start_under("true", &tiers.model, &swarm, &[]);
    assert_eq!(text_with_loss(&server, || {}, || {}), expected, "nothing is lost");

    let before = tiers.ranks.ranks();
    assert_eq!(text_with_loss(&server, || kill("KILL", before[1]), || {}), expected, "a rank of a peer is killed");
    wait_until("the lost rank is replaced", || tiers.ranks.ranks().len() == 2);
    assert!(tiers.ranks.ranks().contains(&before[0]), "the other rank stays");

    let rank = tiers.nodes[0].ranks()[0];
    assert_eq!(text_with_loss(&server, || kill("KILL", rank), || {}), expected, "a rank of a LAN machine is killed");

    let node = tiers.nodes[0].child.id();
    assert_eq!(text_with_loss(&server, || kill("KILL", node), || {}), expected, "a LAN machine is killed");

    let mut replacement = None;
    let replace = || replacement = Some(SwarmPeer::start(&tiers.model, "0..1", &["--bootstrap", &tiers.ranks.address]));
    let text = text_with_loss(&server, || tiers.single.kill(), replace);
    assert_eq!(text, expected, "a peer is killed, and another one has its layer");
    let log = server.log.so_far();
    assert!(log.matches("a span of a chain is replaced").count() >= 4, "{log}");
}

/// What a peer says of its block.
fn announced_state(peer: &SwarmPeer) -> String {
    let args = ["swarm", "status", "--json", "--wait", "1", "--no-lan", "--bootstrap", &peer.address];
    let output = serving::run(&args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    status["blocks"][0]["state"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_block_that_is_being_rebuilt_is_announced_as_such() {
    let folder = TempDir::new().unwrap();
    let [model, aside] = ["model", "aside"].map(|name| folder.path().join(name));
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(oracle("qwen3/model-f32")).unwrap().map(|file| file.unwrap()) {
        fs::copy(file.path(), model.join(file.file_name())).unwrap();
    }
    let peer = SwarmPeer::start(&model, "0..4", &["--tensor-parallel", "2"]);
    wait_until("the block is announced", || announced_state(&peer) == "serving");
    // A rank that is killed cannot come back without its files.
    fs::rename(&model, &aside).unwrap();
    kill("KILL", peer.ranks()[0]);
    wait_until("the loss is announced", || announced_state(&peer) == "loading");
    let swarm = ["--swarm", "--no-lan", "--bootstrap", &peer.address, "--swarm-wait"];
    let args = [&["debug", "tokens", aside.to_str().unwrap(), "--tokens", PROMPT][..], &swarm, &["1"]].concat();
    let lacking = serving::run(&args);
    assert!(text(&lacking.stderr).contains("no peer serves layers 0..4"), "{}", text(&lacking.stderr));
    fs::rename(&aside, &model).unwrap();
    wait_until("the block is announced again", || announced_state(&peer) == "serving");
    assert_eq!(tokens(&model, PROMPT, 8, &[&swarm[..], &["120"]].concat()), tokens(&model, PROMPT, 8, &[]));
}
