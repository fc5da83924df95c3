//! Peers that find each other through a third one.

use libp2p_node::{FindError, Reachability};

use crate::peer::{ECHO, Peer, QUIC, TCP, exchange, until};
use crate::run;

#[test]
fn a_provider_is_found_through_a_bootstrap_peer() {
    run(async {
        let bootstrap = Peer::start(&[TCP], |_| {}).listening().await;
        let provider = Peer::join(&[TCP, QUIC], &bootstrap);
        provider.node.provide(b"blocks of a model").await.unwrap();
        let client = Peer::join(&[TCP], &bootstrap);
        let found = found(&client, b"blocks of a model").await;
        assert_eq!(found, [provider.node.peer()]);
        // No address is given.
        exchange(client.node.open(&found[0], &[], ECHO).await.unwrap(), 100_000).await;
        assert_eq!(client.node.providers(b"another key").await.unwrap(), []);
    });
}

/// The providers, as soon as there are some.
async fn found(client: &Peer, key: &[u8]) -> Vec<directory::PeerId> {
    loop {
        let found = client.node.providers(key).await.unwrap();
        if !found.is_empty() {
            return found;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

#[test]
fn a_peer_that_stops_providing_is_not_found_on_its_own_node() {
    run(async {
        let provider = Peer::start(&[TCP], |_| {}).listening().await;
        provider.node.provide(b"key").await.unwrap();
        let client = Peer::join(&[TCP], &provider);
        assert_eq!(found(&client, b"key").await, [provider.node.peer()]);
        provider.node.stop_providing(b"key").await;
        let mut left = 1;
        while left > 0 {
            left = client.node.providers(b"key").await.unwrap().len();
        }
    });
}

#[test]
fn a_node_finds_out_that_it_is_reachable() {
    run(async {
        let bootstrap = Peer::start(&[TCP], |_| {}).listening().await;
        let peer = Peer::join(&[TCP], &bootstrap);
        until("it is reachable", || peer.node.reachability() == Reachability::Direct).await;
        // Nobody else tests a node that waits to be found.
        assert_eq!(bootstrap.node.reachability(), Reachability::Unknown);
    });
}

#[test]
fn a_key_is_neither_empty_nor_long() {
    run(async {
        let peer = Peer::start(&[], |_| {});
        for key in [&[][..], &[0; 65]] {
            assert_eq!(peer.node.provide(key).await, Err(FindError::Key));
            assert_eq!(peer.node.providers(key).await, Err(FindError::Key));
        }
    });
}
