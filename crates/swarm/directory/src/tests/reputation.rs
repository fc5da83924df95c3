//! Misbehaviour and how it fades.

use super::{NOW, peer};
use crate::{EXCLUDED_AT, HALF_LIFE_MS, JUDGED_PEERS_MAX, Offence, PeerId, Reputation};

#[test]
fn offences_add_up_and_fade() {
    let mut reputation = Reputation::new();
    assert_eq!(reputation.score(&peer(1), NOW), 0.0);
    reputation.report(peer(1), Offence::Lost, NOW);
    reputation.report(peer(1), Offence::Lost, NOW);
    assert_eq!(reputation.score(&peer(1), NOW), 2.0);
    assert_eq!(reputation.score(&peer(1), NOW.plus(HALF_LIFE_MS)), 1.0);
    reputation.report(peer(1), Offence::Lost, NOW.plus(HALF_LIFE_MS));
    assert_eq!(reputation.score(&peer(1), NOW.plus(HALF_LIFE_MS)), 2.0);
    assert!(reputation.penalty_seconds(&peer(1), NOW.plus(HALF_LIFE_MS)) > 0.0);
    assert_eq!(reputation.penalty_seconds(&peer(2), NOW), 0.0);
}

#[test]
fn a_peer_that_sends_garbage_is_excluded_and_gets_another_chance() {
    let mut reputation = Reputation::new();
    reputation.report(peer(1), Offence::Malformed, NOW);
    assert!(reputation.is_excluded(&peer(1), NOW.plus(HALF_LIFE_MS / 2)));
    assert!(!reputation.is_excluded(&peer(1), NOW.plus(HALF_LIFE_MS + 1)));
    for _ in 0..100 {
        reputation.report(peer(2), Offence::WrongResult, NOW);
    }
    assert!(reputation.is_excluded(&peer(2), NOW.plus(5 * HALF_LIFE_MS)));
    assert!(reputation.score(&peer(2), NOW.plus(6 * HALF_LIFE_MS)) < EXCLUDED_AT);
}

/// A swarm in which everything fails once must not be without peers.
#[test]
fn a_peer_that_only_fails_is_not_excluded() {
    let mut reputation = Reputation::new();
    for _ in 0..100 {
        reputation.report(peer(1), Offence::Lost, NOW);
        reputation.report(peer(1), Offence::Slow, NOW);
    }
    assert!(!reputation.is_excluded(&peer(1), NOW));
    assert!(reputation.penalty_seconds(&peer(1), NOW) > 1.0);
}

#[test]
fn few_peers_are_remembered_and_the_worst_stay() {
    let mut reputation = Reputation::new();
    reputation.report(peer(1), Offence::WrongResult, NOW);
    for number in 0..2 * JUDGED_PEERS_MAX as u64 {
        reputation.report(PeerId::new(&number.to_le_bytes()).unwrap(), Offence::Slow, NOW);
        assert!(reputation.len() <= JUDGED_PEERS_MAX);
    }
    assert!(reputation.is_excluded(&peer(1), NOW));
}
