//! `RankPlacement`: rank processes over which each layer is split.

use std::num::NonZeroU16;

use ranks::group::Deadlines;
use ranks::protocol::join::Activations;
use ranks::protocol::limits::RANKS_MAX;
use types::WorldSize;

use crate::options::{KeyOptions, RankOptions};
use crate::usage::UsageError;

/// Two ranks at least.
#[derive(Clone, Debug)]
pub struct RankPlacement {
    pub world: WorldSize,
    /// `None`: all ranks are on this machine.
    pub hosts: Option<RankHosts>,
    pub deadlines: Deadlines,
}

/// Other hosts. Each runs one rank, as this machine does.
#[derive(Clone, Debug)]
pub struct RankHosts {
    pub addresses: Vec<String>,
    pub activations: Activations,
    pub key: KeyOptions,
}

impl RankPlacement {
    /// `None` if the options ask for one process.
    pub fn new(options: &RankOptions, key: &KeyOptions) -> Result<Option<Self>, UsageError> {
        let RankOptions { tensor_parallel, tp_hosts, tp_activations, rank_deadlines } = options;
        if tp_hosts.len() >= RANKS_MAX {
            let message = format!("--tp-hosts names too many hosts: {RANKS_MAX} ranks are the limit");
            return Err(UsageError::new(message));
        }
        let ranks = match tp_hosts.len() {
            0 => tensor_parallel.map_or(1, NonZeroU16::get),
            hosts => hosts as u16 + 1,
        };
        if let Some(asked) = tensor_parallel.filter(|asked| asked.get() != ranks) {
            return Err(UsageError::new(format!(
                "--tensor-parallel {asked} does not fit --tp-hosts: one rank here and one on each host are {ranks}"
            )));
        }
        let hosts = (!tp_hosts.is_empty()).then(|| RankHosts {
            addresses: tp_hosts.clone(),
            activations: (*tp_activations).into(),
            key: key.clone(),
        });
        let world = WorldSize::new(ranks).filter(|world| *world != WorldSize::ONE);
        Ok(world.map(|world| Self { world, hosts, deadlines: *rank_deadlines }))
    }

    /// The number of rank processes on this machine.
    pub fn local(&self) -> usize {
        if self.hosts.is_some() { 1 } else { self.world.get() }
    }
}
