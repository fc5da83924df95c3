//! `consort swarm serve`: serves a block of a model's layers to the swarm.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blocks::block::BlockLimits;
use blocks::node::{BlockHost, BlockHostOptions, BlockHostState, SwarmNode};
use clap::Args;
use clap::builder::ValueParser;
use libp2p_node::{Identity, Multiaddr};
use model::{Checkpoint, ModelPart, StoredFormat};
use tracing::{error, info};
use types::{DType, LayerRange};

use super::super::block_placement::BlockPlacement;
use super::super::chain::network_runtime;
use super::super::kwaai::{AnnouncedBlock, KwaaiSlot};
use super::super::kwaai_options::{KwaaiServerOptions, layer_range};
use super::super::model_digest::model_digest;
use super::super::options::SwarmClientOptions;
use super::listening::{default_addresses, default_identity};
use super::loader::Loader;
use super::monitor::BlockHostMonitor;
use crate::commands::ranks::{is_shutting_down, watch_signals};
use crate::commands::serve::admin;
use crate::commands::serve::http::HostAndPort;
use crate::commands::serve::logs::{self, LogFormat};
use crate::options::{ModelName, ModelOptions, ThreadOption, bytes};
use crate::store::{ModelFiles, Settings, Store};
use crate::usage::UsageError;

/// How long this machine learns of others before it chooses a block.
const SETTLE: Duration = Duration::from_secs(3);
/// How often it considers to serve another block.
const CONSIDER: Duration = Duration::from_secs(60);
/// How long sessions may go on in a block that it leaves.
const DRAIN: Duration = Duration::from_secs(120);
/// How long it tries to withdraw what it announced to KwaaiNet.
const WITHDRAW_TIME_MAX: Duration = Duration::from_secs(5);

/// Lend this machine to a swarm: serve a block of a model's layers
///
/// Takes the layers that the swarm needs most and that fit into memory, and moves when others need it clearly more. Peers that
/// use them see no text. Ctrl-C or SIGTERM ends it.
#[derive(Args, Debug)]
pub struct SwarmServeArgs {
    #[command(flatten)]
    model: ModelName,
    /// The layers to serve, such as 8..16 [default: those that the swarm needs most]
    #[arg(long, value_name = "FIRST..END", value_parser = ValueParser::new(layer_range))]
    layers: Option<LayerRange>,
    /// Address to listen on; can be repeated [default: /ip4/0.0.0.0/tcp/4101 and /ip4/0.0.0.0/udp/4101/quic-v1, or the next port that
    /// is free]
    #[arg(long, value_name = "MULTIADDRESS", value_delimiter = ',')]
    listen: Vec<Multiaddr>,
    /// Address at which others reach this machine, where it cannot find out itself
    #[arg(long, value_name = "MULTIADDRESS", value_delimiter = ',')]
    external: Vec<Multiaddr>,
    /// Carry connections of peers that cannot be reached
    #[arg(long)]
    relay: bool,
    /// File with this machine's identity; made if it is missing [default: swarm.key in consort's configuration folder, or swarm-2.key
    /// and so on if another process uses it]
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
    /// Memory that layers may take, such as 8G [default: what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: Option<u64>,
    /// Tokens of all sessions together that the K/V cache holds [default: 4 times the context]
    #[arg(long, value_name = "TOKENS")]
    kv_tokens: Option<usize>,
    /// Sessions that run at once
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    sessions: usize,
    /// Of this machine's access to the network, in megabits per second
    #[arg(long, value_name = "MBIT", default_value_t = 100)]
    bandwidth: u32,
    /// An address for /health and /metrics, over HTTP
    #[arg(long, value_name = "ADDRESS:PORT")]
    admin: Option<HostAndPort>,
    /// Log format, on standard error
    #[arg(long, value_enum, default_value_t)]
    log: LogFormat,
    #[command(flatten)]
    kwaai: KwaaiServerOptions,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    options: ModelOptions,
}

impl SwarmServeArgs {
    pub fn run(self) -> Result<()> {
        let block = BlockPlacement::new(&self.options.placement)?;
        self.check(&block)?;
        self.options.execution.keep()?;
        let SwarmClientOptions { network, kwaai, .. } = &self.options.placement.swarm.client;
        logs::install(self.log, "info")?;
        let files = self.files()?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let layers = checkpoint.description().layers.len();
        let is_announced = !kwaai.kwaai_registry.is_empty();
        let announced_name = if is_announced { Some(kwaai.model_name(&files.path)?) } else { None };
        if let Some(fixed) = self.layers.filter(|fixed| fixed.end() > layers) {
            anyhow::bail!("--layers {fixed}: the model has {layers} layers");
        }
        let (digest, dtype) = (model_digest(&files.path, &checkpoint)?, weight_format(&checkpoint));
        let loader = Loader::new(
            &files.path,
            checkpoint,
            &self.options.execution,
            block,
            &self.threads,
            self.kv_tokens,
            self.sessions,
        )?;
        // `--layers` is required with it.
        let served = self.layers.filter(|_| self.kwaai.is_used());
        let embed_and_head = match served.filter(|range| range.start() == 0 || range.end() == layers) {
            Some(_) => Some(loader.embedding_and_head()?),
            None => None,
        };
        let layers_max = match self.layers {
            Some(fixed) => fixed.count(),
            None => loader.layers_max(self.memory)?,
        };
        // The lock is held until this function ends.
        let (identity, _identity_lock) = match &self.identity {
            Some(file) => (Identity::load_or_create(file)?, None),
            None => {
                let (identity, lock) = default_identity(&Settings::own_configuration()?)?;
                (identity, Some(lock))
            }
        };
        let mut node_options = network.node_options(identity.clone())?;
        // A private swarm has no QUIC, which is among the defaults.
        let is_private = node_options.network_key.is_some();
        let is_tcp = |address: &Multiaddr| !address.to_string().contains("/quic");
        let listen = if self.listen.is_empty() { default_addresses()? } else { self.listen.clone() };
        node_options.listen = listen.into_iter().filter(|address| !is_private || is_tcp(address)).collect();
        node_options.external = self.external.clone();
        node_options.relay_server = self.relay;
        node_options.named = kwaai.addresses();
        // KwaaiNet's nodes cannot join a private swarm.
        if self.kwaai.kwaai && !is_private {
            node_options.ipfs_kademlia = Some(kwaai.registries_with_ids());
        }
        watch_signals()?;
        let runtime = network_runtime()?;
        let _entered = runtime.enter();
        let slot = KwaaiSlot::default();
        let node = SwarmNode::start(node_options, self.kwaai.handlers(&slot)).context("join the swarm")?;
        info!(peer = libp2p_node::peer_text(&node.handle().peer()), model = files.name, "joined the swarm");
        let options = BlockHostOptions {
            model: digest,
            layers,
            dtype,
            fixed: self.layers,
            layers_max,
            limits: BlockLimits { sessions_max: self.sessions, ..BlockLimits::default() },
            bytes_per_s: self.bandwidth as f32 * 125_000.0,
            settle: SETTLE,
            consider: CONSIDER,
            drain: DRAIN,
        };
        let host = BlockHost::start(node.clone(), identity, options, loader, |state| match state {
            BlockHostState::Failed { layers, why } => error!(%layers, "the block cannot be served: {why}"),
            BlockHostState::Loading(layers) => info!(%layers, "loading"),
            _ => {}
        });
        if let Some(at) = self.admin.clone() {
            let monitor = BlockHostMonitor { host: host.watch(), node: node.clone() };
            start_admin(at, monitor, files.name.clone())?;
        }
        let mut announced = None;
        if let Some(range) = served {
            let block = loop {
                match host.watch().block() {
                    Some(block) => break block,
                    None => std::thread::sleep(Duration::from_millis(10)),
                }
            };
            runtime.block_on(self.kwaai.clone().serve(slot, block, layers, embed_and_head))?;
            if let Some(repository) = announced_name {
                let registries = kwaai.kwaai_registry.clone();
                let (node, model_layers) = (node.clone(), layers as u32);
                let public_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
                let block =
                    AnnouncedBlock { registries, node, repository, public_name, digest, model_layers, layers: range };
                let block = announced.insert(Arc::new(block));
                runtime.spawn({
                    let block = Arc::clone(block);
                    async move { block.announce().await }
                });
            }
        }
        let mut told = Vec::new();
        while !is_shutting_down() {
            let addresses = node.handle().addresses();
            if addresses != told {
                let peer = libp2p_node::peer_text(&node.handle().peer());
                for address in addresses.iter().filter(|address| !told.contains(address)) {
                    info!("others join with --bootstrap {address}/p2p/{peer}");
                }
                told = addresses;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let sessions = host.watch().block().map_or(0, |block| block.stats().sessions);
        let (streams, push_keys) = (node.server().streams(), node.server().push_keys());
        info!(sessions, streams, push_keys, "leaving the swarm");
        if let Some(block) = announced {
            // An error means that a registry does not answer; its record expires.
            let _ = runtime.block_on(tokio::time::timeout(WITHDRAW_TIME_MAX, block.withdraw()));
        }
        drop(host);
        Ok(())
    }
}

impl SwarmServeArgs {
    fn check(&self, block: &BlockPlacement) -> Result<(), UsageError> {
        if !self.options.placement.swarm.client.kwaai.kwaai_registry.is_empty() && !self.kwaai.kwaai {
            return Err(UsageError::new("--kwaai-registry needs --kwaai: others find only what is served"));
        }
        // How much the machines of a cluster have room for is known when they are there.
        if matches!(block, BlockPlacement::Cluster(_)) && self.layers.is_none() {
            return Err(UsageError::new("--cluster, --node and --plan need --layers: which layers run on the cluster"));
        }
        Ok(())
    }

    /// The files of the model. Which layers the swarm needs is known later, so without `--layers` these are all.
    fn files(&self) -> Result<ModelFiles> {
        let store = Store::from_environment()?;
        match self.layers {
            Some(layers) => {
                // Coordinators of KwaaiNet send tokens to the first block, and want logits from the last one.
                let part = ModelPart { layers: Some(layers), has_embedding_and_head: self.kwaai.is_used() };
                store.resolve_part(self.model.get(), part)
            }
            None => store.resolve(self.model.get()),
        }
    }
}

fn start_admin(at: HostAndPort, monitor: BlockHostMonitor, model: String) -> Result<()> {
    let hosts = vec![at.host.clone()];
    admin::start_with(at, None, move |address| {
        if !address.ip().is_loopback() {
            admin::warn_of(address, "use a loopback address for --admin");
        }
        server::block_admin_router(Box::new(monitor), model, hosts)
    })
}

/// The format of most of the weights.
fn weight_format(checkpoint: &Checkpoint) -> DType {
    let formats = checkpoint.stored_formats();
    formats.first().map_or(DType::F32, |StoredFormat { dtype, .. }| *dtype)
}
