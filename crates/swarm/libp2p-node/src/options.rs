//! `NodeOptions`: what a node is started with.

use libp2p_core::Multiaddr;
use libp2p_core::multiaddr::Protocol;
use libp2p_identity::PeerId;

use crate::error::NodeError;
use crate::identity::Identity;
use crate::network_key::NetworkKey;
use crate::view::{Scope, is_relayed};

#[derive(Clone, Debug)]
pub struct NodeOptions {
    pub identity: Identity,
    /// Where others can connect: `/ip4/0.0.0.0/tcp/4001`, `/ip4/0.0.0.0/udp/4001/quic-v1`. With none, the node is reached
    /// through a relay.
    pub listen: Vec<Multiaddr>,
    /// Addresses at which others reach this node, where it can not find out itself.
    pub external: Vec<Multiaddr>,
    /// Peers to join the swarm through, each `…/p2p/ID`. A node without any is one that others begin with.
    pub bootstrap: Vec<Multiaddr>,
    /// Addresses of peers that the user named beside those to join through. Where they are, others are dialled too.
    pub named: Vec<Multiaddr>,
    /// Take part in the Kademlia network of libp2p's default protocol too, beside our own, and join it through these peers. Others
    /// then find this node's addresses there.
    pub ipfs_kademlia: Option<Vec<Multiaddr>>,
    /// The least scope of addresses that are dialled because somebody claims them. Without one, what the user named decides, and
    /// where the node listens.
    pub least_scope: Option<Scope>,
    /// Makes the swarm private, and its connections TCP.
    pub network_key: Option<NetworkKey>,
    /// Finds peers on the LAN, and connects to them.
    pub mdns: bool,
    /// Carries connections of peers that can not be reached. For a node that can be.
    pub relay_server: bool,
    /// Protocols of streams that others may open.
    pub accepts: Vec<&'static str>,
}

impl NodeOptions {
    /// A node that others can not find: it listens nowhere and knows nobody.
    pub fn new(identity: Identity) -> Self {
        Self {
            identity,
            listen: Vec::new(),
            external: Vec::new(),
            bootstrap: Vec::new(),
            named: Vec::new(),
            ipfs_kademlia: None,
            least_scope: None,
            network_key: None,
            mdns: false,
            relay_server: false,
            accepts: Vec::new(),
        }
    }

    pub(crate) fn check(&self) -> Result<(), NodeError> {
        for (index, protocol) in self.accepts.iter().enumerate() {
            if !protocol.starts_with('/') || self.accepts[..index].contains(protocol) {
                return Err(NodeError::Protocol { protocol });
            }
        }
        if let Some(address) = self.listen.iter().find(|address| is_relayed(address)) {
            return Err(NodeError::Circuit { address: address.clone() });
        }
        if self.network_key.is_some() {
            let mut addresses = self.listen.iter().chain(&self.bootstrap).chain(&self.external);
            if let Some(address) = addresses.find(|address| is_quic(address)) {
                return Err(NodeError::PrivateQuic { address: address.clone() });
            }
        }
        Ok(())
    }

    /// The bootstrap peers, each with its addresses.
    pub(crate) fn bootstrap_peers(&self) -> Result<Vec<(PeerId, Vec<Multiaddr>)>, NodeError> {
        peers_at(&self.bootstrap)
    }

    /// The same for those of [`Self::ipfs_kademlia`].
    pub(crate) fn ipfs_peers(&self) -> Result<Vec<(PeerId, Vec<Multiaddr>)>, NodeError> {
        peers_at(self.ipfs_kademlia.as_deref().unwrap_or_default())
    }
}

fn peers_at(addresses: &[Multiaddr]) -> Result<Vec<(PeerId, Vec<Multiaddr>)>, NodeError> {
    let mut peers: Vec<(PeerId, Vec<Multiaddr>)> = Vec::new();
    for address in addresses {
        let mut rest = address.clone();
        let Some(Protocol::P2p(peer)) = rest.pop() else {
            return Err(NodeError::Bootstrap { address: address.clone() });
        };
        match peers.iter_mut().find(|(known, _)| *known == peer) {
            Some((_, addresses)) => addresses.push(rest),
            None => peers.push((peer, vec![rest])),
        }
    }
    Ok(peers)
}

fn is_quic(address: &Multiaddr) -> bool {
    address.iter().any(|part| matches!(part, Protocol::Quic | Protocol::QuicV1))
}
