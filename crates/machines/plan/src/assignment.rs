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
        match Self::first_fault(&cluster.names(), layers, &stages) {
            None => Ok(Self { stages }),
            Some((_, error)) => Err(error),
        }
    }

    /// The first stage that is wrong, and why. It is the one after the last if layers are missing. `names` are those of the
    /// nodes by index, the coordinator's first.
    pub(super) fn first_fault(
        names: &[&str],
        layers: usize,
        stages: &[(usize, LayerRange)],
    ) -> Option<(usize, AssignmentError)> {
        let mut expected = 0;
        for (index, &(_, range)) in stages.iter().enumerate() {
            if let Err(error) = check_stage(names, layers, &stages[..=index], expected) {
                return Some((index, error));
            }
            expected = range.end();
        }
        (expected < layers).then_some((stages.len(), AssignmentError::Unassigned { from: expected, model: layers }))
    }

    /// `peers` are the nodes that were named, in their order, and how many layers each is to have. The coordinator has the
    /// layers that are left, and has them first. A peer whose count is zero is not used, unless another is missing
    /// (`None`): the layers of that one go to such a peer, else to the stage before it, or after it if it is the first.
    pub fn split(cluster: &Cluster, layers: usize, peers: &[(Option<usize>, usize)]) -> Result<Self, AssignmentError> {
        let sum = peers.iter().fold(0, |sum: usize, (_, count)| sum.saturating_add(*count));
        let Some(own) = layers.checked_sub(sum) else {
            return Err(AssignmentError::SplitSum { sum, model: layers });
        };
        let mut spares = peers.iter().filter(|(_, count)| *count == 0).filter_map(|(node, _)| *node);
        let mut counts = vec![(COORDINATOR, own)];
        // The layers before the first stage on a peer, if the coordinator has none.
        let mut orphans = 0;
        for &(node, count) in peers.iter().filter(|(_, count)| *count > 0) {
            match node.or_else(|| spares.next()) {
                Some(node) => counts.push((node, std::mem::take(&mut orphans) + count)),
                None => match counts.last_mut().filter(|(_, last)| *last > 0) {
                    Some((_, last)) => *last += count,
                    None => orphans += count,
                },
            }
        }
        // Nobody is left but the coordinator.
        counts[0].1 += orphans;
        let mut start = 0;
        let stages = counts.into_iter().filter_map(|(node, count)| {
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
    names: &[&str],
    layers: usize,
    stages: &[(usize, LayerRange)],
    expected: usize,
) -> Result<(), AssignmentError> {
    let Some((&(node, range), before)) = stages.split_last() else { return Ok(()) };
    let Some(&name) = names.get(node) else {
        return Err(AssignmentError::NoSuchNode { node, nodes: names.len() });
    };
    let name = || name.to_owned();
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
