//! `ClusterPlacement`: machines of this network that run layers, and which ones.

use net::PeerAddress;
use plan::Optimise;

use crate::options::{ClusterOptions, CpuLevelOption, KeyOptions};
use crate::plan_file::PlanFile;
use crate::usage::UsageError;

#[derive(Clone, Debug)]
pub struct ClusterPlacement {
    /// Whether machines are looked for, beside those whose addresses are known.
    pub discovers: bool,
    pub peers: Vec<PeerAddress>,
    pub layout: RequestedLayout,
    /// One arithmetic on all machines: this one, or the best that all have.
    pub exact: Option<CpuLevelOption>,
    pub optimise: Optimise,
    pub key: KeyOptions,
}

/// Which machine has which layers.
#[derive(Clone, Debug)]
pub enum RequestedLayout {
    Planned,
    /// So many layers on each of the named machines; this one has the rest.
    Split(Vec<usize>),
    /// Its addresses are used beside those that are named.
    File(PlanFile),
}

impl ClusterPlacement {
    /// `None` if the options ask for no machines of this network.
    pub fn new(options: &ClusterOptions, key: &KeyOptions) -> Result<Option<Self>, UsageError> {
        if !options.is_used() {
            return match options.exact {
                None => Ok(None),
                Some(_) => Err(UsageError::new(
                    "--exact is for layers on several machines: it needs --cluster, --node or --plan",
                )),
            };
        }
        let ClusterOptions { cluster, node: peers, split, plan, exact, optimise } = options.clone();
        let discovers = cluster || plan.as_ref().is_some_and(PlanFile::has_unknown_address);
        let layout = match (plan, split.len()) {
            (Some(plan), _) => RequestedLayout::File(plan),
            (None, 0) => RequestedLayout::Planned,
            (None, counts) if counts == peers.len() => RequestedLayout::Split(split),
            (None, counts) => {
                let peers = peers.len();
                return Err(UsageError::new(format!("--split has {counts} numbers for {peers} times --node")));
            }
        };
        Ok(Some(Self { discovers, peers, layout, exact, optimise: optimise.into(), key: key.clone() }))
    }
}
