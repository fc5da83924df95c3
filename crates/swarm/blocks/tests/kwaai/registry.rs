//! We announce our blocks in hivemind's DHT and find those of others, with an independent registry.

use std::time::{Duration, SystemTime};

use blocks::kwaai::{DhtClient, KwaaiAnnouncement, RegistryError};
use kwaai::dht::KwaaiServerState;
use libp2p_core::Multiaddr;
use libp2p_core::multiaddr::Protocol;
use libp2p_identity::Keypair;
use serde_json::{Value, json};

use super::fixture::layers;
use testing::kwaai_programs::listener::listen;
use testing::kwaai_programs::registry;
use testing::needs;
use testing::python::PythonServer;

/// The peers of these tests, as text and as bytes.
fn peer(seed: u8) -> (String, directory::PeerId) {
    let peer = Keypair::ed25519_from_bytes([seed; 32]).unwrap().public().to_peer_id();
    (peer.to_base58(), directory::PeerId::new(&peer.to_bytes()).unwrap())
}

pub fn program(arguments: &[&str]) -> PythonServer {
    registry(arguments)
}

fn announcement(peer: directory::PeerId) -> KwaaiAnnouncement<'static> {
    KwaaiAnnouncement {
        repository: "unsloth/Llama-3.1-8B-Instruct",
        model_layers: 32,
        layers: layers(3, 5),
        peer,
        state: KwaaiServerState::Ready,
        throughput: 12.5,
        public_name: Some("a server"),
        using_relay: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_is_announced_found_and_withdrawn() {
    if !needs::python() {
        return;
    }
    let mut registry = program(&[]);
    let client = DhtClient::new(vec![listen(registry.address).await]);
    let (text, peer) = peer(1);
    let now = SystemTime::now();
    let answers = client.announce(&announcement(peer), now).await;
    assert_eq!(*answers[0].1.as_ref().unwrap(), 4);
    let mut records: Vec<Value> = (0..4).map(|_| serde_json::from_str(&registry.line()).unwrap()).collect();
    let fields = json!({
        "start_block": 3, "end_block": 5, "public_name": "a server", "version": "kwaai-0.3.15", "torch_dtype": "float16",
        "using_relay": false, "cache_tokens_left": 100_000, "adapters": [], "next_pings": {}, "peer_id": &text,
        "lease_v1": false,
    });
    let server = json!([2, 12.5, fields]);
    for record in &mut records {
        let lifetime = record["lifetime"].take().as_i64().unwrap();
        assert!((300..=360).contains(&lifetime), "{lifetime}");
    }
    let record = |key: &str, subkey: &str, value: &Value| json!({ "key": key, "subkey": subkey, "lifetime": null, "value": value });
    let model = json!({ "repository": "unsloth/Llama-3.1-8B-Instruct", "num_blocks": 32 });
    assert_eq!(records[0], record("0a63ed21831f3f7d24f07949cea69a94476b4faf", "Llama-3-1-8B-Instruct", &model));
    assert_eq!(records[1], record("531c2cf657a8e75384a436a0dcf6d170c8040d8a", &text, &server));
    for record in &records[2..] {
        assert_eq!((&record["subkey"], &record["value"]), (&json!(text), &server));
    }
    let (found, _) = client.find("unsloth/Llama-3.1-8B-Instruct", 32, now).await;
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].peer, found[0].layers, found[0].throughput), (peer, layers(3, 5), 12.5));
    assert!(client.find("another/model", 32, now).await.0.is_empty());
    // The same again is not fresher; a withdrawal is.
    assert_eq!(*client.announce(&announcement(peer), now).await[0].1.as_ref().unwrap(), 0);
    let later = now + Duration::from_secs(1);
    let offline = KwaaiAnnouncement { state: KwaaiServerState::Offline, ..announcement(peer) };
    assert_eq!(*client.announce(&offline, later).await[0].1.as_ref().unwrap(), 4);
    assert!(client.find("unsloth/Llama-3.1-8B-Instruct", 32, later).await.0.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_servers_that_are_ready_and_make_sense_are_found() {
    if !needs::python() {
        return;
    }
    let name = |seed| peer(seed).0;
    let record = |key: &str, peer: &str, state: i32, range: [u32; 2], version: &str| {
        json!({ "key": key, "peer": peer, "state": state, "throughput": 1.5, "start": range[0], "end": range[1],
                "version": version, "expires_in": 100 })
    };
    let records = json!([
        record("m.0", &name(1), 2, [0, 2], "kwaai-0.4.0"),
        record("m.1", &name(1), 2, [0, 2], "kwaai-0.4.0"),
        record("m.1", &name(2), 2, [1, 4], "kwaai-1.0.0"),
        record("m.2", &name(3), 0, [2, 4], "kwaai-0.4.0"),
        record("m.2", &name(4), -1, [2, 4], "kwaai-0.4.0"),
        record("m.2", &name(5), 2, [2, 4], "kwaai-0.3.14"),
        record("m.2", &name(6), 2, [2, 5], "kwaai-0.4.0"),
        record("m.2", &name(7), 2, [3, 3], "kwaai-0.4.0"),
        record("m.2", "not a peer", 2, [2, 4], "kwaai-0.4.0"),
        { "key": "m.3", "peer": name(8), "raw": "c1", "expires_in": 100 },
        record("m.3", &name(9), 2, [3, 4], "kwaai-0.4.0"),
        record("other.0", &name(10), 2, [0, 4], "kwaai-0.4.0"),
    ]);
    let registries = [program(&["--records", &records.to_string()]), program(&[]), program(&["--lie", "close"])];
    let mut addresses = Vec::new();
    for registry in &registries {
        addresses.push(listen(registry.address).await);
    }
    let client = DhtClient::new(addresses.clone());
    let (found, answers) = client.find("owner/m", 4, SystemTime::now()).await;
    let found: Vec<_> = found.into_iter().map(|server| (server.peer, server.layers)).collect();
    let expected = [(1, layers(0, 2)), (2, layers(1, 4)), (9, layers(3, 4))];
    assert_eq!(found, expected.map(|(seed, layers)| (peer(seed).1, layers)));
    assert!(matches!(answers.as_slice(), [(_, Ok(3)), (_, Ok(0)), (_, Err(_))]), "{answers:?}");
    // After they have expired.
    let later = SystemTime::now() + Duration::from_secs(101);
    assert!(client.find("owner/m", 4, later).await.0.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registry_that_lies_or_is_another_is_an_error() {
    if !needs::python() {
        return;
    }
    let announcement = announcement(peer(1).1);
    for (lie, why) in [
        ("na", "is not served there"),
        ("error", "no such method"),
        ("garbage", "answered nonsense"),
        ("flags", "1 flags, not 4"),
        ("close", "closed the stream before a frame"),
    ] {
        let registry = program(&["--lie", lie]);
        let client = DhtClient::new(vec![listen(registry.address).await]);
        let error = client.announce(&announcement, SystemTime::now()).await.remove(0).1.unwrap_err();
        assert!(error.to_string().contains(why), "{lie}: {error}");
    }
    let registry = program(&[]);
    let mut address = listen(registry.address).await;
    address.pop();
    let error = async |address: Multiaddr| {
        DhtClient::new(vec![address]).announce(&announcement, SystemTime::now()).await.remove(0).1.unwrap_err()
    };
    let other = Protocol::P2p(Keypair::generate_ed25519().public().to_peer_id());
    assert!(matches!(error(address.clone().with(other)).await, RegistryError::OtherPeer { .. }));
    assert!(matches!(error("/ip4/127.0.0.1/tcp/1".parse().unwrap()).await, RegistryError::Connect(_)));
    assert!(matches!(error("/ip4/127.0.0.1/udp/1".parse().unwrap()).await, RegistryError::Address(_)));
    // Without an id, whoever is there is asked; by name, too.
    address.pop();
    let registry = listen(registry.address).await;
    let Some(Protocol::Tcp(port)) = registry.iter().nth(1) else { panic!("{registry}") };
    let by_name = format!("/dns4/localhost/tcp/{port}").parse().unwrap();
    let answers = DhtClient::new(vec![by_name]).announce(&announcement, SystemTime::now()).await;
    assert_eq!(*answers[0].1.as_ref().unwrap(), 4);
}
