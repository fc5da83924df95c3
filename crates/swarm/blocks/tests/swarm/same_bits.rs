//! Chains of one to four peers, with uneven and overlapping blocks, give the logits of one process, bit for bit.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blocks::block::BlockLimits;
use blocks::client::ClientOptions;
use blocks::wire::Encoding;
use engine::{Executor, ExecutorError, inspect};
use types::TokenId;

use crate::models::{Model, oracle_models, peer, prompts, qwen3_prompts, range};
use crate::network::Network;

/// The blocks of a chain's peers, as first layers and ends.
fn swarms(layers: usize) -> Vec<Vec<(usize, usize)>> {
    let last = layers - 1;
    let mut swarms = vec![
        vec![(0, layers)],
        vec![(0, 1), (1, layers)],
        vec![(0, last), (last, layers)],
        // The second begins within the first.
        vec![(0, last), (last.min(1), layers)],
    ];
    if layers >= 3 {
        swarms.push(vec![(0, 1), (1, 2), (2, layers)]);
        swarms.push(vec![(0, 2), (1, layers - 1), (layers - 2, layers)]);
    }
    if layers >= 4 {
        swarms.push(vec![(0, 1), (1, 2), (2, 3), (3, layers)]);
    }
    swarms.retain(|swarm| swarm.iter().all(|(start, end)| start < end));
    swarms
}

fn network(model: &Model, blocks: &[(usize, usize)], is_divided: bool) -> Arc<Network> {
    let network = Network::new(is_divided);
    for (number, &(start, end)) in (1..).zip(blocks) {
        let layers = range(start, end);
        network.add(peer(number), model.digest, layers, model.block(layers, BlockLimits::default()), 1e-4);
    }
    network
}

fn bits(executor: &mut impl Executor, tokens: &[TokenId], chunk: usize) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    inspect::logits::<_, ExecutorError>(executor, tokens, chunk, |row| {
        rows.push(row.iter().map(|value| value.to_bits()).collect());
        Ok(())
    })
    .unwrap();
    rows
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chains_give_the_bits_of_one_process_on_all_oracle_models() {
    for path in oracle_models() {
        let model = Model::open(&path);
        let prompt = prompts(&path).into_iter().max_by_key(Vec::len).unwrap();
        let prompt = prompt[..prompt.len().min(40)].to_vec();
        let expected = bits(&mut model.local(), &prompt, 7);
        for blocks in swarms(model.layers) {
            let network = network(&model, &blocks, false);
            let mut client = model.client(&network, ClientOptions::default());
            let found = tokio::task::block_in_place(|| bits(&mut client, &prompt, 7));
            assert!(found == expected, "{}: {blocks:?} with {:?}", path.display(), client.client().last_chain());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_pass_rows_on_where_they_can() {
    let model = Model::qwen3();
    let prompt = &qwen3_prompts()[0];
    let expected = bits(&mut model.local(), prompt, 5);
    let blocks = [(0, 1), (1, 3), (3, model.layers)];
    for (is_divided, is_star) in [(false, false), (true, false), (false, true)] {
        let network = network(&model, &blocks, is_divided);
        let mut client = model.client(&network, ClientOptions { is_star, ..ClientOptions::default() });
        let found = tokio::task::block_in_place(|| bits(&mut client, prompt, 5));
        assert!(found == expected, "{is_divided} {is_star}");
        let chain = client.client().last_chain();
        assert_eq!(chain.len(), 3);
        let is_direct = !is_divided && !is_star;
        assert_eq!(chain.iter().map(|span| span.is_fed).collect::<Vec<_>>(), [false, is_direct, is_direct]);
        let pushed = network.pushed.load(Ordering::Relaxed);
        assert_eq!(pushed > 0, is_direct, "{pushed} bytes");
    }
}

/// Half of the bytes, and other bits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn activations_may_travel_in_half_the_bytes() {
    let model = Model::qwen3();
    let prompt = &qwen3_prompts()[0];
    let exact = bits(&mut model.local(), prompt, 8);
    let network = network(&model, &[(0, 2), (2, model.layers)], false);
    let options = ClientOptions { encoding: Encoding::F16, ..ClientOptions::default() };
    let mut client = model.client(&network, options);
    let found = tokio::task::block_in_place(|| bits(&mut client, prompt, 8));
    assert_ne!(found, exact);
    let close = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 0.05;
    assert!(found.iter().flatten().zip(exact.iter().flatten()).all(close));
}
