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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: PlacementOptions,
    }

    fn block(line: &str) -> Result<BlockPlacement, UsageError> {
        let words = ["consort"].into_iter().chain(line.split_whitespace());
        BlockPlacement::new(&Line::parse_from(words).options)
    }

    #[test]
    fn a_block_runs_here_on_ranks_or_on_a_cluster() {
        assert!(matches!(block("--no-lan --bootstrap /ip4/192.0.2.1/tcp/1").unwrap(), BlockPlacement::Here));
        assert_eq!(block("--tensor-parallel 2").unwrap().world().get(), 2);
        assert!(matches!(block("--peer a:1").unwrap(), BlockPlacement::Cluster(_)));
        for refused in ["--swarm", "--kwaai-peer 0..2@127.0.0.1:1", "--tp-hosts a:1", "--cluster --tensor-parallel 2"] {
            block(refused).unwrap_err();
        }
    }
}
