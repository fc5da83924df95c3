//! `BlockPlacement`: where a block runs that this machine serves to a swarm.

use types::WorldSize;

use super::options::SwarmOptions;
use crate::options::PlacementOptions;
use crate::placement::{ClusterPlacement, Placement, RankPlacement};
use crate::usage::UsageError;

#[derive(Clone, Debug)]
pub enum BlockPlacement {
    /// In this process.
    Here,
    /// In rank processes on this machine.
    Ranks(RankPlacement),
    /// On machines of this network behind this one.
    Cluster(ClusterPlacement),
}

impl BlockPlacement {
    pub fn new(options: &PlacementOptions) -> Result<Self, UsageError> {
        let refused =
            Err(UsageError::new("--swarm, --kwaai-peer, --cake-worker and --tp-hosts are not for serving a swarm"));
        if options.swarm.swarm || !options.swarm.client.kwaai.kwaai_peer.is_empty() {
            return refused;
        }
        // The other options of the swarm are for joining it.
        let own = PlacementOptions { swarm: SwarmOptions::default(), ..options.clone() };
        match Placement::new(&own)? {
            Placement::Here => Ok(Self::Here),
            Placement::Ranks(ranks) if ranks.hosts.is_none() => Ok(Self::Ranks(ranks)),
            Placement::Cluster(machines) => Ok(Self::Cluster(machines)),
            Placement::Ranks(_) | Placement::Cake(_) | Placement::Swarm(_) => refused,
        }
    }

    /// The ranks of a group; one process is a group of one.
    pub fn world(&self) -> WorldSize {
        match self {
            Self::Ranks(ranks) => ranks.world,
            Self::Here | Self::Cluster(_) => WorldSize::ONE,
        }
    }
}
