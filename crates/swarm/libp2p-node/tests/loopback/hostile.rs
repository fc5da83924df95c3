//! Peers without the network's key, peers that speak garbage, and floods.

use std::net::SocketAddr;

use libp2p_node::limits::{
    CONNECTIONS_PER_PEER_MAX, INCOMING_CONNECTIONS_PER_ADDRESS_MAX, INCOMING_HANDSHAKES_MAX,
    INCOMING_STREAMS_PER_CONNECTION_MAX,
};
use libp2p_node::{Identity, Multiaddr, NetworkKey, OpenError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::peer::{ECHO, Peer, QUIC, TCP, exchange, node, until};
use crate::run;

fn private(byte: u8) -> Peer {
    Peer::start(&[TCP], |options| options.network_key = Some(NetworkKey::from_bytes([byte; 32])))
}

#[test]
fn a_private_swarm_refuses_peers_with_another_key_and_with_none() {
    run(async {
        let server = private(1).listening().await;
        let friend = private(1);
        exchange(friend.open(&server).await, 100_000).await;
        for stranger in [private(2), Peer::start(&[], |_| {})] {
            let opened = stranger.node.open(&server.node.peer(), &server.node.addresses(), ECHO).await;
            let error = opened.unwrap_err();
            assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
        }
        exchange(friend.open(&server).await, 100_000).await;
        assert_eq!(server.node.peers().len(), 1);
    });
}

fn socket(address: &Multiaddr) -> SocketAddr {
    let text = address.to_string();
    let parts: Vec<_> = text.split('/').collect();
    format!("{}:{}", parts[2], parts[4]).parse().unwrap()
}

#[test]
fn garbage_costs_its_own_connection() {
    run(async {
        let server = Peer::start(&[TCP], |_| {}).listening().await;
        let friend = Peer::start(&[], |_| {});
        let mut stream = friend.open(&server).await;
        let address = socket(&server.node.addresses()[0]);
        let mut garbage =
            vec![b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 100_000], b"\x13/multistream/1.0.0\n".to_vec()];
        garbage.push([&b"\x13/multistream/1.0.0\n\x07/noise\n"[..], &[0xff; 1000]].concat());
        for bytes in garbage {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let _ = socket.write_all(&bytes).await;
            let _ = socket.shutdown().await;
            let mut answer = Vec::new();
            // The node closes it, with or without an error.
            let _ = socket.read_to_end(&mut answer).await;
        }
        stream.write_all(b"still here").await.unwrap();
        stream.flush().await.unwrap();
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"still here");
    });
}

#[test]
fn a_flood_of_silent_connections_ends_and_others_are_served() {
    run(async {
        let server = Peer::start(&[TCP], |_| {}).listening().await;
        let address = socket(&server.node.addresses()[0]);
        let mut flood = Vec::new();
        for _ in 0..3 * INCOMING_CONNECTIONS_PER_ADDRESS_MAX {
            flood.push(TcpStream::connect(address).await.unwrap());
        }
        // All are closed by the node: those beyond the limit at once, the others when their time is over.
        for mut socket in flood {
            let mut answer = Vec::new();
            let _ = socket.read_to_end(&mut answer).await;
        }
        let client = Peer::start(&[], |_| {});
        exchange(client.open(&server).await, 1000).await;
        assert_eq!(server.node.peers().len(), 1);
    });
}

/// For as long as they stay: clients get in at once, by TCP and by QUIC.
#[test]
fn half_open_connections_from_several_addresses_keep_nobody_out() {
    run(async {
        let server = Peer::start(&[TCP, QUIC], |_| {}).listening().await;
        let mut addresses = Vec::new();
        until("it listens on both", || {
            addresses = server.node.addresses();
            addresses.len() == 2
        })
        .await;
        let is_tcp = |address: &&Multiaddr| address.to_string().contains("/tcp/");
        let to = socket(addresses.iter().find(is_tcp).unwrap());
        let mut flood = Vec::new();
        for number in 0..2 * INCOMING_HANDSHAKES_MAX {
            let from = TcpSocket::new_v4().unwrap();
            from.bind(format!("127.0.0.{}:0", 2 + number % 8).parse().unwrap()).unwrap();
            flood.push(from.connect(to).await.unwrap());
        }
        // They are accepted in the order in which they came, so the flood is there before the clients.
        for address in &addresses {
            for _ in 0..4 {
                let client = Peer::start(&[], |_| {});
                let stream = client.node.open(&server.node.peer(), std::slice::from_ref(address), ECHO).await.unwrap();
                exchange(stream, 1000).await;
            }
        }
        drop(flood);
    });
}

#[test]
fn a_peer_has_a_limited_number_of_connections() {
    run(async {
        let server = Peer::start(&[TCP], |_| {}).listening().await;
        // One peer to the server, because they have one identity.
        let identity = Identity::ephemeral();
        let mut nodes = Vec::new();
        for _ in 0..CONNECTIONS_PER_PEER_MAX {
            let identity = identity.clone();
            let node = Peer::start(&[], |options| options.identity = identity);
            exchange(node.open(&server).await, 1000).await;
            nodes.push(node);
        }
        let more = Peer::start(&[], |options| options.identity = identity);
        let error = more.node.open(&server.node.peer(), &server.node.addresses(), ECHO).await.unwrap_err();
        assert!(matches!(error, OpenError::Lost { .. } | OpenError::Unreachable { .. }), "{error}");
        nodes.pop();
        // The server notices soon that there is room.
        while more.node.open(&server.node.peer(), &server.node.addresses(), ECHO).await.is_err() {}
        let other = Peer::start(&[], |_| {});
        exchange(other.open(&server).await, 1000).await;
    });
}

#[test]
fn a_peer_has_a_limited_number_of_streams() {
    run(async {
        let (server, mut incoming) = node(&[TCP], |_| {});
        until("it listens", || !server.addresses().is_empty()).await;
        let client = Peer::start(&[], |_| {});
        let mut held = Vec::new();
        let mut accepted = Vec::new();
        let mut take = async |held: &mut Vec<_>, accepted: &mut Vec<_>| {
            let stream = client.node.open(&server.peer(), &server.addresses(), ECHO).await.unwrap();
            held.push(stream);
            accepted.push(incoming.next().await.unwrap());
        };
        for _ in 0..INCOMING_STREAMS_PER_CONNECTION_MAX {
            take(&mut held, &mut accepted).await;
        }
        // One more is negotiated, and then ends.
        let mut more = client.node.open(&server.peer(), &server.addresses(), ECHO).await.unwrap();
        let mut rest = Vec::new();
        let _ = more.write_all(b"x").await;
        let _ = more.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
        // A stream that ends makes room.
        drop(accepted.pop());
        take(&mut held, &mut accepted).await;
        assert_eq!(client.node.peers().len(), 1);
    });
}
