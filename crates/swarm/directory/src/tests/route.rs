//! Chains: against exhaustive search, and each rule on its own.

use std::collections::HashSet;

use types::{DType, LayerRange};

use super::{MODEL, NOW, Random, directory, layers, peer, record};
use crate::{
    BlockRecord, BlockUse, ChainSpan, ClientView, Coordinate, DEFAULT_ROUND_TRIP_SECONDS, Directory, ModelDigest,
    Neighbour, Offence, PeerChain, PeerId, RELAY_SECONDS, Reach, Reputation, RouteError, RouteLimits, RoutePlanner,
    RouteRequest, ServiceState, Speed,
};

/// What a route depends on.
struct Facts {
    directory: Directory,
    reputation: Reputation,
    client: ClientView,
    excluded: HashSet<PeerId>,
    limits: RouteLimits,
    layers: usize,
    kv_tokens: u32,
    dtype: Option<DType>,
}

impl Facts {
    fn new(layers: usize, records: impl IntoIterator<Item = BlockRecord>) -> Self {
        Self {
            directory: directory(records),
            reputation: Reputation::new(),
            client: ClientView { reach: Some(Reach::Direct), bytes_per_s: Some(1e9), ..Default::default() },
            excluded: HashSet::new(),
            limits: RouteLimits::default(),
            layers,
            kv_tokens: 100,
            dtype: None,
        }
    }

    fn planner(&self) -> RoutePlanner<'_> {
        let Self { directory, reputation, client, limits, .. } = self;
        RoutePlanner { directory, reputation, client, now: NOW, limits: *limits }
    }

    fn request(&self) -> RouteRequest<'_> {
        RouteRequest {
            model: MODEL,
            layers: self.layers,
            dtype: self.dtype,
            kv_tokens: self.kv_tokens,
            activation_bytes: 8192,
            excluded: &self.excluded,
        }
    }

    fn plan(&self) -> Result<PeerChain, RouteError> {
        self.planner().plan(&self.request())
    }

    fn predict(&self, spans: &[ChainSpan]) -> f64 {
        self.planner().predict(&self.request(), spans)
    }

    /// The peers of the best chain with their layers.
    #[track_caller]
    fn check(&self, expected: &[(u8, u32, u32)]) {
        let spans: Vec<_> = expected.iter().map(|&(number, start, end)| span(number, start, end)).collect();
        let chain = self.plan().unwrap();
        assert_eq!(chain.spans, spans);
        assert!((chain.token_seconds - self.predict(&spans)).abs() < 1e-9);
    }
}

fn span(number: u8, start: u32, end: u32) -> ChainSpan {
    ChainSpan { peer: peer(number), layers: layers(start, end) }
}

/// At a place on a line, in milliseconds of round trip.
fn at(milliseconds: f32, record: BlockRecord) -> BlockRecord {
    BlockRecord { coordinate: Some(place(milliseconds)), ..record }
}

fn place(milliseconds: f32) -> Coordinate {
    Coordinate { position: [milliseconds / 1e3, 0.0, 0.0], height: 0.0, error: 0.1 }
}

fn speed(layer_seconds: f32, queue_seconds: f32, record: BlockRecord) -> BlockRecord {
    BlockRecord { speed: Speed { layer_seconds, queue_seconds, ..record.speed }, ..record }
}

/// All chains for a range of layers after those that are given.
fn all_chains(records: &[BlockRecord], range: LayerRange, before: &[ChainSpan], each: &mut dyn FnMut(&[ChainSpan])) {
    let start = before.last().map_or(range.start(), |span| span.layers.end());
    if start == range.end() {
        return each(before);
    }
    for record in records {
        let block = record.layers;
        let is_last = before.last().is_some_and(|span| span.peer == record.peer);
        if is_last || !(block.start()..block.end()).contains(&start) {
            continue;
        }
        for end in start + 1..=block.end().min(range.end()) {
            if record.block_use == BlockUse::AnyRange || (start, end) == (block.start(), block.end()) {
                let next = ChainSpan { peer: record.peer, layers: layers(start as u32, end as u32) };
                all_chains(records, range, &[before, &[next]].concat(), each);
            }
        }
    }
}

fn random_record(random: &mut Random, number: u8, model_layers: u64) -> BlockRecord {
    let start = random.below(model_layers);
    let end = start + 1 + random.below(model_layers - start);
    let base = record(number, layers(start as u32, end as u32));
    let neighbours = (0..6).filter(|other| *other != number && random.below(4) == 0).collect::<Vec<u8>>();
    BlockRecord {
        block_use: if random.below(4) == 0 { BlockUse::Whole } else { BlockUse::AnyRange },
        reach: if random.below(3) == 0 { Reach::Relayed } else { Reach::Direct },
        coordinate: (random.below(5) > 0).then(|| place(200.0 * random.uniform() as f32)),
        kv_tokens_free: if random.below(6) == 0 { 10 } else { 1000 },
        neighbours: neighbours
            .into_iter()
            .map(|other| Neighbour { peer: peer(other), round_trip_seconds: 0.3 * random.uniform() as f32 })
            .collect(),
        ..speed(0.001 + 0.05 * random.uniform() as f32, 0.05 * random.uniform() as f32, base)
    }
}

fn random_facts(random: &mut Random, model_layers: u64) -> (Facts, Vec<BlockRecord>) {
    let count = 2 + random.below(5) as u8;
    let records: Vec<_> = (0..count).map(|number| random_record(random, number, model_layers)).collect();
    let mut facts = Facts::new(model_layers as usize, records.clone());
    facts.client.coordinate = (random.below(4) > 0).then(|| place(200.0 * random.uniform() as f32));
    facts.client.reach = (random.below(2) == 0).then_some(Reach::Direct);
    for number in 0..count {
        if random.below(3) == 0 {
            facts.client.round_trips.insert(peer(number), 0.2 * random.uniform() as f32);
        }
        if random.below(3) == 0 {
            facts.client.layer_seconds.insert(peer(number), 0.05 * random.uniform() as f32);
        }
        if random.below(4) == 0 {
            facts.reputation.report(peer(number), Offence::Lost, NOW);
        }
    }
    let able = records.into_iter().filter(|record| record.kv_tokens_free >= facts.kv_tokens).collect();
    (facts, able)
}

#[test]
fn no_chain_of_an_exhaustive_search_is_better() {
    let mut random = Random(1);
    let (mut found, mut missing) = (0, 0);
    for _ in 0..600 {
        let model_layers = 1 + random.below(6);
        let (facts, able) = random_facts(&mut random, model_layers);
        let mut best: Option<f64> = None;
        all_chains(&able, layers(0, model_layers as u32), &[], &mut |spans| {
            let seconds = facts.predict(spans);
            best = Some(best.map_or(seconds, |best: f64| best.min(seconds)));
        });
        match (facts.plan(), best) {
            (Ok(chain), Some(best)) => {
                assert!((chain.token_seconds - best).abs() < 1e-9, "{} {best}", chain.token_seconds);
                assert!((chain.token_seconds - facts.predict(&chain.spans)).abs() < 1e-9);
                found += 1;
            }
            (Err(_), None) => missing += 1,
            (plan, best) => panic!("{plan:?} {best:?}"),
        }
    }
    assert!(found > 100 && missing > 100, "{found} {missing}");
}

#[test]
fn no_replacement_of_an_exhaustive_search_is_better() {
    let mut random = Random(2);
    let (mut found, mut missing) = (0, 0);
    for _ in 0..1500 {
        let (mut facts, able) = random_facts(&mut random, 5);
        let Ok(chain) = facts.plan() else { continue };
        let lost = random.below(chain.spans.len() as u64) as usize;
        let (before, after) = (&chain.spans[..lost], &chain.spans[lost + 1..]);
        let lost = chain.spans[lost];
        facts.excluded.insert(lost.peer);
        let others: Vec<_> = able.into_iter().filter(|record| record.peer != lost.peer).collect();
        let mut best: Option<f64> = None;
        all_chains(&others, lost.layers, &[], &mut |spans| {
            let seconds = facts.predict(&[before, spans, after].concat());
            best = Some(best.map_or(seconds, |best: f64| best.min(seconds)));
        });
        match (facts.planner().replace(&facts.request(), &chain, lost.layers), best) {
            (Ok(chain), Some(best)) => {
                assert!((chain.token_seconds - best).abs() < 1e-9, "{} {best}", chain.token_seconds);
                assert!((chain.token_seconds - facts.predict(&chain.spans)).abs() < 1e-9);
                let new = &chain.spans[before.len()..chain.spans.len() - after.len()];
                assert!(new.iter().all(|span| span.peer != lost.peer));
                assert!(chain.spans.windows(2).all(|pair| pair[0].layers.meets(pair[1].layers)));
                assert!(chain.spans.starts_with(before) && chain.spans.ends_with(after));
                found += 1;
            }
            (Err(_), None) => missing += 1,
            (replaced, best) => panic!("{replaced:?} {best:?}"),
        }
    }
    assert!(found > 50 && missing > 50, "{found} {missing}");
}

#[test]
fn a_fast_peer_takes_the_layers_that_it_has_in_common_with_a_slow_one() {
    let slow = speed(0.02, 0.0, at(0.0, record(1, layers(0, 6))));
    let fast = speed(0.001, 0.0, at(0.0, record(2, layers(3, 8))));
    let mut facts = Facts::new(8, [slow, fast.clone()]);
    facts.client.coordinate = Some(place(0.0));
    facts.check(&[(1, 0, 3), (2, 3, 8)]);
    // A server that is used as a whole begins at its own start only.
    let whole = BlockRecord { block_use: BlockUse::Whole, layers: layers(5, 8), ..fast };
    let mut facts = Facts::new(8, [speed(0.02, 0.0, at(0.0, record(1, layers(0, 6)))), whole.clone()]);
    facts.client.coordinate = Some(place(0.0));
    facts.check(&[(1, 0, 5), (2, 5, 8)]);
    let facts = Facts::new(8, [record(1, layers(0, 7)), BlockRecord { layers: layers(7, 9), ..whole }]);
    assert_eq!(facts.plan(), Err(RouteError::NoRoom { layers: layers(7, 8), kv_tokens: 100 }));
}

#[test]
fn whole_blocks_that_do_not_meet_form_no_chain() {
    let whole = |number, block| BlockRecord { block_use: BlockUse::Whole, ..record(number, block) };
    let facts = Facts::new(8, [whole(1, layers(0, 5)), whole(2, layers(4, 8))]);
    assert_eq!(facts.plan(), Err(RouteError::NoChain { layers: layers(0, 8) }));
}

#[test]
fn near_peers_go_before_fast_ones_that_are_far_and_queues_count() {
    let near = speed(0.010, 0.0, at(10.0, record(1, layers(0, 4))));
    let far = speed(0.001, 0.0, at(300.0, record(2, layers(0, 4))));
    let mut facts = Facts::new(4, [near.clone(), far.clone()]);
    facts.client.coordinate = Some(place(0.0));
    facts.check(&[(1, 0, 4)]);
    facts.directory = directory([speed(0.010, 1.0, near), far]);
    facts.check(&[(2, 0, 4)]);
}

#[test]
fn what_the_client_measured_goes_before_what_peers_say() {
    let mut facts = Facts::new(4, [speed(0.001, 0.0, record(1, layers(0, 4))), record(2, layers(0, 4))]);
    facts.check(&[(1, 0, 4)]);
    facts.client.layer_seconds.insert(peer(1), 0.02);
    facts.check(&[(2, 0, 4)]);
    facts.client.round_trips.insert(peer(2), 0.5);
    facts.check(&[(1, 0, 4)]);
}

#[test]
fn of_two_claims_about_a_round_trip_the_larger_counts() {
    let near = |to: u8, seconds: f32| vec![Neighbour { peer: peer(to), round_trip_seconds: seconds }];
    let first = BlockRecord { neighbours: near(2, 0.4), ..record(1, layers(0, 2)) };
    let liar = BlockRecord { neighbours: near(1, 0.0), ..record(2, layers(2, 4)) };
    let other = BlockRecord { neighbours: near(1, 0.2), ..record(3, layers(2, 4)) };
    let facts = Facts::new(4, [first, liar, other]);
    facts.check(&[(1, 0, 2), (3, 2, 4)]);
    let seconds = facts.plan().unwrap().token_seconds;
    assert!((seconds - (0.04 + 0.1 + DEFAULT_ROUND_TRIP_SECONDS)).abs() < 1e-3, "{seconds}");
}

#[test]
fn peers_that_cannot_reach_each_other_go_through_the_client() {
    let relayed = |record| BlockRecord { reach: Reach::Relayed, ..record };
    let mut facts = Facts::new(4, [relayed(record(1, layers(0, 2))), relayed(record(2, layers(2, 4)))]);
    let direct = facts.plan().unwrap().token_seconds;
    // Four hops between client and peers, all of them direct.
    assert!((direct - (0.04 + 2.0 * DEFAULT_ROUND_TRIP_SECONDS)).abs() < 1e-3, "{direct}");
    facts.client.reach = Some(Reach::Relayed);
    let seconds = facts.plan().unwrap().token_seconds;
    assert!((seconds - direct - 4.0 * RELAY_SECONDS).abs() < 1e-9, "{seconds}");
}

#[test]
fn only_peers_that_may_be_used_are_used() {
    let check = |change: &dyn Fn(&mut BlockRecord)| {
        let mut changed = speed(0.001, 0.0, record(1, layers(0, 4)));
        change(&mut changed);
        let mut facts = Facts::new(4, [changed, record(2, layers(0, 4))]);
        facts.dtype = Some(DType::Q8_0);
        facts.check(&[(2, 0, 4)]);
    };
    check(&|record| record.kv_tokens_free = 99);
    check(&|record| record.dtype = DType::Q4_0);
    check(&|record| record.state = ServiceState::Joining);
    check(&|record| record.state = ServiceState::Draining { next: None });
    check(&|record| record.model = ModelDigest([9; 32]));

    let mut facts = Facts::new(4, [speed(0.001, 0.0, record(1, layers(0, 4))), record(2, layers(0, 4))]);
    facts.check(&[(1, 0, 4)]);
    facts.excluded.insert(peer(1));
    facts.check(&[(2, 0, 4)]);
    facts.reputation.report(peer(2), Offence::WrongResult, NOW);
    assert_eq!(facts.plan(), Err(RouteError::NoRoom { layers: layers(0, 4), kv_tokens: 100 }));
    let planner = RoutePlanner { now: NOW.plus(60_000), ..facts.planner() };
    assert_eq!(planner.plan(&facts.request()), Err(RouteError::Uncovered { layers: layers(0, 4) }));
}

#[test]
fn a_peer_that_misbehaved_is_avoided_for_a_while() {
    let mut facts = Facts::new(4, [speed(0.009, 0.0, record(1, layers(0, 4))), record(2, layers(0, 4))]);
    facts.check(&[(1, 0, 4)]);
    facts.reputation.report(peer(1), Offence::Lost, NOW);
    facts.check(&[(2, 0, 4)]);
    facts.reputation.report(peer(2), Offence::Lost, NOW);
    facts.reputation.report(peer(2), Offence::Lost, NOW);
    facts.check(&[(1, 0, 4)]);
}

#[test]
fn only_the_lost_layers_are_replaced() {
    let blocks = [(1, 0, 4), (2, 4, 8), (3, 8, 12), (4, 2, 6), (5, 6, 10)];
    let records = blocks.map(|(number, start, end)| record(number, layers(start, end)));
    let mut facts = Facts::new(12, records);
    let chain = facts.plan().unwrap();
    assert_eq!(chain.spans, [span(1, 0, 4), span(2, 4, 8), span(3, 8, 12)]);
    facts.excluded.insert(peer(2));
    let (planner, request) = (facts.planner(), facts.request());
    let replaced = planner.replace(&request, &chain, layers(4, 8)).unwrap();
    assert_eq!(replaced.spans, [span(1, 0, 4), span(4, 4, 6), span(5, 6, 8), span(3, 8, 12)]);
    for range in [layers(4, 7), layers(5, 8), layers(0, 13)] {
        assert_eq!(planner.replace(&request, &chain, range), Err(RouteError::NotSpans { layers: range }));
    }
    let none = planner.replace(&request, &chain, layers(8, 12)).map(|chain| chain.spans);
    assert_eq!(none, Ok(chain.spans.clone()));
    facts.excluded.insert(peer(4));
    let none = facts.planner().replace(&facts.request(), &chain, layers(4, 8));
    assert_eq!(none, Err(RouteError::NoRoom { layers: layers(4, 6), kv_tokens: 100 }));
}

#[test]
fn a_model_has_1_to_1024_layers() {
    for count in [0, 1025, usize::MAX] {
        assert_eq!(Facts::new(count, []).plan(), Err(RouteError::LayerCount { layers: count }));
    }
}

#[test]
fn with_tight_limits_chains_stay_near_the_best() {
    let mut random = Random(3);
    let (mut excess, mut worst) = (0.0, 0.0f64);
    for _ in 0..40 {
        let mut block = |number| {
            let start = random.below(20) as u32;
            let base = record(number, layers(start, start + 4 + random.below(9) as u32));
            let base = at(200.0 * random.uniform() as f32, base);
            speed(0.002 + 0.02 * random.uniform() as f32, 0.02 * random.uniform() as f32, base)
        };
        let ends = [record(254, layers(0, 4)), record(255, layers(20, 24))];
        let records: Vec<_> = (0..200).map(&mut block).chain(ends).collect();
        let mut facts = Facts::new(24, records);
        facts.client.coordinate = Some(place(100.0));
        facts.limits = RouteLimits { candidates_per_layer: usize::MAX, exits_per_layer: usize::MAX };
        let best = facts.plan().unwrap().token_seconds;
        facts.limits = RouteLimits { candidates_per_layer: 12, exits_per_layer: 12 };
        let more = facts.plan().unwrap().token_seconds / best - 1.0;
        assert!(more >= -1e-9);
        excess += more / 40.0;
        worst = worst.max(more);
    }
    assert!(excess < 0.01 && worst < 0.1, "{excess} {worst}");
}
