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
                "--cake-worker and --cake-discover do not work together with --cluster, --node and --plan: all machines of a chain \
                 speak one protocol",
            ),
            (Some(_), _, Some(_), _) => {
                Err("--cake-worker and --cake-discover do not work together with --tensor-parallel and --tp-hosts")
            }
            (.., Some(_)) => Err(
                "--swarm does not go with --cluster, --node, --plan, --cake-worker and --tensor-parallel: peers run the layers; a \
                 peer may have them on a cluster or on ranks of its own",
            ),
            (Some(_), Some(_), ..) => Err(
                "--tensor-parallel and --tp-hosts do not go with --cluster, --node and --plan: in a cluster this machine runs its layers \
                 in one process; on the others, `consort join --tensor-parallel` splits them",
            ),
        };
        match (placement.map_err(UsageError::new)?, cluster.split.len()) {
            (placement @ (Self::Cluster(_) | Self::Cake(_)), _) | (placement, 0) => Ok(placement),
            (_, counts) => Err(UsageError::new(format!("--split has {counts} numbers for 0 times --node"))),
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

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: PlacementOptions,
    }

    fn placement(line: &str) -> Result<Placement, UsageError> {
        let words = ["consort"].into_iter().chain(line.split_whitespace());
        Placement::new(&Line::parse_from(words).options)
    }

    fn refused(line: &str, why: &str) {
        let error = placement(line).unwrap_err().to_string();
        assert!(error.contains(why), "{line}: {error}");
    }

    #[test]
    fn options_of_one_place_make_it() {
        assert!(matches!(placement("").unwrap(), Placement::Here));
        assert!(matches!(placement("--tensor-parallel 1").unwrap(), Placement::Here));
        let ranks = placement("--tensor-parallel 3").unwrap();
        assert_eq!((ranks.ranks(), ranks.local_ranks()), (3, 3));
        let hosts = placement("--tp-hosts a:1,b:1 --tensor-parallel 3").unwrap();
        assert_eq!((hosts.ranks(), hosts.local_ranks()), (3, 1));
        let Placement::Cluster(machines) = placement("--node a:1,b:1 --split 2,3").unwrap() else { panic!() };
        assert!(!machines.discovers && matches!(&machines.layout, RequestedLayout::Split(counts) if counts == &[2, 3]));
    }

    #[test]
    fn what_names_no_place_or_two_is_refused() {
        refused("--exact", "it needs --cluster, --node or --plan");
        refused("--split 1", "--split has 1 numbers for 0 times --node");
        refused("--split 1 --tensor-parallel 2", "--split has 1 numbers for 0 times --node");
        refused("--node a:1 --split 1,2", "--split has 2 numbers for 1 times --node");
        refused("--tp-hosts a:1 --tensor-parallel 4", "one rank here and one on each host are 2");
        refused("--cluster --tensor-parallel 2", "do not go with --cluster, --node and --plan");
        refused("--cluster --tp-hosts a:1", "do not go with --cluster, --node and --plan");
    }

    #[cfg(all(feature = "swarm", feature = "cake"))]
    #[test]
    fn a_swarm_and_cake_workers_exclude_all_else() {
        assert!(matches!(placement("--swarm --verify 0.5").unwrap(), Placement::Swarm(_)));
        assert!(matches!(placement("--cake-worker a:1,b:1 --split 2,3").unwrap(), Placement::Cake(_)));
        for others in ["--cluster", "--node a:1", "--tensor-parallel 2", "--tp-hosts a:1", "--cake-discover"] {
            refused(&format!("--swarm {others}"), "--swarm does not go with");
        }
        refused("--cake-worker a:1 --cluster", "all machines of a chain speak one protocol");
        refused("--cake-discover --tensor-parallel 2", "do not work together with --tensor-parallel and --tp-hosts");
        refused("--cake-older", "--cake-older needs");
        refused("--no-lan --verify 0.5", "are for --swarm");
    }

    #[cfg(not(any(feature = "swarm", feature = "cake")))]
    #[test]
    fn what_is_not_built_in_says_so() {
        refused("--swarm", "build it with `--features swarm`");
        refused("--cake-worker a:1", "build it with `--features cake`");
        refused("--cake-discover", "build it with `--features cake`");
    }
}
