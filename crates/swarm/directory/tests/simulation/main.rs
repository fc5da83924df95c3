//! A thousand simulated peers in virtual time: coverage, balance, and how often peers move.

mod eclipse;

use std::collections::HashSet;

use directory::{Reputation, RouteLimits, RoutePlanner};
use testing::simulation::{Churn, MINUTE_MS, MODEL, Random, Site, World, request};

const HOUR_MS: u64 = 60 * MINUTE_MS;
const PEERS: usize = 1000;

#[test]
fn a_thousand_peers_that_stay_settle() {
    let mut world = World::new(PEERS, Churn { stay_ms: None }, 1);
    world.run(HOUR_MS);
    world.reset_metrics();
    world.run(HOUR_MS / 2);
    assert_eq!(world.gaps, 0);
    assert!(world.least_balance() > 0.8, "{}", world.least_balance());
    assert!(world.moves <= PEERS / 200, "{} moves", world.moves);
}

#[test]
fn with_churn_no_layer_is_lost_and_the_swarm_stays_balanced() {
    let mut world = World::new(PEERS, Churn { stay_ms: Some(HOUR_MS) }, 2);
    world.run(HOUR_MS / 2);
    world.reset_metrics();
    world.run(HOUR_MS);
    assert_eq!(world.gaps, 0);
    assert!(world.mean_balance() > 0.85, "{}", world.mean_balance());
    assert!(world.least_balance() > 0.75, "{}", world.least_balance());
    assert!(world.moves < PEERS / 10, "{} moves", world.moves);
}

#[test]
fn a_few_peers_cover_what_they_can() {
    // About five of them cover the model once.
    let mut world = World::new(30, Churn { stay_ms: None }, 3);
    world.run(HOUR_MS);
    world.reset_metrics();
    world.run(HOUR_MS / 2);
    assert_eq!(world.gaps, 0);
    assert!(world.moves <= 3, "{} moves", world.moves);
}

#[test]
fn clients_find_chains_among_a_thousand_peers() {
    let mut world = World::new(PEERS, Churn { stay_ms: Some(HOUR_MS) }, 4);
    world.run(HOUR_MS / 2);
    assert!(world.coordinate_error() < 0.2, "{}", world.coordinate_error());
    let mut random = Random(5);
    let (reputation, excluded) = (Reputation::new(), HashSet::new());
    for _ in 0..10 {
        let site = Site::random(&mut random);
        let client = world.client(&site);
        let request = request(&excluded);
        let planner = |limits| RoutePlanner {
            directory: &world.directory,
            reputation: &reputation,
            client: &client,
            now: world.now,
            limits,
        };
        let everything = RouteLimits { candidates_per_layer: usize::MAX, exits_per_layer: usize::MAX };
        let chain = planner(RouteLimits::default()).plan(&request).expect("all layers are served");
        let best = planner(everything).plan(&request).expect("all layers are served");
        assert!(chain.token_seconds <= best.token_seconds * 1.05, "{} {}", chain.token_seconds, best.token_seconds);
        for span in &chain.spans {
            let record = world.directory.get(&MODEL, &span.peer).expect("peers of a chain have records");
            assert!(record.kv_tokens_free >= request.kv_tokens);
            assert!(record.layers.start() <= span.layers.start() && span.layers.end() <= record.layers.end());
        }
        assert!(chain.spans.windows(2).all(|pair| pair[0].layers.meets(pair[1].layers)));
    }
}
