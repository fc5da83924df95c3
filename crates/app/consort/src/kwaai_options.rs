//! The options of KwaaiNet: its block servers as peers of a chain, and serving its coordinators.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use ::swarm::{ModelDigest, PeerId, Reach, ServiceState};
use anyhow::{Context, Result, bail};
use clap::Args;
use engine::EmbeddingAndHead;
use kernels::cpu::CpuBackend;
use p2p::Multiaddr;
use peers::block::Client;
use peers::client::{ForeignPeer, ForeignPeers};
use peers::kwaai::{
    DhtClient, KwaaiAnnouncement, KwaaiFinder, KwaaiLimits, KwaaiModel, KwaaiPeer, KwaaiRoute, KwaaiServer,
    KwaaiServerState, insert_record, serve_local,
};
use peers::node::{StreamHandler, SwarmNode};
use peers::view::SwarmView;
use tokio::net::TcpListener;
use tracing::{debug, info, warn};
use types::LayerRange;

use crate::store::hub_name;

/// How long records of servers that the user named are renewed before they expire.
const RENEW: Duration = Duration::from_secs(300);
/// How often a server announces itself, when it is ready and before.
const ANNOUNCE: Duration = Duration::from_secs(300);
const ANNOUNCE_JOINING: Duration = Duration::from_secs(2);

/// A block server of KwaaiNet: `FIRST..END@HOST:PORT` for its TCP bypass, or `FIRST..END@MULTIADDRESS/p2p/ID`.
#[derive(Clone, Debug)]
pub struct KwaaiPeerOption {
    layers: LayerRange,
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Local(SocketAddr),
    Peer { peer: PeerId, address: String },
}

impl FromStr for KwaaiPeerOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (layers, place) = text.split_once('@').ok_or("it is not FIRST..END@ADDRESS")?;
        let layers = layer_range(layers)?;
        if let Ok(address) = place.parse() {
            return Ok(Self { layers, place: Place::Local(address) });
        }
        let (address, peer) =
            place.rsplit_once("/p2p/").ok_or("its address is not HOST:PORT, nor does it end in /p2p/ID")?;
        address.parse::<Multiaddr>().map_err(|error| error.to_string())?;
        let peer = p2p::parse_peer(peer).ok_or_else(|| format!("{peer} is no peer"))?;
        Ok(Self { layers, place: Place::Peer { peer, address: address.to_owned() } })
    }
}

pub fn layer_range(text: &str) -> Result<LayerRange, String> {
    let (start, end) = text.split_once("..").ok_or_else(|| format!("{text} is not FIRST..END"))?;
    let number = |text: &str| text.parse::<u32>().map_err(|_| format!("{text} is not a number of a layer"));
    LayerRange::new(number(start)?, number(end)?).ok_or_else(|| format!("{text} has no layers"))
}

/// How KwaaiNet is used, by clients and by those who serve.
#[derive(Args, Clone, Debug, Default)]
pub struct KwaaiOptions {
    /// A block server of KwaaiNet and its layers, FIRST..END@HOST:PORT or FIRST..END@MULTIADDRESS/p2p/ID. Its numbers are f16. One with
    /// the model's last layer returns logits of one position: it is used if no other peer has that layer
    #[arg(long, value_name = "LAYERS@ADDRESS", value_delimiter = ',')]
    pub kwaai_peer: Vec<KwaaiPeerOption>,
    /// A registry of KwaaiNet, such as /dns/NAME/tcp/8000/p2p/ID. With --swarm, block servers of the model are looked for there; with
    /// `swarm serve --kwaai` the block is announced there
    #[arg(long, value_name = "MULTIADDRESS", value_delimiter = ',')]
    pub kwaai_registry: Vec<Multiaddr>,
    /// The model's name in KwaaiNet's registries, such as unsloth/Llama-3.1-8B-Instruct [default: its name on the hub]
    #[arg(long, value_name = "OWNER/NAME", requires = "kwaai_registry")]
    pub kwaai_name: Option<String>,
}

impl KwaaiOptions {
    /// Whether a client may have servers of KwaaiNet in its chains.
    pub fn has_servers(&self) -> bool {
        !self.kwaai_peer.is_empty() || !self.kwaai_registry.is_empty()
    }

    /// The name of the model at `path` in the registries.
    pub fn model_name(&self, path: &Path) -> Result<String> {
        let name = self.kwaai_name.clone().or_else(|| hub_name(path));
        name.with_context(|| {
            format!("{} is not from the hub: say its name in KwaaiNet with --kwaai-name", path.display())
        })
    }

    /// The servers that were named, and in the background those that registries name.
    pub fn servers(&self, path: &Path, node: &SwarmNode, model: KwaaiModel) -> Result<ForeignPeers> {
        let servers = ForeignPeers::from(self.named(node, &model)?);
        if !self.kwaai_registry.is_empty() {
            let (registries, name) = (self.kwaai_registry.clone(), self.model_name(path)?);
            let view = Arc::clone(node.view());
            tokio::spawn(KwaaiFinder::new(registries, name, model, node.dial(), view, servers.clone()).run());
        }
        Ok(servers)
    }

    /// The servers that were named, with records in the node's view, which are renewed.
    fn named(&self, node: &SwarmNode, model: &KwaaiModel) -> Result<HashMap<PeerId, Arc<dyn ForeignPeer>>> {
        let mut peers: HashMap<PeerId, Arc<dyn ForeignPeer>> = HashMap::new();
        for (number, KwaaiPeerOption { layers, place }) in (0_u16..).zip(&self.kwaai_peer) {
            let (peer, route) = match place {
                // It has no identity, so it gets a name that no peer of the network has.
                Place::Local(address) => {
                    let [a, b] = number.to_le_bytes();
                    let peer = PeerId::new(&[0, a, b]).context("three bytes are a name")?;
                    (peer, KwaaiRoute::Local(*address))
                }
                Place::Peer { peer, address } => {
                    (*peer, KwaaiRoute::Peer { peer: *peer, addresses: vec![address.clone()], dial: node.dial() })
                }
            };
            let Some(kwaai) = KwaaiPeer::new(route, *layers, model) else {
                bail!("--kwaai-peer {layers}: the model has {} layers", model.layers);
            };
            peers.insert(peer, Arc::new(kwaai));
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

/// Serving KwaaiNet's coordinators beside the swarm.
#[derive(Args, Clone, Debug, Default)]
pub struct KwaaiServerOptions {
    /// Serve KwaaiNet's coordinators too, under its own protocol
    #[arg(long, requires = "layers")]
    pub kwaai: bool,
    /// Serve them over KwaaiNet's local TCP bypass at this address. Whoever reaches it can use it, unencrypted
    #[arg(long, value_name = "ADDRESS:PORT", requires = "layers")]
    pub kwaai_tcp: Option<SocketAddr>,
}

/// The server, once there is a block.
pub type KwaaiSlot = Arc<OnceLock<KwaaiServer>>;

impl KwaaiServerOptions {
    pub fn is_used(&self) -> bool {
        self.kwaai || self.kwaai_tcp.is_some()
    }

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
        vec![(peers::kwaai::INFERENCE_PROTOCOL, handler)]
    }

    /// Serves a block.
    pub async fn serve(
        self,
        slot: KwaaiSlot,
        block: peers::block::BlockHandle,
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
            public_name: None,
            using_relay: self.node.handle().reachability() == p2p::Reachability::Relayed,
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
