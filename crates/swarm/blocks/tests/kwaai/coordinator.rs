//! The way of KwaaiNet's coordinator to a block of ours: it finds the server in the registry, looks the server's addresses up in
//! Kademlia, dials it by its id, and calls it.

use std::sync::Arc;
use std::time::SystemTime;

use blocks::block::Client;
use blocks::kwaai::{DhtClient, INFERENCE_PROTOCOL, KwaaiAnnouncement, KwaaiLimits};
use blocks::node::{StreamHandler, SwarmNode};
use kwaai::dht::KwaaiServerState;
use kwaai::{CallId, KwaaiInput, KwaaiReply, KwaaiRequest, call_frame, read_reply};
use libp2p_core::Multiaddr;
use libp2p_identity::PeerId;
use libp2p_node::NodeOptions;
use types::TokenId;

use super::fixture::{Model, TOLERANCE, distance, greedy, kwaai_server, layers};
use super::libp2p_node::KwaaiNode;
use super::registry::program;
use testing::kwaai_programs::listener::listen;
use testing::kwaai_programs::node::node_options;
use testing::needs;

const NAME: &str = "owner/qwen3.tiny";
const TOKENS: usize = 6;

/// A node that serves all layers to coordinators.
fn serve(model: &Model, options: NodeOptions) -> SwarmNode {
    let server = kwaai_server(model, layers(0, model.layers()), KwaaiLimits::default());
    let handler: StreamHandler = Arc::new(move |peer, stream| {
        let server = server.clone();
        // An error means that there was no answer; the other side sees that.
        tokio::spawn(async move { server.serve_stream(Client::Peer(peer), stream).await });
    });
    SwarmNode::start(options, vec![(INFERENCE_PROTOCOL, handler)]).unwrap()
}

fn libp2p_id(node: &SwarmNode) -> PeerId {
    PeerId::from_bytes(node.handle().peer().as_bytes()).unwrap()
}

/// A coordinator that has joined through this registry.
async fn coordinator(registry: &Multiaddr) -> KwaaiNode {
    let mut coordinator = KwaaiNode::new();
    let Some(libp2p_core::multiaddr::Protocol::P2p(id)) = registry.iter().last() else { panic!("{registry}") };
    coordinator.dial(registry.clone());
    assert!(coordinator.until_identified(id).await);
    coordinator
}

async fn call(coordinator: &mut KwaaiNode, server: PeerId, position: usize, tokens: &[u32], vocab: usize) -> Vec<f32> {
    let id = CallId([position as u8; 16]);
    let tokens = tokens.iter().map(|&token| TokenId(token)).collect();
    let request = KwaaiRequest { session: 1, position: position as u32, input: KwaaiInput::Tokens(tokens) };
    let frame = call_frame(id, &server.to_bytes(), &request).unwrap();
    let payload = coordinator.call(server, frame).await;
    match read_reply(&payload, id).unwrap() {
        KwaaiReply::Logits { tensor, .. } => tensor.last_logits(vocab).unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_goes_through_registry_and_kademlia_to_a_block_of_ours() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let records = program(&[]);
    let mut kademlia = KwaaiNode::new();
    let (records, registry) = (listen(records.address).await, kademlia.listen().await);

    // A node that is connected, and speaks another Kademlia: nobody finds its addresses.
    let deaf = serve(&model, NodeOptions { bootstrap: vec![registry.clone()], ..node_options() });
    assert!(!kademlia.until_identified(libp2p_id(&deaf)).await);
    let node = serve(&model, NodeOptions { ipfs_kademlia: Some(vec![registry.clone()]), ..node_options() });
    assert!(kademlia.until_identified(libp2p_id(&node)).await);
    tokio::spawn(kademlia.run());
    let registries = DhtClient::new(vec![records]);
    for node in [&deaf, &node] {
        let announcement = KwaaiAnnouncement {
            repository: NAME,
            model_layers: model.layers(),
            layers: layers(0, model.layers()),
            peer: node.handle().peer(),
            state: KwaaiServerState::Ready,
            throughput: 5.0,
            public_name: None,
            using_relay: false,
        };
        assert!(registries.announce(&announcement, SystemTime::now()).await[0].1.is_ok());
    }

    let (found, _) = registries.find(NAME, model.layers(), SystemTime::now()).await;
    assert_eq!(found.len(), 2);
    let mut coordinator = coordinator(&registry).await;
    assert!(coordinator.look_up(libp2p_id(&deaf)).await.is_empty());
    let server = found.iter().find(|server| server.peer == node.handle().peer()).unwrap();
    let server = PeerId::from_bytes(server.peer.as_bytes()).unwrap();
    let addresses = coordinator.look_up(server).await;
    assert!(!addresses.is_empty(), "peer not found in DHT (no addresses)");
    coordinator.connect(server, addresses).await;
    let prompt = model.prompt("short");
    let (tokens, expected) = model.greedy(&prompt, TOKENS);
    let (mut position, mut next) = (0, prompt);
    for (token, expected) in tokens.iter().zip(&expected) {
        let logits = call(&mut coordinator, server, position, &next, model.vocab()).await;
        assert!(distance(&logits, expected) < TOLERANCE);
        assert_eq!(greedy(&logits), *token);
        position += next.len();
        next = vec![*token];
    }
}
