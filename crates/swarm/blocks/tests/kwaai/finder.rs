//! A client finds block servers through registries, uses them in chains with a peer of ours, and stops when they are withdrawn.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blocks::client::{ClientOptions, ForeignPeers, SwarmClient, SwarmExecutor};
use blocks::kwaai::{DhtClient, KwaaiAnnouncement, KwaaiFinder, KwaaiModel};
use blocks::node::SwarmNode;
use blocks::view::{SwarmView, now};
use directory::{BlockRecord, BlockUse, ModelDigest, PeerId, Reach, ServiceState, SignedRecord, Speed, VerifiedRecord};
use engine::{CoordinatorStage, Engine, inspect};
use kwaai::dht::KwaaiServerState;
use libp2p_core::Multiaddr;
use libp2p_node::{Identity, InlinedKeys, NodeOptions};
use model::ModelPart;
use serde_json::Value;
use tokio::runtime::Handle;
use types::{DType, TokenId};

use super::fixture::{Model, OPTIONS, backend, block, layers};
use super::registry::program;
use testing::kwaai_programs::listener::listen;
use testing::kwaai_programs::node::{Server, address_of, node_options};
use testing::needs;

pub const DIGEST: ModelDigest = ModelDigest([9; 32]);
const NAME: &str = "owner/qwen3.tiny";
const TOKENS: usize = 6;

pub fn record(peer: PeerId, range: [u32; 2]) -> BlockRecord {
    let issued = now();
    let speed = Speed { layer_seconds: 0.001, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e8 };
    BlockRecord {
        peer,
        sequence: issued.0,
        issued,
        lifetime_ms: 600_000,
        model: DIGEST,
        layers: layers(range[0], range[1]),
        block_use: BlockUse::Whole,
        dtype: DType::F32,
        state: ServiceState::Serving,
        reach: Reach::Direct,
        speed,
        kv_tokens_free: 100_000,
        coordinate: None,
        neighbours: Vec::new(),
    }
}

fn announcement(peer: PeerId, range: [u32; 2], state: KwaaiServerState) -> KwaaiAnnouncement<'static> {
    KwaaiAnnouncement {
        repository: NAME,
        model_layers: 4,
        layers: layers(range[0], range[1]),
        peer,
        state,
        throughput: 5.0,
        public_name: None,
        using_relay: false,
    }
}

fn spans(client: &SwarmClient) -> Vec<(PeerId, String)> {
    client.last_chain().iter().map(|span| (span.peer, span.layers.to_string())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_uses_the_servers_that_registries_name_until_they_are_withdrawn() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    // One begins within the other's block: it is used only from its own start. One has the last layer, as a peer of ours.
    let [server, overlapping, last] = [
        Server::start(&model.path, "0-2").await,
        Server::start(&model.path, "1-3").await,
        Server::start(&model.path, "2-4").await,
    ];
    let known: serde_json::Map<_, _> = [&server, &overlapping, &last].map(Server::known).into_iter().collect();
    let registries = [program(&["--addresses", &Value::Object(known).to_string()]), program(&["--lie", "close"])];
    let mut addresses = vec![listen(registries[0].address).await];
    let registry = DhtClient::new(addresses.clone());
    let announce = async |server: &Server, range, state, after| {
        let answers = registry.announce(&announcement(server.peer(), range, state), SystemTime::now() + after).await;
        assert!(answers[0].1.as_ref().is_ok_and(|&taken| taken >= 4), "{answers:?}");
    };
    announce(&server, [0, 2], KwaaiServerState::Ready, Duration::ZERO).await;
    announce(&overlapping, [1, 3], KwaaiServerState::Ready, Duration::ZERO).await;
    announce(&last, [2, 4], KwaaiServerState::Ready, Duration::ZERO).await;

    // A peer of ours has the layers behind, and nobody has the first ones but the server that was found.
    let own = SwarmNode::start(node_options(), Vec::new()).unwrap();
    own.server().set_block(DIGEST, block(&model, layers(2, 4)));
    let bootstrap = address_of(own.handle()).await.to_string();
    let bootstrap = format!("{bootstrap}/p2p/{}", libp2p_node::peer_text(&own.handle().peer())).parse().unwrap();
    let node = SwarmNode::start(
        NodeOptions { bootstrap: vec![bootstrap], ..NodeOptions::new(Identity::ephemeral()) },
        Vec::new(),
    )
    .unwrap();
    node.view().insert(VerifiedRecord::configured(record(own.handle().peer(), [2, 4])).unwrap()).unwrap();
    let foreign = ForeignPeers::default();
    let kwaai_model = KwaaiModel { digest: DIGEST, layers: 4, hidden: model.hidden(), vocab: model.vocab() };
    let finder = |addresses: &[Multiaddr], view: &Arc<SwarmView>, foreign: &ForeignPeers| {
        let (dial, view) = (node.dial(), Arc::clone(view));
        KwaaiFinder::new(addresses.to_vec(), NAME.to_owned(), kwaai_model, dial, view, foreign.clone())
    };
    let mut found = finder(&addresses, node.view(), &foreign);
    assert_eq!(found.look_up().await, 3);
    // Another client has a registry too that does not answer.
    addresses.push(listen(registries[1].address).await);
    let others = ForeignPeers::default();
    let mut incomplete = finder(&addresses, &Arc::default(), &others);
    assert_eq!(incomplete.look_up().await, 3);
    assert!([&server, &overlapping, &last].iter().all(|server| foreign.contains(&server.peer())));

    let ends =
        CoordinatorStage::load(backend(), &model.checkpoint, &OPTIONS, ModelPart::coordinator(0), &mut |_| {}).unwrap();
    let executor = SwarmExecutor::new(
        ends,
        4,
        DIGEST,
        node.dial(),
        Arc::clone(node.view()),
        ClientOptions::default(),
        foreign.clone(),
        Handle::current(),
    );
    let client = executor.client();
    let prompt = model.prompt("short");
    let tokens: Vec<_> = prompt.iter().map(|&token| TokenId(token)).collect();
    let generate = move || {
        let mut engine = Engine::new(executor, OPTIONS.limits.step.rows);
        inspect::greedy(&mut engine, &tokens, TOKENS).unwrap()
    };
    let answer = tokio::task::spawn_blocking(generate).await.unwrap();
    let answer: Vec<_> = answer.into_iter().map(|token| token.0).collect();
    assert_eq!(answer, model.greedy(&prompt, TOKENS).0);
    assert_eq!(spans(&client), [(server.peer(), "0..2".to_owned()), (own.handle().peer(), "2..4".to_owned())]);

    announce(&server, [0, 2], KwaaiServerState::Offline, Duration::from_secs(1)).await;
    assert!(client.plan(32).is_ok());
    assert_eq!(found.look_up().await, 2);
    assert!(!foreign.contains(&server.peer()) && foreign.contains(&overlapping.peer()));
    assert!(client.plan(32).unwrap_err().to_string().contains("no peer serves layers 0..1"));
    // The registry that does not answer may know it, so there it is kept.
    assert_eq!(incomplete.look_up().await, 3);
    assert!(others.contains(&server.peer()));
    // A peer that announces the model in our own protocol is used in that.
    let own_record = SignedRecord::sign(record(overlapping.peer(), [1, 3]), &overlapping.identity).unwrap();
    node.view().insert(own_record.verify(&InlinedKeys, now()).unwrap()).unwrap();
    assert_eq!(found.look_up().await, 1);
    assert!(!foreign.contains(&overlapping.peer()));
    assert!(node.view().record(&DIGEST, &overlapping.peer()).is_some());
}
