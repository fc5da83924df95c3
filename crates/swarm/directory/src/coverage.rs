//! How much throughput the peers give each layer of a model: what decides which block the swarm needs most.

use types::LayerRange;

use crate::record::{BlockRecord, ServiceState};

/// A peer counts as at most this many times as fast as the median peer: one that claims more would otherwise make its
/// layers look served, and nobody else would take them.
pub const TRUSTED_SPEED_FACTOR: f64 = 8.0;

/// Throughput per layer, in tokens per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Coverage {
    served: Vec<f64>,
    planned: Vec<f64>,
    planned_peers: Vec<u32>,
    peers: usize,
    trusted_speed: f64,
}

impl Coverage {
    /// Of records of one model with so many layers. Layers that it does not have are ignored.
    pub fn new<'a>(layers: usize, records: impl Iterator<Item = &'a BlockRecord> + Clone) -> Self {
        let mut speeds: Vec<f64> = records.clone().map(|record| record.speed.layer_tokens_per_s.into()).collect();
        let middle = speeds.len() / 2;
        let trusted_speed = match speeds.is_empty() {
            true => f64::INFINITY,
            false => *speeds.select_nth_unstable_by(middle, f64::total_cmp).1 * TRUSTED_SPEED_FACTOR,
        };
        let mut coverage = Self {
            served: vec![0.0; layers],
            planned: vec![0.0; layers],
            planned_peers: vec![0; layers],
            peers: speeds.len(),
            trusted_speed,
        };
        records.for_each(|record| coverage.add(record));
        coverage
    }

    /// Of peers that take sessions.
    pub fn served(&self) -> &[f64] {
        &self.served
    }

    /// When those that load a block, or move to one, will serve it.
    pub fn planned(&self) -> &[f64] {
        &self.planned
    }

    /// The number of peers behind [`Self::planned`].
    pub fn planned_peers(&self) -> &[u32] {
        &self.planned_peers
    }

    /// All peers that serve, or will serve, a block of the model.
    pub fn peers(&self) -> usize {
        self.peers
    }

    /// What a peer with this speed counts for.
    pub fn trusted(&self, layer_tokens_per_s: f64) -> f64 {
        layer_tokens_per_s.min(self.trusted_speed)
    }

    /// The first layers that nobody serves.
    pub fn first_gap(&self) -> Option<LayerRange> {
        let start = self.served.iter().position(|served| *served == 0.0)?;
        let count = self.served[start..].iter().take_while(|served| **served == 0.0).count();
        LayerRange::new(start as u32, (start + count) as u32)
    }

    /// The least throughput of a layer over the mean: 1 if the swarm is balanced, 0 if a layer is not served.
    pub fn balance(&self) -> f64 {
        let mean = self.served.iter().sum::<f64>() / self.served.len().max(1) as f64;
        let least = self.served.iter().copied().fold(f64::INFINITY, f64::min);
        if mean > 0.0 { least / mean } else { 0.0 }
    }

    fn add(&mut self, record: &BlockRecord) {
        let speed = self.trusted(record.speed.layer_tokens_per_s.into());
        let (serves, plans) = match record.state {
            ServiceState::Serving => (true, Some(record.layers)),
            ServiceState::Joining => (false, Some(record.layers)),
            ServiceState::Draining { next } => (false, next),
        };
        let throughput = |layers: LayerRange| speed / layers.count() as f64;
        let within = |layers: LayerRange, model: usize| layers.start().min(model)..layers.end().min(model);
        if serves {
            let range = within(record.layers, self.served.len());
            self.served[range].iter_mut().for_each(|served| *served += throughput(record.layers));
        }
        if let Some(layers) = plans {
            let range = within(layers, self.planned.len());
            self.planned[range.clone()].iter_mut().for_each(|planned| *planned += throughput(layers));
            self.planned_peers[range].iter_mut().for_each(|peers| *peers += 1);
        }
    }
}
