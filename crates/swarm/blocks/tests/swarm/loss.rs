//! Peers that vanish, stall or return nonsense: answers stay those of one process, and nothing is left behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blocks::block::{BlockHandle, BlockLimits};
use blocks::client::{ClientOptions, SwarmExecutor};
use directory::PeerId;
use engine::{Engine, EngineOptions, EventKind, Executor, FinishReason, Request, RequestId, inspect};
use kernels::cpu::CpuBackend;
use types::TokenId;

use crate::models::{Model, peer, qwen3_prompts, range};
use crate::network::{Fault, Network};
use crate::waiting::until;

pub const TOKENS: usize = 24;

pub type SwarmEngine = Engine<SwarmExecutor<CpuBackend>>;

/// Five peers: every layer is served by at least two of them.
pub struct Swarm {
    pub model: Model,
    pub network: Arc<Network>,
    blocks: Vec<(PeerId, BlockHandle)>,
}

impl Swarm {
    pub fn new() -> Self {
        Self::with_limits(BlockLimits::default())
    }

    pub fn with_limits(limits: BlockLimits) -> Self {
        let (model, network) = (Model::qwen3(), Network::new(false));
        let layouts = [(0, 2), (1, 4), (2, 4), (0, 3), (0, 4)];
        let add = |(number, (start, end)): (u8, (usize, usize))| {
            let (layers, peer) = (range(start, end), peer(number));
            let block = model.block(layers, limits);
            // The whole model is slow, so that chains have two peers.
            let layer_seconds = if end - start == 4 { 0.5 } else { 1e-4 };
            network.add(peer, model.digest, layers, block.clone(), layer_seconds);
            (peer, block)
        };
        let blocks = (1..).zip(layouts).map(add).collect();
        Self { model, network, blocks }
    }

    pub fn engine(&self, draft_tokens_max: usize) -> SwarmEngine {
        self.engine_with(ClientOptions::default(), draft_tokens_max)
    }

    pub fn engine_with(&self, options: ClientOptions, draft_tokens_max: usize) -> SwarmEngine {
        let executor = self.model.client(&self.network, options);
        let options = EngineOptions { chunk: 16, draft_tokens_max, ..EngineOptions::default() };
        Engine::with_options(executor, options)
    }

    /// The answers of one process.
    pub fn expected(&self, prompts: &[Vec<TokenId>]) -> Vec<Vec<TokenId>> {
        let mut engine = Engine::new(self.model.local(), 16);
        prompts.iter().map(|prompt| inspect::greedy(&mut engine, prompt, TOKENS).unwrap()).collect()
    }

    /// Sessions end when nobody can be reached any more.
    pub fn cut_all_and_check_nothing_is_left(&self) {
        self.blocks.iter().for_each(|(peer, _)| self.network.fail(*peer, Fault::Cut));
        self.check_nothing_is_left();
    }

    /// Sessions end soon after their clients have closed them.
    pub fn check_nothing_is_left(&self) {
        for (peer, block) in &self.blocks {
            let server = self.network.server(*peer);
            let is_left = || block.stats().sessions > 0 || server.push_keys() > 0;
            until(|| !is_left(), || format!("{peer}: {:?}, {} keys", block.stats(), server.push_keys()));
        }
    }
}

/// Faults of the peers, one at a time, so that there always is a chain.
pub struct RandomFaults {
    state: u64,
    /// How many tokens there were at the last one.
    last: usize,
    pub count: usize,
}

impl RandomFaults {
    pub fn new() -> Self {
        Self { state: 42, last: 0, count: 0 }
    }

    /// Another batch of requests begins.
    pub fn restart(&mut self) {
        self.last = 0;
    }

    pub fn go_on(&mut self, tokens: usize, swarm: &Swarm) {
        if tokens < self.last + 40 {
            return;
        }
        self.last = tokens;
        self.count += 1;
        swarm.blocks.iter().for_each(|(peer, _)| swarm.network.fail(*peer, Fault::None));
        let fault = [Fault::Cut, Fault::Stopped, Fault::Cut][self.random(3)];
        let peer = swarm.blocks[self.random(swarm.blocks.len())].0;
        swarm.network.fail(peer, fault);
    }

    fn random(&mut self, below: usize) -> usize {
        self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.state >> 33) as usize % below
    }
}

#[derive(Default)]
struct Answers {
    tokens: BTreeMap<RequestId, Vec<TokenId>>,
    ends: BTreeMap<RequestId, FinishReason>,
}

/// Runs requests to their end. `step` is called before each step with the number of tokens so far.
pub fn run(
    engine: &mut SwarmEngine,
    requests: Vec<Request>,
    mut step: impl FnMut(usize, &SwarmEngine),
) -> Vec<Vec<TokenId>> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.add(request).unwrap()).collect();
    let (mut answers, mut events) = (Answers::default(), Vec::new());
    loop {
        step(answers.tokens.values().map(Vec::len).sum(), engine);
        let is_busy = engine.step(&mut events).unwrap();
        for event in events.drain(..) {
            match event.kind {
                EventKind::Token(sampled) => answers.tokens.entry(event.request).or_default().push(sampled.token),
                EventKind::Finished(finished) => drop(answers.ends.insert(event.request, finished.reason)),
                _ => {}
            }
        }
        if !is_busy {
            break;
        }
    }
    for id in &ids {
        assert!(matches!(answers.ends[id], FinishReason::Length), "{:?}", answers.ends[id]);
    }
    ids.iter().map(|id| answers.tokens.remove(id).unwrap_or_default()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_peer_of_any_kind_is_replaced_and_the_tokens_stay() {
    let prompts: Vec<_> = qwen3_prompts().into_iter().take(3).collect();
    for draft_tokens_max in [0, 4] {
        for fault in [Fault::Cut, Fault::Stopped, Fault::Garbled] {
            for index in [0, 1] {
                let swarm = Swarm::new();
                let expected = swarm.expected(&prompts);
                let mut engine = swarm.engine(draft_tokens_max);
                let client = engine.executor().client();
                let requests = prompts.iter().map(|prompt| Request::greedy(prompt.clone(), TOKENS)).collect();
                let mut is_broken = false;
                let found = tokio::task::block_in_place(|| {
                    run(&mut engine, requests, |tokens, _| {
                        if tokens >= 7 && !is_broken {
                            is_broken = true;
                            swarm.network.fail(client.last_chain()[index].peer, fault);
                        }
                    })
                });
                let case = format!("{fault:?} of peer {index}, {draft_tokens_max} draft tokens");
                assert_eq!(found, expected, "{case}");
                assert!(client.counters().replaced.load(Ordering::Relaxed) >= 1, "{case}");
                drop(engine);
                swarm.cut_all_and_check_nothing_is_left();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_under_eight_requests_change_no_token() {
    let swarm = Swarm::new();
    let prompts: Vec<_> = qwen3_prompts().into_iter().cycle().take(8).collect();
    let expected = swarm.expected(&prompts);
    let mut engine = swarm.engine(2);
    let client = engine.executor().client();
    let requests = || prompts.iter().map(|prompt| Request::greedy(prompt.clone(), TOKENS)).collect();
    let mut faults = RandomFaults::new();
    for _ in 0..3 {
        faults.restart();
        let found =
            tokio::task::block_in_place(|| run(&mut engine, requests(), |tokens, _| faults.go_on(tokens, &swarm)));
        assert_eq!(found, expected);
    }
    println!("{} faults, {} spans replaced", faults.count, client.counters().replaced.load(Ordering::Relaxed));
    drop(engine);
    swarm.cut_all_and_check_nothing_is_left();
}

/// A request waits for a chain, and goes on when there is one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_chain_a_request_waits_for_one() {
    let model = Model::qwen3();
    let network = Network::new(false);
    let block = BlockHandle::warming_up();
    network.add(peer(1), model.digest, range(0, 4), block.clone(), 1e-4);
    let prompts = &qwen3_prompts()[..1];
    let expected = inspect::greedy(&mut Engine::new(model.local(), 16), &prompts[0], TOKENS).unwrap();
    let mut engine = Engine::new(model.client(&network, ClientOptions::default()), 16);
    let view = Arc::clone(network.view());
    let loading = tokio::spawn(async move {
        // The client has looked for a chain in vain.
        view.wanted().await;
        tokio::task::block_in_place(|| model.load(&block, range(0, 4), BlockLimits::default()));
    });
    let requests = vec![Request::greedy(prompts[0].clone(), TOKENS)];
    let found = tokio::task::block_in_place(|| run(&mut engine, requests, |_, _| {}));
    loading.await.unwrap();
    assert_eq!(found, [expected]);
    assert_eq!(engine.executor().capacity().pages_free, engine.executor().capacity().pages_total);
}

/// What is kept for replays is dropped when it is too much; a session that then loses a peer is begun again from its tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_loss_after_the_memory_for_replays_was_used_up_changes_no_token() {
    let swarm = Swarm::new();
    let prompts: Vec<Vec<TokenId>> =
        (0..3).map(|number| qwen3_prompts().concat().repeat(9)[number..300].to_vec()).collect();
    let expected = swarm.expected(&prompts);
    // All rows of the three would take six times as much, before two spans.
    let row_bytes = 4 * swarm.model.checkpoint.description().hidden;
    let replay_bytes_max = 300 * row_bytes;
    let mut engine = swarm.engine_with(ClientOptions { replay_bytes_max, ..ClientOptions::default() }, 0);
    let client = engine.executor().client();
    let mut is_broken = false;
    let requests = prompts.iter().map(|prompt| Request::greedy(prompt.clone(), TOKENS)).collect();
    let found = tokio::task::block_in_place(|| {
        run(&mut engine, requests, |tokens, _| {
            if tokens >= 3 * prompts.len() && !is_broken {
                is_broken = true;
                // All but the one that has the whole model.
                swarm.blocks[..4].iter().for_each(|(peer, _)| swarm.network.fail(*peer, Fault::Cut));
            }
        })
    });
    assert_eq!(found, expected);
    assert!(client.counters().dropped.load(Ordering::Relaxed) > 0);
    assert!(engine.stats().preemptions > 0, "a session was begun again");
    // Beside the budget, what comes until a session drops its rows.
    let coming = prompts.len() * 2 * 64 * row_bytes;
    let peak = client.replay_bytes_peak();
    assert!(peak <= replay_bytes_max / 4 * 5 + coming, "{peak} of {replay_bytes_max}");
}
