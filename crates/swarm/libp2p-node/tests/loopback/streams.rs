//! Streams between two nodes.

use libp2p_node::{NetworkKey, NodeError, OpenError, PeerChange, peer_text};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::peer::{ECHO, Peer, QUIC, TCP, exchange, node, until};
use crate::run;

#[test]
fn bytes_are_exchanged_over_tcp() {
    run(bytes_are_exchanged(TCP, "/tcp/"));
}

#[test]
fn bytes_are_exchanged_over_quic() {
    run(bytes_are_exchanged(QUIC, "/quic-v1"));
}

async fn bytes_are_exchanged(listen: &str, expected: &str) {
    let server = Peer::start(&[listen], |_| {}).listening().await;
    let client = Peer::start(&[], |_| {});
    for len in [0, 1, 3_000_000] {
        exchange(client.open(&server).await, len).await;
    }
    let peers = client.node.peers();
    assert_eq!(peers.len(), 1);
    assert_eq!(peers[0].peer, server.node.peer());
    assert!(peers[0].address.to_string().contains(expected), "{peers:?}");
    assert!(!peers[0].is_relayed);
    until("a round trip is measured", || client.node.round_trip(&server.node.peer()).is_some()).await;
    until("peers describe themselves", || client.node.peers()[0].agent.starts_with("consort/")).await;
}

#[test]
fn many_streams_are_opened_at_once() {
    run(async {
        let server = Peer::start(&[TCP], |_| {}).listening().await;
        let client = Peer::start(&[], |_| {});
        let mut streams = Vec::new();
        for _ in 0..50 {
            let (node, peer, addresses) = (client.node.clone(), server.node.peer(), server.node.addresses());
            streams.push(tokio::spawn(async move {
                exchange(node.open(&peer, &addresses, ECHO).await.unwrap(), 1000).await;
            }));
        }
        for stream in streams {
            stream.await.unwrap();
        }
    });
}

#[test]
fn a_protocol_that_is_not_accepted_is_a_clear_error() {
    run(async {
        let server = Peer::start(&[TCP], |_| {}).listening().await;
        let client = Peer::start(&[], |_| {});
        let (peer, addresses) = (server.node.peer(), server.node.addresses());
        let error = client.node.open(&peer, &addresses, "/test/other/1").await.unwrap_err();
        assert_eq!(error, OpenError::Protocol { peer: peer_text(&peer), protocol: "/test/other/1" });
        exchange(client.open(&server).await, 10).await;
    });
}

#[test]
fn a_peer_that_is_not_there_is_a_clear_error() {
    run(async {
        let gone = Peer::start(&[TCP], |_| {}).listening().await;
        let (peer, addresses) = (gone.node.peer(), gone.node.addresses());
        let client = Peer::start(&[], |_| {});
        exchange(client.open(&gone).await, 10).await;
        drop(gone);
        until("it has ended", || client.node.peers().is_empty()).await;
        let error = client.node.open(&peer, &addresses, ECHO).await.unwrap_err();
        assert!(matches!(&error, OpenError::Unreachable { peer: text, .. } if *text == peer_text(&peer)), "{error}");
        let error = client.node.open(&client.node.peer(), &addresses, ECHO).await.unwrap_err();
        assert_eq!(error, OpenError::Itself);
        // Another peer at this address.
        let other = Peer::start(&[TCP], |_| {}).listening().await;
        let error = client.node.open(&peer, &other.node.addresses(), ECHO).await.unwrap_err();
        assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    });
}

#[test]
fn dropping_the_handles_ends_the_node() {
    run(async {
        let (server, mut incoming) = node(&[TCP], |_| {});
        until("it listens", || !server.addresses().is_empty()).await;
        let client = Peer::start(&[], |_| {});
        let mut changes = client.node.changes();
        let peer = server.peer();
        let mut stream = client.node.open(&peer, &server.addresses(), ECHO).await.unwrap();
        stream.write_all(b"x").await.unwrap();
        stream.flush().await.unwrap();
        let accepted = incoming.next().await.unwrap();
        assert_eq!(accepted.peer, client.node.peer());
        let own = server.changes();
        drop(server.clone());
        drop(server);
        assert!(incoming.next().await.is_none());
        let mut rest = Vec::new();
        // An end or an error: the connection is gone.
        let _ = stream.read_to_end(&mut rest).await;
        assert_eq!(changes.recv().await.unwrap(), PeerChange::Connected(peer));
        assert_eq!(changes.recv().await.unwrap(), PeerChange::Disconnected(peer));
        drop(own);
    });
}

#[test]
fn a_disconnected_peer_can_be_opened_again() {
    run(async {
        let server = Peer::start(&[TCP, QUIC], |_| {}).listening().await;
        let client = Peer::start(&[], |_| {});
        for _ in 0..3 {
            exchange(client.open(&server).await, 100).await;
            client.node.disconnect(&server.node.peer()).await;
            until("they are not connected", || client.node.peers().is_empty()).await;
        }
    });
}

#[test]
fn options_that_can_not_work_are_refused() {
    run(async {
        let failing = |change: fn(&mut libp2p_node::NodeOptions)| {
            let mut options = libp2p_node::NodeOptions::new(libp2p_node::Identity::ephemeral());
            change(&mut options);
            libp2p_node::Node::start(options).map(|_| ()).unwrap_err()
        };
        let error = failing(|options| {
            options.network_key = Some(NetworkKey::from_bytes([7; 32]));
            options.listen = vec![QUIC.parse().unwrap()];
        });
        assert!(matches!(error, NodeError::PrivateQuic { .. }), "{error}");
        let error = failing(|options| options.bootstrap = vec![TCP.parse().unwrap()]);
        assert!(matches!(error, NodeError::Bootstrap { .. }), "{error}");
        let error = failing(|options| options.accepts = vec!["/one", "/one"]);
        assert!(matches!(error, NodeError::Protocol { .. }), "{error}");
        let error = failing(|options| options.accepts = vec!["one"]);
        assert!(matches!(error, NodeError::Protocol { .. }), "{error}");
        let error = failing(|options| options.listen = vec!["/p2p-circuit".parse().unwrap()]);
        assert!(matches!(error, NodeError::Circuit { .. }), "{error}");
        let error = failing(|options| options.listen = vec!["/ip4/127.0.0.1/sctp/1".parse().unwrap()]);
        assert!(matches!(error, NodeError::Listen { .. }), "{error}");
    });
}
