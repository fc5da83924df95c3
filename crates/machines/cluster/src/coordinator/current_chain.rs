//! `CurrentChain`: the chain that was handed over, and which of its machines is to blame if it is lost.

use std::net::SocketAddr;
use std::time::Instant;

use super::node_link::NodeId;
use super::planning::PlannedStage;
use crate::chain::{LinkEnd, LinkHandle};
use crate::wire::control::WireFault;

pub(super) struct CurrentChain {
    pub number: u64,
    pub stages: Vec<PlannedStage>,
    pub formed_at: Instant,
    /// `None` if the coordinator has all layers.
    pub handle: Option<LinkHandle>,
    /// For each stage, how much points to it as the cause of a loss.
    suspicion: Vec<u32>,
}

/// What one report says, split between the machines at both ends of a connection. The coordinator is never suspected.
const REPORT: u32 = 2;

impl CurrentChain {
    pub fn new(number: u64, stages: Vec<PlannedStage>, handle: Option<LinkHandle>) -> Self {
        let suspicion = vec![0; stages.len()];
        Self { number, stages, formed_at: Instant::now(), handle, suspicion }
    }

    pub fn has(&self, node: NodeId) -> bool {
        self.index(node).is_some()
    }

    fn index(&self, node: NodeId) -> Option<usize> {
        self.stages.iter().position(|stage| stage.node == node)
    }

    /// A machine is gone, or its stage has failed.
    pub fn suspect(&mut self, node: NodeId) {
        if let Some(index) = self.index(node) {
            self.suspicion[index] += REPORT;
        }
    }

    /// The first or the last stage is silent.
    pub fn suspect_end(&mut self, end: LinkEnd) {
        let stage = match end {
            LinkEnd::First => self.suspicion.first_mut(),
            LinkEnd::Last => self.suspicion.last_mut(),
        };
        if let Some(suspicion) = stage {
            *suspicion += REPORT;
        }
    }

    /// A machine has reported a fault.
    pub fn suspect_fault(&mut self, node: NodeId, fault: &WireFault) {
        let Some(index) = self.index(node) else { return };
        let other = match fault {
            WireFault::Stage { .. } => return self.suspect(node),
            // It replaces its lost processes.
            WireFault::Lost { .. } => return,
            WireFault::Previous { .. } => index.checked_sub(1),
            WireFault::Next { .. } => Some(index + 1).filter(|next| *next < self.stages.len()),
        };
        match other {
            None => self.suspicion[index] += REPORT,
            Some(other) => {
                self.suspicion[index] += REPORT / 2;
                self.suspicion[other] += REPORT / 2;
            }
        }
    }

    /// Those to which most reports point. Nobody, if there was none.
    pub fn culprits(&self) -> impl Iterator<Item = SocketAddr> {
        let most = self.suspicion.iter().copied().max().unwrap_or(0);
        let stages = self.stages.iter().zip(&self.suspicion);
        stages.filter(move |(_, suspicion)| most > 0 && **suspicion == most).map(|(stage, _)| stage.address)
    }
}

#[cfg(test)]
mod tests {
    use types::LayerRange;

    use super::*;

    #[test]
    fn the_machine_to_which_most_reports_point_is_to_blame() {
        let address = |index: u16| SocketAddr::from(([10, 0, 0, 1], index));
        let why = || "the connection broke".to_owned();
        let previous = |node| (node, WireFault::Previous { why: why() });
        let next = |node| (node, WireFault::Next { why: why() });
        let check = |ends: &[LinkEnd], gone: &[u64], faults: &[(u64, WireFault)], blamed: &[u16]| {
            let stages = (1..=3).map(|index| PlannedStage {
                node: NodeId(index),
                address: address(index as u16),
                layers: LayerRange::new(index as u32, index as u32 + 1).unwrap(),
            });
            let mut chain = CurrentChain::new(1, stages.collect(), None);
            ends.iter().for_each(|end| chain.suspect_end(*end));
            gone.iter().for_each(|node| chain.suspect(NodeId(*node)));
            faults.iter().for_each(|(node, fault)| chain.suspect_fault(NodeId(*node), fault));
            let expected: Vec<_> = blamed.iter().map(|index| address(*index)).collect();
            assert_eq!(chain.culprits().collect::<Vec<_>>(), expected);
        };
        check(&[], &[], &[], &[]);
        check(&[LinkEnd::First], &[], &[], &[1]);
        check(&[LinkEnd::Last], &[], &[previous(3)], &[3]);
        // Both connections of the second machine have broken.
        check(&[], &[], &[next(1), previous(3)], &[2]);
        check(&[], &[2], &[previous(3)], &[2]);
        // It may be either.
        check(&[], &[], &[previous(2), next(1)], &[1, 2]);
        check(&[], &[], &[(3, WireFault::Stage { why: why() })], &[3]);
        check(&[], &[], &[(3, WireFault::Lost { why: why() }), (9, WireFault::Stage { why: why() })], &[]);
        // Its other ends are the coordinator's.
        check(&[], &[], &[previous(1)], &[1]);
        check(&[], &[], &[next(3)], &[3]);
    }
}
