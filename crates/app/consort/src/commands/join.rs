//! `consort join`: lends this machine to the cluster of its network.

mod by_code;
mod weights_progress;

use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::PathBuf;

use ::ranks::group::Deadlines;
use anyhow::{Context, Result};
use clap::Args;
use cluster::discovery::{Announcement, Announcer, Interfaces, MDNS_PORT, NodeName};
use cluster::measure::{ProbeSettings, measure_machine};
use cluster::node::{Node, NodeOptions, NodeRanks};
use cluster::wire::control::WireFacts;
use kernels::cpu::Level;
use net::{ClusterKey, PeerAddress};
use tracing::{info, warn};
use types::WorldSize;
use weights::{StoreLimits, TensorStore};

use super::ranks::{is_shutting_down, watch_signals};
use super::serve::logs::{self, LogFormat};
use crate::cake::CakeJoinOptions;
use crate::cluster_key;
use crate::executors::cluster::SILENCE;
use crate::executors::group::current_executable;
use crate::listening;
use crate::options::{CpuLevelOption, KeyOptions, bytes, cpus, rank_count, thread_count};
use crate::store::Settings;
use crate::usage::UsageError;
use weights_progress::WeightsProgress;

/// What stays free on the disk of the store.
pub const DISK_FREE_MIN: u64 = 1 << 30;

/// Lend this machine to the cluster on this network
///
/// A machine that runs `consort serve --cluster` with the same key finds this one, sends it the weights of some layers, and
/// runs them here. It needs no model. Without a key, it asks for the code that `consort cluster invite` shows on a machine of the
/// cluster. Key and weights are kept, so that they are sent once. Ctrl-C or SIGTERM ends it. With --protocol cake, masters of cake are served instead, on port 10128, without encryption.
#[derive(Args, Debug)]
pub struct JoinArgs {
    /// Join the cluster of the machine that shows a code there, also if this one has the key of another [default: an invitation is
    /// looked for if there is no key]
    #[arg(value_name = "HOST[:PORT]", value_parser = by_code::invitation_address)]
    machine: Option<PeerAddress>,
    /// The same
    #[arg(long, value_name = "HOST[:PORT]", value_parser = by_code::invitation_address, conflicts_with = "machine")]
    invitation: Option<PeerAddress>,
    /// Address to listen on; 0.0.0.0 is every address of this machine, port 0 any free port
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "0.0.0.0:7420")]
    #[arg(default_value_if("protocol", "cake", "0.0.0.0:10128"))]
    pub listen: SocketAddr,
    /// Name of this machine, for people [default: its host name]
    #[arg(long, value_name = "NAME")]
    pub name: Option<NodeName>,
    /// Memory that layers may take, such as 8G [default: what is free]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub memory: Option<u64>,
    /// Folder for weights that were received [default: consort's cache]
    #[arg(long, value_name = "FOLDER")]
    pub store: Option<PathBuf>,
    /// The most that the store may hold; what was used least recently is removed first
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "100G")]
    pub store_max: u64,
    /// Do not announce this machine by mDNS; others have to name it with --node
    #[arg(long)]
    no_mdns: bool,
    /// Compute threads of each rank [default: one per CPU, divided among the ranks]
    #[arg(short, long, value_name = "COUNT", env = "CONSORT_THREADS", value_parser = thread_count)]
    pub threads: Option<NonZeroUsize>,
    /// Use no better CPU instructions than these
    #[arg(long, value_enum, default_value_t, env = "CONSORT_CPU")]
    cpu_level: CpuLevelOption,
    /// Number of ranks (processes) that each layer is split over
    #[arg(long, value_name = "RANKS", env = "CONSORT_TENSOR_PARALLEL", value_parser = rank_count, default_value = "1")]
    tensor_parallel: NonZeroU16,
    /// Time limits after which a rank counts as lost; limits that are not named keep their default
    #[arg(long, value_name = "NAME=SECONDS,…", default_value_t)]
    rank_deadlines: Deadlines,
    /// Log format, on standard error
    #[arg(long, value_enum, default_value_t)]
    log: LogFormat,
    #[command(flatten)]
    cake: CakeJoinOptions,
    #[command(flatten)]
    pub key: KeyOptions,
}

impl JoinArgs {
    pub fn run(self) -> Result<()> {
        let cake = self.cake.service(self.no_mdns)?;
        logs::install(self.log, "info")?;
        #[cfg(debug_assertions)]
        install_fault()?;
        if let Some(cake) = cake {
            if self.machine.is_some() || self.invitation.is_some() {
                return Err(UsageError::new("--protocol cake has no invitations: give the key").into());
            }
            watch_signals()?;
            return cake.serve(self);
        }
        let name = self.name.clone().map_or_else(host_name, Ok)?;
        let key = self.cluster_key(&name)?;
        let folder = match self.store {
            Some(folder) => folder,
            None => Settings::from_environment()?.own_cache.join("tensors"),
        };
        let limits = StoreLimits { bytes_max: self.store_max, free_bytes_min: DISK_FREE_MIN };
        let store = TensorStore::open(&folder, limits)?;
        let (world, level) = (self.tensor_parallel.get(), self.cpu_level.level()?);
        let threads = self.threads.map_or_else(|| (cpus() / usize::from(world)).max(1), NonZeroUsize::get);
        let facts = facts(&name, threads, world, level)?;
        let world = WorldSize::new(world).filter(|world| *world != WorldSize::ONE);
        let ranks =
            world.map(|world| NodeRanks { world, program: current_executable(), deadlines: self.rank_deadlines });
        let observer = Box::new(WeightsProgress::new());
        let options = NodeOptions {
            key,
            store,
            silence: SILENCE,
            threads,
            level,
            ranks,
            memory_max: self.memory,
            facts,
            observer,
        };
        let node = Node::bind(self.listen, options)
            .map_err(|error| listening::explain(&self.listen.to_string(), "--listen", &error))?;
        watch_signals()?;
        let address = node.address()?;
        let announcement = Announcement::new(name.clone());
        let announced = (!self.no_mdns && !address.ip().is_loopback())
            .then(|| Announcer::start(&announcement, address.port(), &Interfaces::default(), MDNS_PORT));
        let _announcer = match announced.transpose() {
            Ok(announcer) => announcer,
            Err(error) => {
                warn!("others have to name this machine with --node: {error}");
                None
            }
        };
        let ranks = self.tensor_parallel;
        info!(name = name.as_str(), ranks, threads, cpu = level.name(), "ready to run layers: listening on {address}");
        node.serve(is_shutting_down).context("serve coordinators")
    }
}

impl JoinArgs {
    /// The key that is given or kept, or the one that a code brings.
    fn cluster_key(&self, name: &NodeName) -> Result<ClusterKey> {
        let invitation = self.machine.as_ref().or(self.invitation.as_ref());
        if invitation.is_some() && self.key.is_given() {
            let message =
                "an invitation brings a key: leave out --cluster-key-file, --cluster-key and CONSORT_CLUSTER_KEY";
            return Err(UsageError::new(message).into());
        }
        let kept = if invitation.is_none() { self.key.text_if_kept()? } else { None };
        let text = kept.map_or_else(|| by_code::join_by_code(invitation, name, self.no_mdns), Ok)?;
        cluster_key::parse(&text)
    }
}

/// The fault that a test injects with `CONSORT_FAULT`: see `cluster::node::NodeFault`.
#[cfg(debug_assertions)]
fn install_fault() -> Result<()> {
    if let Ok(fault) = std::env::var("CONSORT_FAULT") {
        fault.parse::<cluster::node::NodeFault>()?.install();
    }
    Ok(())
}

/// Measures this machine with the threads of all ranks.
fn facts(name: &NodeName, threads: usize, ranks: u16, level: Level) -> Result<WireFacts> {
    let threads = threads * usize::from(ranks);
    let measured = measure_machine(&ProbeSettings { threads, level, ..ProbeSettings::default() })?;
    Ok(WireFacts {
        name: name.as_str().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        level: level.into(),
        threads: u32::try_from(measured.threads).unwrap_or(u32::MAX),
        ranks,
        memory_bytes: measured.memory_free,
        weight_bytes_per_s: measured.read_bytes_per_s,
        multiply_adds_per_s: measured.multiply_adds_per_s,
        step_seconds: measured.step_seconds,
    })
}

pub fn host_name() -> Result<NodeName> {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    name.parse().with_context(|| format!("the host name {name:?} cannot be used: give another with --name"))
}
