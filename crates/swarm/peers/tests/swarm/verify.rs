//! Spot checks find a peer that computes something else, and the client goes on without it.

use std::sync::atomic::Ordering;

use engine::{Engine, inspect};
use peers::block::BlockLimits;
use peers::client::ClientOptions;
use swarm::EXCLUDED_AT;

use crate::models::{Model, peer, qwen3_prompts, range};
use crate::network::Network;
use crate::waiting::until;

const TOKENS: usize = 24;

fn options() -> ClientOptions {
    ClientOptions { verify: 1.0, ..ClientOptions::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_peers_agree() {
    let (model, network) = (Model::qwen3(), Network::new(false));
    for number in 1..=4 {
        let layers = if number <= 2 { range(0, 2) } else { range(2, 4) };
        network.add(peer(number), model.digest, layers, model.block(layers, BlockLimits::default()), 1e-4);
    }
    let mut engine = Engine::new(model.client(&network, options()), 16);
    let client = engine.executor().client();
    let prompt = &qwen3_prompts()[0];
    let expected = inspect::greedy(&mut Engine::new(model.local(), 16), prompt, TOKENS).unwrap();
    let counters = client.counters();
    // Checks run beside the steps that they are about, and there are only so many at once.
    let is_checked = || {
        assert_eq!(inspect::greedy(&mut engine, prompt, TOKENS).unwrap(), expected);
        counters.checks.load(Ordering::Relaxed) > 0
    };
    until(is_checked, || format!("{counters:?}"));
    assert_eq!(counters.differences.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_lies_is_found_and_not_used_again() {
    let (model, network) = (Model::qwen3(), Network::new(false));
    let layers = range(0, 2);
    // The liar is the fastest.
    network.add(peer(1), model.digest, layers, model.lying_block(layers), 1e-5);
    for number in 2..=3 {
        network.add(peer(number), model.digest, layers, model.block(layers, BlockLimits::default()), 1e-3);
    }
    network.add(peer(4), model.digest, range(2, 4), model.block(range(2, 4), BlockLimits::default()), 1e-3);
    let mut engine = Engine::new(model.client(&network, options()), 16);
    let client = engine.executor().client();
    let prompt = &qwen3_prompts()[0];
    let expected = inspect::greedy(&mut Engine::new(model.local(), 16), prompt, TOKENS).unwrap();
    // Checks run beside the steps that they are about, and each is about one of the two peers.
    let is_found = || {
        let _ = inspect::greedy(&mut engine, prompt, TOKENS).unwrap();
        client.counters().differences.load(Ordering::Relaxed) > 0 && network.view().score(&peer(1)) > EXCLUDED_AT
    };
    until(is_found, || format!("{:?}", client.counters()));
    // On a busy machine an honest peer may have been late.
    for honest in [2, 3].map(peer) {
        assert!(network.view().score(&honest) < EXCLUDED_AT, "{}", network.view().score(&honest));
    }
    let again = tokio::task::block_in_place(|| inspect::greedy(&mut engine, prompt, TOKENS).unwrap());
    assert_eq!(again, expected);
}
