//! Spot checks find a peer that computes something else, and the client goes on without it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blocks::block::BlockLimits;
use blocks::client::ClientOptions;
use directory::EXCLUDED_AT;
use engine::{Engine, inspect};
use types::TokenId;

use crate::lying::Lie;
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
    // These are on one machine.
    assert_eq!(counters.identical.load(Ordering::Relaxed), counters.checks.load(Ordering::Relaxed));
}

/// A client of a network in which the fastest of the peers with the first layers lie, and 9 has the others.
struct Case {
    model: Model,
    network: Arc<Network>,
    liars: u8,
    honest: u8,
}

const LAST: u8 = 9;

impl Case {
    fn new(liars: u8, honest: u8, lie: Lie) -> Self {
        let (model, network) = (Model::qwen3(), Network::new(false));
        let layers = range(0, 2);
        for number in 1..=liars {
            network.add(peer(number), model.digest, layers, model.lying_block(layers, lie), 1e-5);
        }
        for number in liars + 1..=liars + honest {
            network.add(peer(number), model.digest, layers, model.block(layers, BlockLimits::default()), 0.5);
        }
        let others = model.block(range(2, 4), BlockLimits::default());
        network.add(peer(LAST), model.digest, range(2, 4), others, 1e-3);
        Self { model, network, liars, honest }
    }

    /// Generates until all liars are known, and then gets the tokens of one process. Nobody honest is excluded.
    fn check(&self, prompt: &[TokenId], tokens: usize) {
        let mut engine = Engine::new(self.model.client(&self.network, options()), 64);
        let client = engine.executor().client();
        let expected = inspect::greedy(&mut Engine::new(self.model.local(), 64), prompt, tokens).unwrap();
        let scores = || (1..=LAST).map(|number| self.network.view().score(&peer(number))).collect::<Vec<_>>();
        // Checks run beside the steps that they are about.
        let is_found = || {
            let _ = inspect::greedy(&mut engine, prompt, tokens).unwrap();
            scores()[..usize::from(self.liars)].iter().all(|score| *score > EXCLUDED_AT)
        };
        until(is_found, || format!("{:?} {:?}", client.counters(), scores()));
        // On a busy machine an honest peer may have been late.
        let honest = usize::from(self.liars)..usize::from(self.liars + self.honest);
        assert!(scores()[honest].iter().all(|score| *score < EXCLUDED_AT), "{:?}", scores());
        let again = tokio::task::block_in_place(|| inspect::greedy(&mut engine, prompt, tokens).unwrap());
        assert_eq!(again, expected);
    }
}

fn long_prompt(tokens: usize) -> Vec<TokenId> {
    qwen3_prompts().concat().into_iter().cycle().take(tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_lies_is_found_and_not_used_again() {
    Case::new(1, 2, |_| true).check(&qwen3_prompts()[0], TOKENS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_wrong_row_among_500_is_found() {
    Case::new(1, 2, |position| position == 499).check(&long_prompt(500), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_wrong_token_of_50_is_found() {
    // Beyond the prompt.
    Case::new(1, 2, |position| position == 70).check(&long_prompt(50), 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_of_five_peers_that_lie_together_are_found_and_nobody_else() {
    Case::new(2, 3, |_| true).check(&qwen3_prompts()[0], TOKENS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_others_nothing_is_checked_and_nothing_fails() {
    let (model, network) = (Model::qwen3(), Network::new(false));
    network.add(peer(1), model.digest, range(0, 4), model.block(range(0, 4), BlockLimits::default()), 1e-4);
    network.add(peer(2), model.digest, range(0, 2), model.block(range(0, 2), BlockLimits::default()), 1e-2);
    let mut engine = Engine::new(model.client(&network, options()), 16);
    let client = engine.executor().client();
    let chain = client.plan(8).unwrap();
    assert_eq!(client.unverifiable(&chain.spans), [range(0, 4)]);
    let prompt = &qwen3_prompts()[0];
    let expected = inspect::greedy(&mut Engine::new(model.local(), 16), prompt, TOKENS).unwrap();
    let found = tokio::task::block_in_place(|| inspect::greedy(&mut engine, prompt, TOKENS).unwrap());
    assert_eq!((found, client.counters().checks.load(Ordering::Relaxed)), (expected, 0));
}
