//! Servers with the model's last layer return logits: they are in chains that have no other end.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blocks::block::BlockHandle;
use blocks::client::{ClientOptions, ForeignPeers, SwarmClient, SwarmExecutor};
use blocks::kwaai::{KwaaiModel, KwaaiPeer, KwaaiRoute, insert_record};
use blocks::node::SwarmNode;
use directory::{PeerId, Reach, VerifiedRecord};
use engine::{
    CoordinatorStage, Engine, Event, EventKind, Failure, FinishReason, Finished, Pooling, Request, RequestId,
    RequestKind,
};
use kernels::cpu::CpuBackend;
use libp2p_node::{Identity, NodeOptions};
use model::ModelPart;
use tokio::runtime::Handle;
use types::TokenId;

use super::finder::{DIGEST, record};
use super::fixture::{Form, Model, OPTIONS, backend, block, layers};
use super::span::python_server;
use testing::kwaai_programs::node::{address_of, node_options};
use testing::needs;
use testing::python::PythonServer;

const TOKENS: usize = 6;
const LAYERS: usize = 4;
/// The layers of most last servers.
const LAST: [u32; 2] = [2, 4];

/// A client's view of block servers, and of a peer of ours, which is unknown at first.
struct Swarm {
    model: Model,
    node: SwarmNode,
    foreign: ForeignPeers,
    servers: Vec<PythonServer>,
    own: SwarmNode,
    own_block: BlockHandle,
}

impl Swarm {
    async fn new() -> Self {
        let model = Model::open("qwen3/model-f32");
        let own = SwarmNode::start(node_options(), Vec::new()).unwrap();
        let own_block = block(&model, layers(LAST[0], LAST[1]));
        own.server().set_block(DIGEST, own_block.clone());
        let address = address_of(own.handle()).await;
        let bootstrap = format!("{address}/p2p/{}", libp2p_node::peer_text(&own.handle().peer())).parse().unwrap();
        let options = NodeOptions { bootstrap: vec![bootstrap], ..NodeOptions::new(Identity::ephemeral()) };
        let node = SwarmNode::start(options, Vec::new()).unwrap();
        Self { model, node, foreign: ForeignPeers::default(), servers: Vec::new(), own, own_block }
    }

    /// Has a server of KwaaiNet used.
    fn add(&mut self, range: [u32; 2], arguments: &[&str]) -> PeerId {
        let range = layers(range[0], range[1]);
        let server = python_server(&self.model, range, Form::Local, arguments);
        let peer = PeerId::new(&[0, self.servers.len() as u8]).unwrap();
        let (hidden, vocab) = (self.model.hidden(), self.model.vocab());
        let model = KwaaiModel { digest: DIGEST, layers: LAYERS, hidden, vocab };
        let kwaai = KwaaiPeer::new(KwaaiRoute::Local(server.address), range, &model).unwrap();
        self.foreign.insert(peer, Arc::new(kwaai));
        insert_record(self.node.view(), DIGEST, peer, range, Reach::Direct).unwrap();
        self.servers.push(server);
        peer
    }

    fn add_own(&self) -> PeerId {
        let peer = self.own.handle().peer();
        self.node.view().insert(VerifiedRecord::configured(record(peer, LAST)).unwrap()).unwrap();
        peer
    }

    fn client(&self, options: ClientOptions) -> (Engine<SwarmExecutor<CpuBackend>>, SwarmClient) {
        let from = &self.model.checkpoint;
        let ends = CoordinatorStage::load(backend(), from, &OPTIONS, ModelPart::coordinator(0), &mut |_| {}).unwrap();
        let (dial, view) = (self.node.dial(), Arc::clone(self.node.view()));
        let foreign = self.foreign.clone();
        let executor = SwarmExecutor::new(ends, LAYERS, DIGEST, dial, view, options, foreign, Handle::current());
        let client = executor.client();
        (Engine::new(executor, OPTIONS.limits.step.rows), client)
    }

    /// Generates the tokens of one process. After the first one, `change` is called.
    async fn check(
        &mut self,
        client: &mut Engine<SwarmExecutor<CpuBackend>>,
        prompt: &str,
        change: impl FnOnce(&mut Self),
    ) {
        let prompt = self.model.prompt(prompt);
        let expected = self.model.greedy(&prompt, TOKENS).0;
        let (mut change, mut found) = (Some(change), Vec::new());
        tokio::task::block_in_place(|| {
            for event in client.generate(request(&prompt, TOKENS)).unwrap() {
                match event.unwrap() {
                    EventKind::Token(sampled) => found.push(sampled.token.0),
                    EventKind::Finished(Finished { reason, .. }) => {
                        assert!(matches!(reason, FinishReason::Length), "{reason:?}")
                    }
                    _ => {}
                }
                if found.len() == 1 {
                    let change = change.take().into_iter();
                    change.for_each(|change| change(self));
                }
            }
        });
        assert_eq!(found, expected);
    }
}

fn request(prompt: &[u32], tokens: usize) -> Request {
    Request::greedy(prompt.iter().map(|&token| TokenId(token)).collect(), tokens)
}

fn chain(client: &SwarmClient) -> Vec<PeerId> {
    client.last_chain().iter().map(|span| span.peer).collect()
}

fn unchanged(_: &mut Swarm) {}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_of_kwaainet_alone_are_a_chain() {
    if !needs::python() {
        return;
    }
    for blocks in [&[[0, 2], LAST][..], &[[0, 4]]] {
        let mut swarm = Swarm::new().await;
        let servers: Vec<_> = blocks.iter().map(|&range| swarm.add(range, &[])).collect();
        let (mut engine, client) = swarm.client(ClientOptions::default());
        assert!(client.plan(32).is_ok());
        // The long one is run in several steps, of which only the last one has logits.
        for prompt in ["len1", "short", "mid"] {
            swarm.check(&mut engine, prompt, unchanged).await;
            assert_eq!(chain(&client), servers);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chain_that_ends_in_states_is_preferred_and_each_replaces_the_other() {
    if !needs::python() {
        return;
    }
    let mut swarm = Swarm::new().await;
    let (first, last, _whole) = (swarm.add([0, 2], &[]), swarm.add(LAST, &[]), swarm.add([0, 4], &[]));
    let own = swarm.add_own();
    let (mut engine, client) = swarm.client(ClientOptions::default());
    swarm.check(&mut engine, "short", unchanged).await;
    assert_eq!(chain(&client), [first, own]);
    // Without it in the middle of an answer, and without any chain that ends in states.
    swarm.check(&mut engine, "short", |swarm| swarm.own_block.close()).await;
    assert_eq!(chain(&client), [first, last]);
    assert_eq!(client.counters().replaced.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_last_server_that_lies_is_replaced() {
    if !needs::python() {
        return;
    }
    for (lie, is_replaced_by_own) in
        [("nan-logits", true), ("nan-logits", false), ("vocabulary", false), ("states", true)]
    {
        let mut swarm = Swarm::new().await;
        let (first, liar) = (swarm.add([0, 2], &[]), swarm.add(LAST, &["--lie", lie]));
        let (mut engine, client) = swarm.client(ClientOptions::default());
        // It lies after its first call.
        swarm
            .check(&mut engine, "short", |swarm| {
                assert_eq!(chain(&client), [first, liar]);
                match is_replaced_by_own {
                    true => swarm.add_own(),
                    false => swarm.add(LAST, &[]),
                };
            })
            .await;
        let [found, last] = *chain(&client) else { panic!("{lie}") };
        assert!(found == first && last != liar, "{lie}");
        assert!(swarm.node.view().score(&liar) > 0.0 && swarm.node.view().score(&first) == 0.0, "{lie}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_needs_states_fails_alone_in_a_chain_that_ends_in_logits() {
    if !needs::python() {
        return;
    }
    let mut swarm = Swarm::new().await;
    swarm.add([0, 4], &[]);
    let (mut engine, _client) = swarm.client(ClientOptions::default());
    let prompt = swarm.model.prompt("short");
    let expected = swarm.model.greedy(&prompt, 2 * TOKENS).0;
    let stream = engine.add(request(&prompt, 2 * TOKENS)).unwrap();
    let embed = |pooling| Request { kind: RequestKind::Embed(pooling), ..request(&prompt, 0) };
    let scored = |prompt, tokens| Request { prompt_logprobs: Some(1), ..request(prompt, tokens) };
    let refused = [
        embed(Pooling::Mean),
        embed(Pooling::Last),
        scored(&prompt, 0),
        scored(&prompt, 3),
        // Its only row is the last one too.
        scored(&prompt[..2], 1),
    ];
    let refused = refused.map(|request| engine.add(request).unwrap());
    let (mut tokens, mut ends) = (Vec::new(), HashMap::<RequestId, FinishReason>::new());
    tokio::task::block_in_place(|| {
        let mut events = Vec::new();
        while engine.step(&mut events).unwrap() || !events.is_empty() {
            for Event { request, kind } in events.drain(..) {
                match kind {
                    EventKind::Token(sampled) => {
                        assert_eq!(request, stream);
                        tokens.push(sampled.token.0);
                    }
                    EventKind::Finished(finished) => assert!(ends.insert(request, finished.reason).is_none()),
                    EventKind::Embedding(_) => panic!("an embedding of zeros"),
                    _ => {}
                }
            }
        }
    });
    assert_eq!(tokens, expected);
    assert!(matches!(ends[&stream], FinishReason::Length));
    for request in refused {
        let FinishReason::Failed(failure @ Failure::NoStates) = &ends[&request] else { panic!("{:?}", ends[&request]) };
        assert!(failure.to_string().contains("embeddings"), "{failure}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_states_are_checked_by_others() {
    if !needs::python() {
        return;
    }
    let mut swarm = Swarm::new().await;
    let firsts = [swarm.add([0, 2], &[]), swarm.add([0, 2], &[])];
    let lasts = [swarm.add(LAST, &[]), swarm.add(LAST, &[])];
    for _ in ["logits", "states"] {
        let (mut engine, client) = swarm.client(ClientOptions { verify: 1.0, ..ClientOptions::default() });
        while client.counters().checks.load(Ordering::Relaxed) < 2 {
            swarm.check(&mut engine, "short", unchanged).await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(client.counters().differences.load(Ordering::Relaxed), 0);
        assert_eq!(client.counters().replaced.load(Ordering::Relaxed), 0);
        let own = swarm.add_own();
        assert!(firsts.iter().chain(&lasts).chain([&own]).all(|peer| swarm.node.view().score(peer) == 0.0));
    }
}
