//! How a coordinator plans: the machines that it can use now, and the layout that was asked for.

use std::net::SocketAddr;
use std::time::Instant;

use kernels::cpu::Level;
use plan::{Assignment, COORDINATOR, Cluster, Links, Plan, PlanError, Planner, SavedPlan, SavedPlanError};
use tracing::warn;
use types::LayerRange;

use super::node_link::NodeId;
use super::slowness::Slowness;
use super::{PlanReport, Worker};
use crate::wire::control::WireFacts;

/// Which machine has which layers.
#[derive(Clone, Debug, Default)]
pub enum Layout {
    /// Whatever is predicted to be fastest.
    #[default]
    Planned,
    /// How many layers the peers get, in the order in which they were named; the coordinator has what is left.
    Split(Vec<usize>),
    /// A plan that was saved. It counts from the first layer that the cluster runs.
    Saved(SavedPlan),
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Saved(#[from] SavedPlanError),
}

impl Layout {
    /// Which of the cluster's machines run which layers. `peers` are those that were named. A machine that is missing is
    /// replaced; a layout that cannot be kept then gives way to the fastest plan.
    pub fn plan(&self, planner: &Planner, cluster: &Cluster, peers: &[SocketAddr]) -> Result<Plan, LayoutError> {
        match self {
            Self::Planned => Ok(planner.plan()?),
            Self::Split(counts) => {
                let peers = named(cluster, peers, counts);
                let split = split(planner, cluster, &peers);
                if !is_whole(&peers) {
                    warn!(
                        "the split that was asked for cannot be kept: a machine is missing; it is kept again once it is back"
                    );
                }
                Ok(if is_whole(&peers) { split? } else { split.or_else(|_| planner.plan())? })
            }
            Self::Saved(saved) => match saved.assignment(cluster, planner.layers()) {
                Ok(assignment) => Ok(planner.evaluate(&assignment)?),
                Err(missing @ SavedPlanError::UnknownNode { .. }) => {
                    warn!("the given plan cannot be kept: {missing}; it is kept again once the machine is back");
                    Ok(planner.plan()?)
                }
                Err(error) => Err(error.into()),
            },
        }
    }
}

impl Layout {
    /// The plan that was asked for, if all of its machines are there.
    pub fn as_asked(&self, planner: &Planner, cluster: &Cluster, peers: &[SocketAddr]) -> Option<Plan> {
        match self {
            Self::Planned => None,
            Self::Split(counts) => {
                let peers = named(cluster, peers, counts);
                is_whole(&peers).then(|| split(planner, cluster, &peers).ok())?
            }
            Self::Saved(saved) => planner.evaluate(&saved.assignment(cluster, planner.layers()).ok()?).ok(),
        }
    }
}

/// The machines that were named, as far as they are there, with the numbers of their layers.
fn named(cluster: &Cluster, peers: &[SocketAddr], counts: &[usize]) -> Vec<(Option<usize>, usize)> {
    let node_of = |peer: SocketAddr| {
        let address = Some(peer.into());
        cluster.nodes().iter().position(|node| node.address == address)
    };
    peers.iter().map(|&peer| node_of(peer)).zip(counts.iter().copied()).collect()
}

/// Whether all that get layers are there.
fn is_whole(peers: &[(Option<usize>, usize)]) -> bool {
    peers.iter().all(|(node, count)| node.is_some() || *count == 0)
}

fn split(planner: &Planner, cluster: &Cluster, peers: &[(Option<usize>, usize)]) -> Result<Plan, PlanError> {
    planner.evaluate(&Assignment::split(cluster, planner.layers(), peers)?)
}

/// The machines that a plan can use, as they are now.
pub(super) struct Candidates {
    pub cluster: Cluster,
    /// Those that the cluster runs. A plan counts from the first of them.
    layers: LayerRange,
    /// Those besides the coordinator, in the order of the cluster.
    nodes: Vec<(NodeId, SocketAddr)>,
}

/// A stage on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlannedStage {
    pub node: NodeId,
    pub address: SocketAddr,
    pub layers: LayerRange,
}

impl Candidates {
    /// The stages of a plan besides the coordinator's.
    pub fn stages(&self, plan: &Plan) -> Vec<PlannedStage> {
        let stages = plan.assignment.stages().iter().filter(|(node, _)| *node != COORDINATOR);
        let stage = |&(node, planned): &(usize, LayerRange)| {
            let (node, address) = self.nodes[node - 1];
            PlannedStage { node, address, layers: self.numbered(planned) }
        };
        stages.map(stage).collect()
    }

    /// Planned layers as the model numbers them.
    pub fn numbered(&self, planned: LayerRange) -> LayerRange {
        self.layers.at(planned).expect("a plan has the layers of the cluster")
    }

    /// The index of a node in the cluster.
    pub fn index(&self, node: NodeId) -> Option<usize> {
        Some(self.nodes.iter().position(|(other, _)| *other == node)? + 1)
    }

    /// The assignment of a chain with these stages, whose other layers the coordinator has. `None` if a node is missing.
    pub fn assignment(&self, stages: &[PlannedStage]) -> Option<Assignment> {
        let others = stages.iter().map(|stage| Some((self.index(stage.node)?, stage.layers.position_in(self.layers)?)));
        let others = others.collect::<Option<Vec<_>>>()?;
        let own = others.first().map_or(self.layers.count(), |(_, layers)| layers.start());
        let own = LayerRange::new(0, u32::try_from(own).ok()?).map(|layers| (COORDINATOR, layers));
        Assignment::new(&self.cluster, self.layers.count(), own.into_iter().chain(others).collect()).ok()
    }

    pub fn report(&self, plan: &Plan) -> PlanReport {
        let address = |node: usize| Some(self.nodes.get(node.checked_sub(1)?)?.1);
        PlanReport::new(&self.cluster, plan, address, |planned| self.numbered(planned))
    }
}

impl Worker {
    /// The level of all machines, if they have to compute the same bits.
    pub(super) fn exact(&self) -> Option<Level> {
        let nodes = self.nodes.links().map(|link| link.facts.level.into());
        self.options.arithmetic.level(nodes.chain([self.model.level()]))
    }

    /// Why no plan can use a node.
    pub(super) fn unusable(&self, facts: &WireFacts) -> Option<String> {
        let arithmetic = self.options.arithmetic;
        // Exact stages run in one process.
        arithmetic.excludes(facts.level.into()).or_else(|| match arithmetic.is_exact() {
            false => self.model.cannot_split(facts.ranks),
            true => None,
        })
    }

    pub(super) fn candidates(&self, exact: Option<Level>) -> Result<Candidates, PlanError> {
        self.candidates_as(exact, &self.replanning.slowness)
    }

    /// The machines with their measured speed, less what they are believed to be slower by.
    pub(super) fn candidates_as(&self, exact: Option<Level>, slowness: &Slowness) -> Result<Candidates, PlanError> {
        let links: Vec<_> = self.nodes.links().filter(|link| self.unusable(&link.facts).is_none()).collect();
        let now = Instant::now();
        let facts = links.iter().map(|link| {
            let facts = self.model.node_facts(link.address, &link.facts, exact);
            facts.slowed(slowness.factor(link.address, now))
        });
        let facts = facts.collect();
        let mut table = Links::new(self.model.default_link());
        for (index, link) in links.iter().enumerate() {
            table.set(COORDINATOR, index + 1, link.link);
            for (other_index, other) in links[..index].iter().enumerate() {
                if let Some(path) = self.paths.link((link.id, other.id), (link.link, other.link)) {
                    table.set(other_index + 1, index + 1, path);
                }
            }
        }
        let cluster = Cluster::new(self.model.own_facts(exact), facts, table)?;
        let nodes = links.iter().map(|link| (link.id, link.address)).collect();
        Ok(Candidates { cluster, layers: self.model.layers(), nodes })
    }

    pub(super) fn planner<'a>(&'a self, cluster: &'a Cluster) -> Result<Planner<'a>, PlanError> {
        Planner::new(cluster, self.model.facts(), self.model.workload(), self.options.optimise)
    }

    pub(super) fn plan(&self, candidates: &Candidates) -> Result<Plan, LayoutError> {
        let planner = self.planner(&candidates.cluster)?;
        self.options.layout.plan(&planner, &candidates.cluster, &self.options.peers)
    }
}
