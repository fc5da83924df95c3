//! `Peer`: a node that sends back what it gets.

use std::time::Duration;

use libp2p_node::{
    Identity, IncomingStream, IncomingStreams, Multiaddr, Node, NodeHandle, NodeOptions, PeerStream, Scope, peer_text,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::sleep;

pub const ECHO: &str = "/test/echo/1";
pub const TCP: &str = "/ip4/127.0.0.1/tcp/0";
pub const QUIC: &str = "/ip4/127.0.0.1/udp/0/quic-v1";

pub struct Peer {
    pub node: NodeHandle,
}

impl Peer {
    /// A node that listens here, and may have other options.
    pub fn start(listen: &[&str], change: impl FnOnce(&mut NodeOptions)) -> Self {
        let (node, mut incoming) = node(listen, change);
        tokio::spawn(async move {
            while let Some(stream) = incoming.next().await {
                tokio::spawn(echo(stream));
            }
        });
        Self { node }
    }

    /// A node that knows another one.
    pub fn join(listen: &[&str], other: &Peer) -> Self {
        let bootstrap = other.bootstrap();
        Self::start(listen, |options| options.bootstrap = bootstrap)
    }

    /// Its addresses with its id.
    pub fn bootstrap(&self) -> Vec<Multiaddr> {
        let id = peer_text(&self.node.peer());
        self.node.addresses().iter().map(|address| format!("{address}/p2p/{id}").parse().unwrap()).collect()
    }

    /// Its addresses, as soon as it listens.
    pub async fn listening(self) -> Self {
        until("it listens", || !self.node.addresses().is_empty()).await;
        self
    }

    /// Opens a stream to another peer, at its addresses.
    pub async fn open(&self, other: &Peer) -> PeerStream {
        self.node.open(&other.node.peer(), &other.node.addresses(), ECHO).await.unwrap()
    }
}

pub fn node(listen: &[&str], change: impl FnOnce(&mut NodeOptions)) -> (NodeHandle, IncomingStreams) {
    let mut options = NodeOptions::new(Identity::ephemeral());
    options.listen = listen.iter().map(|address| address.parse().unwrap()).collect();
    options.accepts = vec![ECHO];
    options.least_scope = Some(Scope::Host);
    change(&mut options);
    Node::start(options).unwrap()
}

async fn echo(incoming: IncomingStream) {
    assert_eq!(incoming.protocol, ECHO);
    let (mut reader, mut writer) = tokio::io::split(incoming.stream);
    // It ends with an error if the other end is dropped.
    let _ = tokio::io::copy(&mut reader, &mut writer).await;
    let _ = writer.shutdown().await;
}

/// Sends many bytes and gets them back.
pub async fn exchange(stream: PeerStream, len: usize) {
    let sent: Vec<u8> = (0..len).map(|index| (index % 251) as u8).collect();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let bytes = sent.clone();
    let send = tokio::spawn(async move {
        writer.write_all(&bytes).await.unwrap();
        writer.shutdown().await.unwrap();
        writer
    });
    let mut received = Vec::new();
    reader.read_to_end(&mut received).await.unwrap();
    send.await.unwrap();
    assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
}

/// Waits, until the watchdog ends the test.
pub async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let mut rounds = 0;
    while !is_so() {
        sleep(Duration::from_millis(20)).await;
        rounds += 1;
        if rounds % 500 == 0 {
            eprintln!("waiting until {what}");
        }
    }
}
