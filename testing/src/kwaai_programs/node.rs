//! Block servers that are found by their identity: nodes of libp2p whose streams an independent program answers.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use blocks::kwaai::INFERENCE_PROTOCOL;
use directory::PeerId;
use libp2p_node::{Identity, Multiaddr, Node, NodeHandle, NodeOptions};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::block_server;
use crate::python::PythonServer;

/// A node that anybody can connect to on loopback.
pub fn node_options() -> NodeOptions {
    NodeOptions { listen: vec!["/ip4/127.0.0.1/tcp/0".parse().unwrap()], ..NodeOptions::new(Identity::ephemeral()) }
}

pub async fn address_of(handle: &NodeHandle) -> Multiaddr {
    loop {
        if let Some(address) = handle.addresses().into_iter().next() {
            return address.to_string().parse().unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A block server: a node that passes its streams on to a program.
pub struct Server {
    pub identity: Identity,
    handle: NodeHandle,
    address: Multiaddr,
    _program: PythonServer,
}

impl Server {
    pub async fn start(model: &Path, blocks: &str) -> Self {
        let program = block_server(&["--model", model.to_str().unwrap(), "--blocks", blocks]);
        let options = NodeOptions { accepts: vec![INFERENCE_PROTOCOL], ..node_options() };
        let identity = options.identity.clone();
        let (handle, mut streams) = Node::start(options).unwrap();
        let to: SocketAddr = program.address;
        tokio::spawn(async move {
            while let Some(mut incoming) = streams.next().await {
                tokio::spawn(async move {
                    let mut connection = TcpStream::connect(to).await.unwrap();
                    // Either side may close first.
                    let _ = tokio::io::copy_bidirectional(&mut incoming.stream, &mut connection).await;
                });
            }
        });
        let address = address_of(&handle).await;
        Self { identity, handle, address, _program: program }
    }

    pub fn peer(&self) -> PeerId {
        self.handle.peer()
    }

    /// What a registry knows: its addresses, as hexadecimal digits.
    pub fn known(&self) -> (String, Value) {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        (hex(self.peer().as_bytes()), json!([hex(&self.address.to_vec())]))
    }
}
