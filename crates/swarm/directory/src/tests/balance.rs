//! Which block a peer takes and when it moves.

use super::{MODEL, NOW, directory, layers, record};
use crate::{
    BlockRecord, Coverage, DWELL_MS, MoveDecision, PeerCapacity, ServedBlock, ServiceState, choose_block, consider_move,
};
use types::LayerRange;

const SPEED: f64 = 400.0;

fn capacity(layers_max: usize) -> PeerCapacity {
    PeerCapacity { layers_max, layer_tokens_per_s: SPEED }
}

fn coverage(model: usize, blocks: &[LayerRange]) -> Coverage {
    let records = blocks.iter().zip(1..).map(|(block, number)| record(number, *block));
    directory(records).coverage(&MODEL, model, NOW)
}

#[track_caller]
fn decides(coverage: &Coverage, block: LayerRange, since_ms: u64, expected: MoveDecision) {
    let block = ServedBlock { layers: block, since: NOW };
    let decision = consider_move(coverage, block, capacity(block.layers.count()), NOW.plus(since_ms), [0.0, 0.0]);
    assert_eq!(decision, expected);
}

#[test]
fn a_new_peer_takes_what_is_served_least() {
    let (a, b) = (layers(0, 4), layers(4, 8));
    assert_eq!(choose_block(&coverage(8, &[a]), capacity(4), 0.5), Some(b));
    assert_eq!(choose_block(&coverage(8, &[a, a, b]), capacity(4), 0.5), Some(b));
    assert_eq!(choose_block(&coverage(8, &[a, a, b]), capacity(20), 0.5), Some(layers(0, 8)));
    // One layer is missing in the middle.
    let hole = coverage(8, &[layers(0, 3), layers(4, 8)]);
    assert_eq!(choose_block(&hole, capacity(1), 0.5), Some(layers(3, 4)));
    assert_eq!(choose_block(&hole, capacity(0), 0.5), None);
    assert_eq!(choose_block(&coverage(0, &[]), capacity(4), 0.5), None);
}

#[test]
fn chance_decides_between_equal_blocks() {
    let empty = coverage(8, &[]);
    assert_eq!(choose_block(&empty, capacity(4), 0.0), Some(layers(0, 4)));
    assert_eq!(choose_block(&empty, capacity(4), 0.999), Some(layers(4, 8)));
}

#[test]
fn a_block_that_another_peer_is_loading_is_not_taken_again() {
    let joining = BlockRecord { state: ServiceState::Joining, ..record(9, layers(4, 8)) };
    let coverage = directory([record(1, layers(0, 4)), record(2, layers(8, 12)), joining]).coverage(&MODEL, 16, NOW);
    assert_eq!(choose_block(&coverage, capacity(4), 0.5), Some(layers(12, 16)));
}

#[test]
fn a_peer_moves_to_a_weaker_block_only_if_that_is_clearly_better() {
    let (a, b) = (layers(0, 4), layers(4, 8));
    let balanced = coverage(8, &[a, b, a, b]);
    decides(&balanced, a, DWELL_MS, MoveDecision::Stay);
    // Afterwards it would be the other way round.
    let slightly = coverage(8, &[a, b, a]);
    decides(&slightly, a, DWELL_MS, MoveDecision::Stay);
    let clearly = coverage(8, &[a, a, a, b]);
    decides(&clearly, a, DWELL_MS, MoveDecision::Move(b));
    decides(&clearly, b, DWELL_MS, MoveDecision::Stay);
}

#[test]
fn a_peer_stays_for_a_while_unless_a_layer_is_not_served() {
    let (a, b) = (layers(0, 4), layers(4, 8));
    let clearly = coverage(8, &[a, a, a, b]);
    decides(&clearly, a, DWELL_MS - 1, MoveDecision::Stay);
    let lost = coverage(8, &[a, a]);
    decides(&lost, a, 0, MoveDecision::Move(b));
    // The only peer of a layer does not leave it.
    decides(&coverage(8, &[a]), a, DWELL_MS, MoveDecision::Stay);
}

#[test]
fn of_many_peers_about_as_many_move_as_are_needed() {
    let (a, b) = (layers(0, 4), layers(4, 8));
    let blocks = [vec![a; 120], vec![b; 80]].concat();
    let coverage = coverage(8, &blocks);
    let moves = |random: f64| {
        let block = ServedBlock { layers: a, since: NOW };
        consider_move(&coverage, block, capacity(4), NOW.plus(DWELL_MS), [0.0, random]) != MoveDecision::Stay
    };
    let movers = (0..120).filter(|number| moves(f64::from(*number) / 120.0)).count();
    assert!((15..=25).contains(&movers), "{movers}");
}
