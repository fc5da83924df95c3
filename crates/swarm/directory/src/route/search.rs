//! The shortest path through (layer, peer): dynamic programming from the first layer to the last. Every state is
//! visited once, so the cost is layers × entries × exits, whatever the number of peers in the swarm.

use types::LayerRange;

use super::RouteLimits;
use super::candidates::{Candidates, IndexedSpan};
use super::hops::Endpoint;

/// The best way to have a peer run the next layer.
#[derive(Clone, Copy)]
struct Running {
    peer: usize,
    seconds: f64,
    /// The layer at which it entered.
    entered: usize,
    /// The way up to there: an index of `steps`.
    before: Option<usize>,
}

/// A span that is complete, and the way before it.
#[derive(Clone, Copy)]
struct Step {
    span: IndexedSpan,
    before: Option<usize>,
}

/// A way to have all layers before this one done.
#[derive(Clone, Copy)]
struct Exit {
    at: Endpoint,
    seconds: f64,
    step: Option<usize>,
}

/// The spans for the range of the candidates with the least time from one end to the other.
pub(super) fn least(
    candidates: &Candidates,
    limits: RouteLimits,
    from: Endpoint,
    to: Endpoint,
) -> Option<Vec<IndexedSpan>> {
    let range = candidates.range;
    let mut steps = Vec::new();
    let mut running: Vec<Running> = Vec::new();
    let mut exits = vec![Exit { at: from, seconds: 0.0, step: None }];
    for (layer, entries) in range.iter().zip(&candidates.entries) {
        enter(candidates, layer, entries, &exits, &mut running);
        for state in &mut running {
            state.seconds += candidates.all[state.peer].layer_seconds;
        }
        exits = leave(candidates, layer + 1, limits.exits_per_layer, to, &running, &mut steps);
        running.retain(|state| candidates.all[state.peer].end > layer + 1);
    }
    let arrival = |exit: &Exit| exit.seconds + candidates.sites.hop_seconds(exit.at, to);
    let best = exits.iter().min_by(|a, b| arrival(a).total_cmp(&arrival(b)))?;
    let mut spans = Vec::new();
    let mut next = best.step;
    while let Some(step) = next {
        spans.push(steps[step].span);
        next = steps[step].before;
    }
    spans.reverse();
    Some(spans)
}

/// Lets peers enter where that is faster than if they went on with what they run.
fn enter(candidates: &Candidates, layer: usize, entries: &[usize], exits: &[Exit], running: &mut Vec<Running>) {
    let going_on = running.len();
    for &peer in entries {
        let hop = |exit: &Exit| exit.seconds + candidates.sites.hop_seconds(exit.at, Endpoint::Peer(peer));
        let ways = exits.iter().filter(|exit| exit.at != Endpoint::Peer(peer) || exit.step.is_none());
        let Some((seconds, exit)) = ways.map(|exit| (hop(exit), exit)).min_by(|a, b| a.0.total_cmp(&b.0)) else {
            continue;
        };
        let seconds = seconds + candidates.all[peer].fixed_seconds;
        let state = Running { peer, seconds, entered: layer, before: exit.step };
        match running[..going_on].iter_mut().find(|other| other.peer == peer) {
            Some(other) if other.seconds <= seconds => {}
            Some(other) => *other = state,
            None => running.push(state),
        }
    }
}

/// The peers that can pass on the activations before `layer`, as far as the limit allows those that would be back at
/// the end first.
fn leave(
    candidates: &Candidates,
    layer: usize,
    count_max: usize,
    to: Endpoint,
    running: &[Running],
    steps: &mut Vec<Step>,
) -> Vec<Exit> {
    let mut leaving: Vec<(f64, &Running)> = running
        .iter()
        .filter(|state| candidates.all[state.peer].leaves_at(layer))
        .map(|state| (state.seconds + candidates.sites.hop_seconds(Endpoint::Peer(state.peer), to), state))
        .collect();
    let order = |a: &(f64, &Running), b: &(f64, &Running)| a.0.total_cmp(&b.0).then(a.1.peer.cmp(&b.1.peer));
    if leaving.len() > count_max {
        leaving.select_nth_unstable_by(count_max, order);
        leaving.truncate(count_max);
    }
    leaving.sort_unstable_by(order);
    let mut exits = Vec::with_capacity(leaving.len());
    for (_, state) in leaving {
        let layers = LayerRange::new(state.entered as u32, layer as u32).expect("a peer leaves after it entered");
        steps.push(Step { span: (state.peer, layers), before: state.before });
        exits.push(Exit { at: Endpoint::Peer(state.peer), seconds: state.seconds, step: Some(steps.len() - 1) });
    }
    exits
}
