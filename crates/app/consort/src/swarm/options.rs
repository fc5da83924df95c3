//! The options of a swarm: how this machine joins it, and how it uses it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use libp2p_node::Multiaddr;

use super::kwaai_options::KwaaiOptions;
use crate::options::heading;
use crate::usage::UsageError;

/// A peer that is new is checked at once, and one that lies in one row of 50 is found after some 2,000 tokens: see docs/swarm.md.
pub const VERIFY_DEFAULT: f64 = 0.1;

/// How this machine joins a swarm.
#[derive(Args, Clone, Debug, Default)]
pub struct SwarmNetworkOptions {
    /// A peer to join the swarm through, such as /ip4/203.0.113.7/tcp/4101/p2p/12D3Koo…; can be repeated. On one LAN peers find
    /// each other
    #[arg(long, value_name = "MULTIADDRESS", value_delimiter = ',')]
    pub bootstrap: Vec<Multiaddr>,
    /// File with the key of a private swarm: 64 hexadecimal digits. Others cannot connect
    #[arg(long, value_name = "FILE")]
    pub swarm_key: Option<PathBuf>,
    /// Neither announce this machine on the LAN nor look for others there
    #[arg(long)]
    pub no_lan: bool,
}

/// A model whose layers are served by a swarm.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::SWARM)]
pub struct SwarmOptions {
    /// Run the layers on peers of a swarm that run `consort swarm serve` with the same model
    #[arg(long)]
    pub swarm: bool,
    #[command(flatten)]
    pub client: SwarmClientOptions,
}

/// How this machine uses a swarm, or joins it to serve layers.
#[derive(Args, Clone, Debug, Default)]
pub struct SwarmClientOptions {
    #[command(flatten)]
    pub network: SwarmNetworkOptions,
    /// The part of the rows, 0 to 1, that other peers compute again, to find peers that lie; 0: none [default: 0.1]
    #[arg(long, value_name = "PART", value_parser = part)]
    pub verify: Option<f64>,
    /// How activations travel; f16 halves the bytes, and changes the last bits
    #[arg(long, value_enum, default_value_t)]
    pub swarm_activations: SwarmActivations,
    /// Carry all activations to and from each peer, rather than have peers pass them on
    #[arg(long)]
    pub swarm_star: bool,
    #[command(flatten)]
    pub kwaai: KwaaiOptions,
    /// Seconds to wait for peers that serve all layers
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub swarm_wait: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SwarmActivations {
    /// Without loss
    #[default]
    F32,
    F16,
}

fn part(text: &str) -> Result<f64, String> {
    let part: f64 = text.parse().map_err(|_| format!("{text} is not a number"))?;
    if (0.0..=1.0).contains(&part) { Ok(part) } else { Err(format!("{text} is not between 0 and 1")) }
}

/// Peers of a swarm that run the layers.
#[derive(Clone, Debug)]
pub struct SwarmPlacement(pub SwarmClientOptions);

impl SwarmPlacement {
    /// `None` if the options ask for no swarm.
    pub fn new(options: &SwarmOptions) -> Result<Option<Self>, UsageError> {
        let SwarmOptions { swarm, client } = options;
        let SwarmClientOptions { network, verify, swarm_star, kwaai, .. } = client;
        let is_joined = !network.bootstrap.is_empty() || network.swarm_key.is_some();
        match *swarm {
            true => Ok(Some(Self(client.clone()))),
            false if is_joined || verify.is_some() || *swarm_star || kwaai.has_servers() => Err(UsageError::new(
                "--bootstrap, --swarm-key, --verify, --swarm-star, --kwaai-peer and --kwaai-registry are for --swarm",
            )),
            false => Ok(None),
        }
    }

    /// Whether servers of KwaaiNet may be in a chain.
    pub fn has_kwaai_servers(&self) -> bool {
        self.0.kwaai.has_servers()
    }
}
