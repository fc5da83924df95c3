//! `Placement`: where a model runs. It is made once from the options, and refuses those that contradict each other; all that
//! depends on it matches on it.

mod cluster;
mod ranks;

use anyhow::Result;
use model::ModelPart;
use types::WorldSize;

use crate::cake::CakePlacement;
use crate::options::PlacementOptions;
use crate::swarm::SwarmPlacement;
use crate::usage::UsageError;

pub use cluster::{ClusterPlacement, RequestedLayout};
pub use ranks::{RankHosts, RankPlacement};

/// What a client of a swarm has of the model: the embedding and the head.
pub const SWARM_CLIENT_PART: ModelPart = ModelPart { layers: None, has_embedding_and_head: true };
/// See [`Placement::draft_tokens_default`].
const SWARM_DRAFT_TOKENS: usize = 4;

#[derive(Clone, Debug)]
pub enum Placement {
    /// In this process.
    Here,
    /// In rank processes, over which each layer is split.
    Ranks(RankPlacement),
    /// On machines of this network that run `consort join`.
    Cluster(ClusterPlacement),
    /// On workers of cake.
    Cake(CakePlacement),
    /// On peers of a swarm. This machine has the embedding and the head.
    Swarm(SwarmPlacement),
}

impl Placement {
    pub fn new(options: &PlacementOptions) -> Result<Self, UsageError> {
        let PlacementOptions { ranks, cluster, cake, swarm, key } = options;
        let asked = (
            RankPlacement::new(ranks, key)?,
            ClusterPlacement::new(cluster, key)?,
            CakePlacement::new(cake, &cluster.split, key)?,
            SwarmPlacement::new(swarm)?,
        );
        let placement = match asked {
            (None, None, None, None) => Ok(Self::Here),
            (Some(ranks), None, None, None) => Ok(Self::Ranks(ranks)),
            (None, Some(machines), None, None) => Ok(Self::Cluster(machines)),
            (None, None, Some(workers), None) => Ok(Self::Cake(workers)),
            (None, None, None, Some(peers)) => Ok(Self::Swarm(peers)),
            (_, Some(_), Some(_), _) => Err(
                "--cake-worker and --cake-discover do not work together with --cluster, --peer and --plan: all machines of a chain \
                 speak one protocol",
            ),
            (Some(_), _, Some(_), _) => {
                Err("--cake-worker and --cake-discover do not work together with --tensor-parallel and --tp-hosts")
            }
            (.., Some(_)) => Err(
                "--swarm does not go with --cluster, --peer, --plan, --cake-worker and --tensor-parallel: peers run the layers; a \
                 peer may have them on a cluster or on ranks of its own",
            ),
            (Some(_), Some(_), ..) => Err(
                "--tensor-parallel and --tp-hosts do not go with --cluster, --peer and --plan: in a cluster this machine runs its layers \
                 in one process; on the others, `consort join --tensor-parallel` splits them",
            ),
        };
        match (placement.map_err(UsageError::new)?, cluster.split.len()) {
            (placement @ (Self::Cluster(_) | Self::Cake(_)), _) | (placement, 0) => Ok(placement),
            (_, counts) => Err(UsageError::new(format!("--split has {counts} numbers for 0 times --peer"))),
        }
    }

    /// Checks that there is a key, where one has to be given.
    pub fn check_key(&self) -> Result<()> {
        match self {
            Self::Ranks(ranks) => ranks.hosts.as_ref().map_or(Ok(()), |hosts| hosts.key.check()),
            Self::Cake(cake) => cake.check_key(),
            Self::Here | Self::Cluster(_) | Self::Swarm(_) => Ok(()),
        }
    }

    /// The part of the model whose files this machine needs; `None`: all of it.
    pub fn own_part(&self) -> Option<ModelPart> {
        match self {
            Self::Swarm(_) => Some(SWARM_CLIENT_PART),
            Self::Here | Self::Ranks(_) | Self::Cluster(_) | Self::Cake(_) => None,
        }
    }

    /// The ranks of a group; one process is a group of one.
    pub fn world(&self) -> WorldSize {
        match self {
            Self::Ranks(ranks) => ranks.world,
            Self::Here | Self::Cluster(_) | Self::Cake(_) | Self::Swarm(_) => WorldSize::ONE,
        }
    }

    /// The number of rank processes.
    pub fn ranks(&self) -> usize {
        self.world().get()
    }

    /// The number of rank processes on this machine.
    pub fn local_ranks(&self) -> usize {
        match self {
            Self::Ranks(ranks) => ranks.local(),
            Self::Here | Self::Cluster(_) | Self::Cake(_) | Self::Swarm(_) => 1,
        }
    }

    /// Draft tokens of a step, if nothing else is asked for: in a swarm every step takes round trips, and a draft may save some.
    pub fn draft_tokens_default(&self) -> usize {
        match self {
            // A server of KwaaiNet cannot discard rejected tokens: every rejection would be a replay.
            Self::Swarm(swarm) if !swarm.has_kwaai_servers() => SWARM_DRAFT_TOKENS,
            Self::Here | Self::Ranks(_) | Self::Cluster(_) | Self::Cake(_) | Self::Swarm(_) => 0,
        }
    }
}
