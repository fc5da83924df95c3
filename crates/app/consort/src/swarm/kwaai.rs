//! KwaaiNet beside a swarm: its block servers as peers of a chain, and a block that is served to its coordinators.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use blocks::block::Client;
use blocks::client::{ForeignPeer, ForeignPeers};
use blocks::kwaai::{
    DhtClient, FinderReport, KwaaiAnnouncement, KwaaiFinder, KwaaiLimits, KwaaiModel, KwaaiPeer, KwaaiRoute,
    KwaaiServer, KwaaiServerState, insert_record, serve_local,
};
use blocks::node::{StreamHandler, SwarmNode};
use blocks::view::SwarmView;
use directory::{ModelDigest, PeerId, Reach, ServiceState};
use engine::EmbeddingAndHead;
use kernels::cpu::CpuBackend;
use libp2p_node::Multiaddr;
use tokio::net::TcpListener;
use tracing::{debug, info, warn};
use types::LayerRange;

use super::kwaai_options::{KwaaiOptions, KwaaiPeerOption, KwaaiPlace, KwaaiServerOptions};

/// How long records of servers that the user named are renewed before they expire.
const RENEW: Duration = Duration::from_secs(300);
/// How often a server announces itself, when it is ready and before.
const ANNOUNCE: Duration = Duration::from_secs(300);
const ANNOUNCE_JOINING: Duration = Duration::from_secs(2);

impl KwaaiOptions {
    /// The servers that were named, and in the background those that registries name; and what these say.
    pub fn servers(
        &self,
        path: &Path,
        node: &SwarmNode,
        model: KwaaiModel,
    ) -> Result<(ForeignPeers, Option<Arc<FinderReport>>)> {
        let servers = ForeignPeers::from(self.named(node, &model)?);
        if self.kwaai_registry.is_empty() {
            return Ok((servers, None));
        }
        let (registries, name) = (self.kwaai_registry.clone(), self.model_name(path)?);
        let view = Arc::clone(node.view());
        let finder = KwaaiFinder::new(registries, name, model, node.dial(), view, servers.clone());
        let report = finder.report();
        tokio::spawn(finder.run());
        Ok((servers, Some(report)))
    }

    /// The servers that were named, with records in the node's view, which are renewed.
    fn named(&self, node: &SwarmNode, model: &KwaaiModel) -> Result<HashMap<PeerId, Arc<dyn ForeignPeer>>> {
        let mut peers: HashMap<PeerId, Arc<dyn ForeignPeer>> = HashMap::new();
        for (number, KwaaiPeerOption { layers, place }) in (0_u16..).zip(&self.kwaai_peer) {
            let (peer, route) = match place {
                // It has no identity, so it gets a name that no peer of the network has.
                KwaaiPlace::Local(address) => {
                    let [a, b] = number.to_le_bytes();
                    let peer = PeerId::new(&[0, a, b]).context("three bytes are a name")?;
                    (peer, KwaaiRoute::Local(*address))
                }
                KwaaiPlace::Peer { peer, address } => {
                    (*peer, KwaaiRoute::Peer { peer: *peer, addresses: vec![address.clone()], dial: node.dial() })
                }
            };
            let Some(kwaai) = KwaaiPeer::new(route, *layers, model) else {
                bail!("--kwaai-peer {layers}: the model has {} layers", model.layers);
            };
            peers.insert(peer, Arc::new(kwaai.named(place.to_string())));
        }
        if !peers.is_empty() {
            let (view, digest) = (Arc::clone(node.view()), model.digest);
            let blocks: Vec<_> = peers.iter().map(|(peer, foreign)| (*peer, foreign.layers())).collect();
            renew(&view, digest, &blocks);
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(RENEW).await;
                    renew(&view, digest, &blocks);
                }
            });
        }
        Ok(peers)
    }
}

fn renew(view: &SwarmView, model: ModelDigest, blocks: &[(PeerId, LayerRange)]) {
    for &(peer, layers) in blocks {
        if let Err(error) = insert_record(view, model, peer, layers, Reach::Direct) {
            warn!(%error, "a server that was named cannot be used");
        }
    }
}

/// The server, once there is a block.
pub type KwaaiSlot = Arc<OnceLock<KwaaiServer>>;

impl KwaaiServerOptions {
    /// Handles streams of KwaaiNet's protocol when there is a server.
    pub fn handlers(&self, slot: &KwaaiSlot) -> Vec<(&'static str, StreamHandler)> {
        if !self.kwaai {
            return Vec::new();
        }
        let slot = Arc::clone(slot);
        let handler: StreamHandler = Arc::new(move |peer, stream| {
            let Some(server) = slot.get().cloned() else { return };
            tokio::spawn(async move {
                if let Err(error) = server.serve_stream(Client::Peer(peer), stream).await {
                    debug!(%peer, %error, "a call of KwaaiNet was not answered");
                }
            });
        });
        vec![(blocks::kwaai::INFERENCE_PROTOCOL, handler)]
    }

    /// Serves a block.
    pub async fn serve(
        self,
        slot: KwaaiSlot,
        block: blocks::block::BlockHandle,
        model_layers: usize,
        embed_and_head: Option<EmbeddingAndHead<CpuBackend>>,
    ) -> Result<()> {
        let server = KwaaiServer::new(block, model_layers, KwaaiLimits::default());
        if let Some(embed_and_head) = embed_and_head {
            server.set_embed_and_head(embed_and_head);
        }
        let server = slot.get_or_init(|| server).clone();
        if let Some(address) = self.kwaai_tcp {
            let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
            info!("serving KwaaiNet's TCP bypass, unencrypted, on {}", listener.local_addr()?);
            tokio::spawn(serve_local(server, listener));
        }
        Ok(())
    }
}

/// A block that is announced at registries.
pub struct AnnouncedBlock {
    pub registries: Vec<Multiaddr>,
    pub node: SwarmNode,
    /// The model's name at Hugging Face.
    pub repository: String,
    /// What people see of this machine.
    pub public_name: String,
    pub digest: ModelDigest,
    pub model_layers: u32,
    pub layers: LayerRange,
}

impl AnnouncedBlock {
    /// Announces it, again and again.
    pub async fn announce(&self) {
        loop {
            let own = self.node.view().record(&self.digest, &self.node.handle().peer());
            let is_ready = own.as_ref().is_some_and(|own| own.state == ServiceState::Serving);
            let state = if is_ready { KwaaiServerState::Ready } else { KwaaiServerState::Joining };
            let layer_tokens_per_s = own.map_or(0.0, |own| own.speed.layer_tokens_per_s);
            self.write(state, f64::from(layer_tokens_per_s) / self.layers.count() as f64).await;
            tokio::time::sleep(if is_ready { ANNOUNCE } else { ANNOUNCE_JOINING }).await;
        }
    }

    /// Says that it is not served any more.
    pub async fn withdraw(&self) {
        self.write(KwaaiServerState::Offline, 0.0).await;
    }

    async fn write(&self, state: KwaaiServerState, throughput: f64) {
        let announcement = KwaaiAnnouncement {
            repository: &self.repository,
            model_layers: self.model_layers,
            layers: self.layers,
            peer: self.node.handle().peer(),
            state,
            throughput,
            public_name: Some(&self.public_name),
            using_relay: self.node.handle().reachability() == libp2p_node::Reachability::Relayed,
        };
        let registries = DhtClient::new(self.registries.clone());
        for (registry, answer) in registries.announce(&announcement, SystemTime::now()).await {
            match answer {
                Ok(stored) => debug!(%registry, stored, "announced to KwaaiNet"),
                Err(error) => warn!(%registry, %error, "the block was not announced to KwaaiNet"),
            }
        }
    }
}
