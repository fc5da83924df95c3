//! KwaaiNet through the binary, with the programs of `tests/kwaai` on the other side: as block servers of its coordinators, as a client
//! of its block servers, and with its registries in both roles.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};
use testing::bounded::{self, ended};
use testing::kwaai_programs::listener::listen;
use testing::kwaai_programs::node::Server;
use testing::kwaai_programs::{block_server, generate, registry};
use testing::serving::{consort, kill, text, tokens};
use testing::swarm_peer::SwarmPeer;
use testing::{needs, oracle};

const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];
const TOKENS: usize = 6;
/// What KwaaiNet's records call the model.
const NAME: &str = "owner/tiny.qwen3";

/// The tokens of one process, or of a chain.
async fn generated(model: &Path, options: &[&str]) -> Vec<u32> {
    let (model, prompt) = (model.to_owned(), PROMPT.map(|token| token.to_string()).join(","));
    let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
    let run = move || {
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        tokens(&model, &prompt, TOKENS, &options)
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// Where a peer serves the local TCP bypass.
fn bypass_of(peer: &SwarmPeer) -> SocketAddr {
    let line = peer.line_with("serving KwaaiNet's TCP bypass");
    line.rsplit(' ').next().unwrap().trim().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_generates_on_blocks_that_the_binary_serves() {
    if !needs::python() {
        return;
    }
    let model = oracle("qwen3/model-f32");
    let expected = generated(&model, &[]).await;
    let options = ["--kwaai", "--kwaai-tcp", "127.0.0.1:0"];
    // The first block needs the embedding, and the last one the head.
    let peers = ["0..1", "1..4"].map(|layers| SwarmPeer::start_unready(&model, layers, &options));
    let shards = peers.each_ref().map(bypass_of);
    let answers = generate(&shards, &["--local"], &[PROMPT.to_vec()], TOKENS).await;
    assert_eq!(answers[0].tokens, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_a_server_that_was_named_in_its_chain() {
    if !needs::python() {
        return;
    }
    let model = oracle("qwen3/model-f32");
    let expected = generated(&model, &[]).await;
    let server = block_server(&["--model", model.to_str().unwrap(), "--blocks", "0-2", "--local"]);
    let peer = SwarmPeer::start(&model, "2..4", &[]);
    let named = format!("0..2@{}", server.address);
    let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &peer.address, "--kwaai-peer"];
    assert_eq!(generated(&model, &[&swarm[..], &[&named]].concat()).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_were_named_are_a_chain_without_any_peer_of_ours() {
    if !needs::python() {
        return;
    }
    let model = oracle("qwen3/model-f32");
    let expected = generated(&model, &[]).await;
    let server = |blocks| block_server(&["--model", model.to_str().unwrap(), "--blocks", blocks, "--local"]);
    let (first, last, full) = (server("0-2"), server("2-4"), server("0-4"));
    let both = format!("0..2@{},2..4@{}", first.address, last.address);
    let full = format!("0..4@{}", full.address);
    let swarm = ["--swarm", "--swarm-wait", "120", "--no-lan", "--kwaai-peer"];
    for named in [&both, &full] {
        assert_eq!(generated(&model, &[&swarm[..], &[named]].concat()).await, expected);
    }
    let model = model.to_str().unwrap();
    let refused = |command: &[&str], named: &str, options: &[&str], why: &str| {
        let output = bounded::output(&mut consort(&[command, &swarm, &[named], options].concat()));
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(why), "{said}");
    };
    refused(&["debug", "tokens", model], &full.replace("..4", "..5"), &["--tokens", "1"], "the model has 4 layers");
    // What needs the logits of several positions.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits");
    refused(
        &["debug", "logits", model],
        &full,
        &["--tokens", "1,2", "--out", out.to_str().unwrap()],
        "does not return logits of several positions",
    );
    let drafts = "--speculate does not work with servers of KwaaiNet";
    refused(&["serve", model], &full, &["--speculate", "3"], drafts);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_finds_servers_through_a_registry() {
    if !needs::python() {
        return;
    }
    let model = oracle("qwen3/model-f32");
    let expected = generated(&model, &[]).await;
    let server = Server::start(&model, "1-3").await;
    let (id, addresses) = server.known();
    let record = json!({
        "key": "tiny-qwen3.1", "peer": libp2p_node::peer_text(&server.peer()), "state": 2, "throughput": 1.5, "start": 1, "end": 3,
        "version": "kwaai-0.4.0", "expires_in": 300,
    });
    let (records, addresses) = (json!([record]).to_string(), json!({ id: addresses }).to_string());
    let program = registry(&["--records", &records, "--addresses", &addresses]);
    let registry = listen(program.address).await.to_string();
    let first = SwarmPeer::start(&model, "0..1", &[]);
    let last = SwarmPeer::start(&model, "3..4", &["--bootstrap", &first.address]);
    let bootstrap = [first.address.as_str(), &last.address].join(",");
    let swarm =
        ["--swarm", "--swarm-wait", "120", "--no-lan", "--bootstrap", &bootstrap, "--kwaai-registry", &registry];
    assert_eq!(generated(&model, &[&swarm[..], &["--kwaai-name", NAME]].concat()).await, expected);
    let args = ["debug", "tokens", model.to_str().unwrap(), "--tokens", "1"];
    let output = bounded::output(&mut consort(&[&args[..], &swarm].concat()));
    assert!(!output.status.success() && text(&output.stderr).contains("--kwaai-name"), "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_is_announced_at_a_registry_and_withdrawn_at_the_end() {
    if !needs::python() {
        return;
    }
    let model = oracle("qwen3/model-f32");
    let mut program = registry(&[]);
    let registry = listen(program.address).await.to_string();
    let options = ["--kwaai", "--kwaai-registry", &registry, "--kwaai-name", NAME];
    let mut peer = SwarmPeer::start_unready(&model, "1..3", &options);
    let id = peer.address.rsplit('/').next().unwrap().to_owned();
    // For the model, for the peer, and for each of its blocks; before it is ready they say so.
    let mut announced = || loop {
        let records: Vec<Value> = (0..4).map(|_| serde_json::from_str(&program.line()).unwrap()).collect();
        assert_eq!((&records[0]["subkey"], &records[0]["value"]["repository"]), (&json!("tiny-qwen3"), &json!(NAME)));
        for record in &records[1..] {
            assert_eq!(record["subkey"], id.as_str());
            let fields = &record["value"][2];
            assert_eq!((&fields["start_block"], &fields["end_block"]), (&json!(1), &json!(3)));
        }
        let (state, throughput) = (&records[3]["value"][0], records[3]["value"][1].as_f64().unwrap());
        if *state != 0 {
            return (state.as_i64().unwrap(), throughput);
        }
    };
    let (state, throughput) = announced();
    assert!(state == 2 && throughput > 0.0, "{state} {throughput}");
    kill("TERM", peer.child.id());
    assert_eq!(announced().0, -1);
    assert!(ended(&mut peer.child).success());
}
