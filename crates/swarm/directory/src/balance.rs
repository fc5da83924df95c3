//! Which block a peer should serve. The throughput of a swarm is that of its weakest layer, so a peer takes the block
//! whose layers have the least, and moves when the layers that it leaves keep clearly more than the new ones had.
//!
//! All peers decide alone, on views that are some minutes old, so many see the same weak spot at once. Three rules keep
//! them from running back and forth. The layers that a peer leaves must keep [`GAIN_MIN`] times what the weakest of the
//! new ones had before. A peer stays for [`DWELL_MS`] after a move, unless a layer is not served at all. And of the
//! peers that could repair a spot each moves with such a probability that about as many move as are needed.
//!
//! Of the layers that a move changes the weakest becomes stronger. So the sorted list of all throughputs grows with
//! every move, and moves that are made one after the other come to an end.

use types::LayerRange;

use crate::coverage::Coverage;
use crate::identity::UnixTime;

/// After a move, the weakest layer that was left still has this many times what the weakest layer had that was taken.
pub const GAIN_MIN: f64 = 1.2;
/// How long a peer stays where it is at least.
pub const DWELL_MS: u64 = 10 * 60 * 1000;

/// Windows whose weakest layers differ by less are equally good; chance decides.
const EQUAL: f64 = 0.05;

/// What a peer can serve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerCapacity {
    /// Layers that fit into its memory; at least 1.
    pub layers_max: usize,
    /// Tokens times layers per second.
    pub layer_tokens_per_s: f64,
}

/// The block that a peer serves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServedBlock {
    pub layers: LayerRange,
    pub since: UnixTime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveDecision {
    Stay,
    /// Drain, then serve this block.
    Move(LayerRange),
}

/// The block that needs a new peer most: its sorted throughputs are the least. `random` is uniform in 0..1. `None` if
/// the model has no layers or the peer has room for none.
pub fn choose_block(coverage: &Coverage, capacity: PeerCapacity, random: f64) -> Option<LayerRange> {
    weakest_window(coverage.planned(), capacity.layers_max, random)
}

/// Whether a peer should move, which it asks about once a minute or so. `random` are two uniform numbers in 0..1.
pub fn consider_move(
    coverage: &Coverage,
    block: ServedBlock,
    capacity: PeerCapacity,
    now: UnixTime,
    random: [f64; 2],
) -> MoveDecision {
    let planned = coverage.planned();
    let speed = coverage.trusted(capacity.layer_tokens_per_s);
    let mut without = planned.to_vec();
    add(&mut without, block.layers, -speed / block.layers.count() as f64);
    let Some(next) = weakest_window(&without, capacity.layers_max, random[0]) else { return MoveDecision::Stay };
    let mut moved = without.clone();
    add(&mut moved, next, speed / next.count() as f64);
    let least_of = |throughput: &[f64], is_concerned: &dyn Fn(usize) -> bool| {
        let layers = (0..planned.len()).filter(|layer| is_concerned(*layer));
        layers.map(|layer| throughput[layer]).fold(f64::INFINITY, f64::min)
    };
    // Layers of both blocks keep what they have, but for rounding.
    let rounding = 1e-6 * speed;
    let weakest = least_of(planned, &|layer| moved[layer] > planned[layer] + rounding);
    let left = least_of(&moved, &|layer| moved[layer] < planned[layer] - rounding);
    let is_gain = left > 0.0 && weakest < f64::INFINITY && left >= weakest * GAIN_MIN;
    let is_allowed = weakest <= 0.0 || now.since(block.since) >= DWELL_MS;
    match is_gain && is_allowed && random[1] < share_of_movers(coverage, next, speed, weakest) {
        true => MoveDecision::Move(next),
        false => MoveDecision::Stay,
    }
}

/// The part of the peers that could repair `next` that should do so: as many as its weakest layer lacks to the mean,
/// among the peers of layers that have clearly more.
fn share_of_movers(coverage: &Coverage, next: LayerRange, speed: f64, weakest: f64) -> f64 {
    let planned = coverage.planned();
    let mean = planned.iter().sum::<f64>() / planned.len() as f64;
    let needed = ((mean - weakest) * next.count() as f64 / speed).max(1.0);
    let has_excess = |layer: &usize| planned[*layer] >= weakest * GAIN_MIN;
    let peer_layers: u32 = (0..planned.len()).filter(has_excess).map(|layer| coverage.planned_peers()[layer]).sum();
    let able = f64::from(peer_layers) / next.count() as f64;
    needed / able.max(1.0)
}

/// The window of up to `layers_max` layers whose sorted throughputs are the least.
fn weakest_window(throughput: &[f64], layers_max: usize, random: f64) -> Option<LayerRange> {
    let count = layers_max.min(throughput.len());
    if count == 0 {
        return None;
    }
    let scale = throughput.iter().sum::<f64>() / throughput.len() as f64;
    let windows: Vec<Vec<i64>> = throughput
        .windows(count)
        .map(|window| {
            // In steps of what counts as equal, so that chance has a choice.
            let step = |value: &f64| (value / (scale * EQUAL).max(f64::MIN_POSITIVE)).round() as i64;
            let mut sorted: Vec<i64> = window.iter().map(step).collect();
            sorted.sort_unstable();
            sorted
        })
        .collect();
    let least = windows.iter().min()?;
    let equal: Vec<usize> = (0..windows.len()).filter(|start| windows[*start] == *least).collect();
    let start = equal[((random * equal.len() as f64) as usize).min(equal.len() - 1)];
    LayerRange::new(start as u32, (start + count) as u32)
}

fn add(throughput: &mut [f64], layers: LayerRange, amount: f64) {
    for layer in layers_within(layers, throughput.len()) {
        // What was added in another order leaves a remainder that is not zero.
        let sum = throughput[layer] + amount;
        throughput[layer] = if sum < 1e-9 * amount.abs() { 0.0 } else { sum };
    }
}

fn layers_within(layers: LayerRange, model: usize) -> std::ops::Range<usize> {
    layers.start().min(model)..layers.end().min(model)
}
