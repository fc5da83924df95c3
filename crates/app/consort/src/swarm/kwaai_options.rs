//! The options of KwaaiNet: its block servers as peers of a chain, and serving its coordinators.

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use directory::PeerId;
use libp2p_node::Multiaddr;
use tracing::warn;
use types::LayerRange;

use crate::store::name::RepoId;

/// A block server of KwaaiNet: `FIRST..END@HOST:PORT` for its TCP bypass, or `FIRST..END@MULTIADDRESS/p2p/ID`.
#[derive(Clone, Debug)]
pub struct KwaaiPeerOption {
    pub layers: LayerRange,
    pub place: KwaaiPlace,
}

#[derive(Clone, Debug)]
pub enum KwaaiPlace {
    Local(SocketAddr),
    Peer { peer: PeerId, address: String },
}

impl fmt::Display for KwaaiPlace {
    /// As the user gave it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local(address) => write!(f, "{address}"),
            Self::Peer { peer, address } => write!(f, "{address}/p2p/{}", libp2p_node::peer_text(peer)),
        }
    }
}

impl FromStr for KwaaiPeerOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (layers, place) = text.split_once('@').ok_or("it is not FIRST..END@ADDRESS")?;
        let layers = layer_range(layers)?;
        if let Ok(address) = place.parse() {
            return Ok(Self { layers, place: KwaaiPlace::Local(address) });
        }
        let (address, peer) =
            place.rsplit_once("/p2p/").ok_or("its address is not HOST:PORT, nor does it end in /p2p/ID")?;
        address.parse::<Multiaddr>().map_err(|error| error.to_string())?;
        let peer = libp2p_node::parse_peer(peer).ok_or_else(|| format!("{peer} is no peer"))?;
        Ok(Self { layers, place: KwaaiPlace::Peer { peer, address: address.to_owned() } })
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

    /// Where the registries and the servers are that the user named.
    pub fn addresses(&self) -> Vec<Multiaddr> {
        let servers = self.kwaai_peer.iter().filter_map(|named| match &named.place {
            KwaaiPlace::Peer { address, .. } => address.parse().ok(),
            KwaaiPlace::Local(_) => None,
        });
        self.kwaai_registry.iter().cloned().chain(servers).collect()
    }

    /// The registries through which a node can join KwaaiNet's Kademlia: those that are named with their ids.
    pub fn registries_with_ids(&self) -> Vec<Multiaddr> {
        let has_id = |registry: &&Multiaddr| registry.to_string().contains("/p2p/");
        let (with, without): (Vec<_>, Vec<_>) = self.kwaai_registry.iter().partition(has_id);
        for registry in without {
            warn!(%registry, "coordinators do not find this machine's addresses by this registry: add its /p2p/ID");
        }
        with.into_iter().cloned().collect()
    }

    /// The name of the model at `path` in the registries.
    pub fn model_name(&self, path: &Path) -> Result<String> {
        let name = self.kwaai_name.clone().or_else(|| hub_name(path));
        name.with_context(|| {
            format!("{} is not from the hub: say its name in KwaaiNet with --kwaai-name", path.display())
        })
    }
}

/// The name on the hub of a model in its cache.
fn hub_name(path: &Path) -> Option<String> {
    let folders = path.ancestors().filter_map(|folder| folder.file_name()?.to_str());
    folders.into_iter().find_map(RepoId::from_folder).map(|repo| repo.to_string())
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

impl KwaaiServerOptions {
    pub fn is_used(&self) -> bool {
        self.kwaai || self.kwaai_tcp.is_some()
    }
}
