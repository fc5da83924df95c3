//! `Assignment`: which node has which layers. All layers, each once, in the order of the chain.

use types::LayerRange;

use super::error::AssignmentError;
use super::facts::{COORDINATOR, Cluster};

/// Ranges that follow one another from the first layer to the last, each on another node. Only the first can be the
/// coordinator's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assignment {
    stages: Vec<(usize, LayerRange)>,
}

impl Assignment {
    /// `stages` are nodes, by index in the cluster, and their layers, in the order of the chain.
    pub fn new(cluster: &Cluster, layers: usize, stages: Vec<(usize, LayerRange)>) -> Result<Self, AssignmentError> {
        match Self::first_fault(cluster, layers, &stages) {
            None => Ok(Self { stages }),
            Some((_, error)) => Err(error),
        }
    }

    /// The first stage that is wrong, and why. It is the one after the last if layers are missing.
    pub(super) fn first_fault(
        cluster: &Cluster,
        layers: usize,
        stages: &[(usize, LayerRange)],
    ) -> Option<(usize, AssignmentError)> {
        let mut expected = 0;
        for (index, &(_, range)) in stages.iter().enumerate() {
            if let Err(error) = check_stage(cluster, layers, &stages[..=index], expected) {
                return Some((index, error));
            }
            expected = range.end();
        }
        (expected < layers).then_some((stages.len(), AssignmentError::Unassigned { from: expected, model: layers }))
    }

    /// `counts` are the numbers of layers of the nodes after the coordinator, in their order. The coordinator has the
    /// layers that are left, and has them first. A node whose count is zero is not used.
    pub fn split(cluster: &Cluster, layers: usize, counts: &[usize]) -> Result<Self, AssignmentError> {
        let peers = cluster.nodes().len() - 1;
        if counts.len() != peers {
            return Err(AssignmentError::SplitLength { counts: counts.len(), peers });
        }
        let sum = counts.iter().fold(0, |sum: usize, &count| sum.saturating_add(count));
        let Some(own) = layers.checked_sub(sum) else {
            return Err(AssignmentError::SplitSum { sum, model: layers });
        };
        let mut start = 0;
        let counted = std::iter::once(own).chain(counts.iter().copied()).enumerate();
        let stages = counted.filter_map(|(node, count)| {
            let range = range(start, start + count);
            start += count;
            Some((node, range?))
        });
        Self::new(cluster, layers, stages.collect())
    }

    /// For a search that keeps the invariant.
    pub(super) fn trusted(stages: Vec<(usize, LayerRange)>) -> Self {
        debug_assert!(stages.windows(2).all(|pair| pair[0].1.meets(pair[1].1)));
        Self { stages }
    }

    /// Nodes and their layers, in the order of the chain. The coordinator is missing if it has no layers.
    pub fn stages(&self) -> &[(usize, LayerRange)] {
        &self.stages
    }

    pub fn layers_of(&self, node: usize) -> Option<LayerRange> {
        self.stages.iter().find(|(other, _)| *other == node).map(|(_, layers)| *layers)
    }

    /// The stages on other machines than the coordinator's.
    pub(super) fn remote(&self) -> &[(usize, LayerRange)] {
        match self.stages.first() {
            Some((COORDINATOR, _)) => &self.stages[1..],
            _ => &self.stages,
        }
    }
}

/// Checks the last of some stages. Layer `expected` is the first that the stages before it do not have.
fn check_stage(
    cluster: &Cluster,
    layers: usize,
    stages: &[(usize, LayerRange)],
    expected: usize,
) -> Result<(), AssignmentError> {
    let Some((&(node, range), before)) = stages.split_last() else { return Ok(()) };
    let nodes = cluster.nodes();
    let Some(facts) = nodes.get(node) else {
        return Err(AssignmentError::NoSuchNode { node, nodes: nodes.len() });
    };
    let name = || facts.name.clone();
    if let Some(&(_, first)) = before.iter().find(|(other, _)| *other == node) {
        return Err(AssignmentError::Twice { name: name(), first, second: range });
    }
    if node == COORDINATOR && !before.is_empty() {
        return Err(AssignmentError::CoordinatorNotFirst { layers: range });
    }
    if range.end() > layers {
        return Err(AssignmentError::Beyond { name: name(), layers: range, model: layers });
    }
    if range.start() != expected {
        return Err(AssignmentError::Gap { name: name(), layers: range, expected });
    }
    Ok(())
}

/// `None` for an empty range.
pub(super) fn range(start: usize, end: usize) -> Option<LayerRange> {
    LayerRange::new(u32::try_from(start).ok()?, u32::try_from(end).ok()?)
}
