//! The searches against brute force, and what holds for every plan.

mod files;
mod table;

use kernels::cpu::Level;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::assignment::range;
use super::search::{Constraint, Found, Problem};
use super::*;

/// One machine reads 10 GB/s, computes 100 GMAC/s and needs 1 ms for each step.
fn node(name: &str, memory_free: u64) -> NodeFacts {
    NodeFacts {
        name: name.to_owned(),
        address: None,
        level: Level::Avx2,
        threads: 4,
        memory_free,
        read_bytes_per_s: 10e9,
        multiply_adds_per_s: 100e9,
        step_seconds: 1e-3,
    }
}

/// Half a round trip is 1 ms, a row of the model's activations takes 1 ms.
const LINK: Link = Link { round_trip_seconds: 2e-3, bytes_per_s: 4e6 };

/// A layer of 100 MB takes 10 ms.
fn model(layers: usize) -> ModelFacts {
    let layer =
        LayerFacts { weight_bytes: 100_000_000, token_bytes: 100_000_000, kv_bytes: 1000, multiply_adds: 50_000_000 };
    ModelFacts {
        name: "tiny".to_owned(),
        hidden: 1000,
        layers: vec![layer; layers],
        head: HeadFacts {
            weight_bytes: 50_000_000,
            read_bytes: 30_000_000,
            multiply_adds: 1,
            working_bytes: 1_000_000,
        },
        stage_working_bytes: 2_000_000,
    }
}

const WORKLOAD: Workload = Workload { kv_tokens: 1000, positions: 0, batch: 4, prompt_tokens: 300, chunk_rows: 100 };

/// Room for this many layers of [`model`], with their keys and values.
fn layers_of_memory(layers: u64) -> u64 {
    layers * 101_000_000 + 2_000_000
}

const HEAD_MEMORY: u64 = 51_000_000;

fn check_close(value: f64, expected: f64) {
    assert!((value / expected - 1.0).abs() < 1e-9, "{value}, not {expected}");
}

fn layers(plan: &Plan) -> Vec<(usize, usize, usize)> {
    plan.assignment.stages().iter().map(|(node, layers)| (*node, layers.start(), layers.end())).collect()
}

#[test]
fn the_time_of_a_token_is_the_sum_of_its_parts() {
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(2));
    let others = vec![node("b", layers_of_memory(3))];
    let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(5));
    let plan = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap().plan().unwrap();
    assert_eq!(layers(&plan), [(0, 0, 2), (1, 2, 5)]);
    let prediction = &plan.prediction;
    check_close(prediction.head_seconds, 1e-3 + 3e-3);
    check_close(prediction.stages[0].seconds, 20e-3);
    check_close(prediction.stages[1].seconds, 31e-3);
    check_close(prediction.hops[0].seconds, 2e-3);
    check_close(prediction.hops[1].seconds, 2e-3);
    check_close(prediction.token_seconds, 59e-3);
    check_close(prediction.tokens_per_s(), 1.0 / 59e-3);
    let memory =
        MemoryUse { weights: 250_000_000, kv: 2_000_000, working: 3_000_000, free: HEAD_MEMORY + layers_of_memory(2) };
    assert_eq!(plan.memory[0], memory);
    assert_eq!(
        plan.memory[1],
        MemoryUse { weights: 300_000_000, kv: 3_000_000, working: 2_000_000, free: layers_of_memory(3) }
    );
}

#[test]
fn a_batch_keeps_all_stages_occupied() {
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(4));
    let others = vec![node("b", layers_of_memory(4))];
    let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(4));
    let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Throughput).unwrap();
    let split = planner.evaluate(&Assignment::split(&cluster, 4, &[(Some(1), 2)]).unwrap()).unwrap();
    // Two parts of two sequences. The coordinator takes 24 ms for each, the pass of one takes 24 + 3 + 21 + 3.
    check_close(split.prediction.batch_seconds, 51e-3);
    let alone = planner.evaluate(&Assignment::split(&cluster, 4, &[(Some(1), 0)]).unwrap()).unwrap();
    check_close(alone.prediction.batch_seconds, 44e-3);
    assert_eq!(layers(&planner.plan().unwrap()), [(0, 0, 4)]);
}

#[test]
fn chunks_of_a_prompt_follow_one_another_through_the_stages() {
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(2));
    let others = vec![node("b", layers_of_memory(2))];
    let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(4));
    let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap();
    let plan = planner.evaluate(&Assignment::split(&cluster, 4, &[(Some(1), 2)]).unwrap()).unwrap();
    // A chunk of 100 rows takes 50 ms in a layer and 100 ms on the link, so one arrives every 101 ms: both stages
    // compute for that long with their step. The last chunk passes through everything, the head and one row included.
    let pass = 0.1 + 1e-3 + 3e-3 + 0.101 + 0.1 + 1e-3 + 2e-3;
    let period = f64::max(0.101, (0.101 + 0.101 + 0.101 + 1e-3) / 2.0);
    check_close(plan.prediction.prompt_seconds, 2.0 * period + pass);
}

#[test]
fn a_node_that_makes_it_slower_is_left_out_and_the_comparison_says_so() {
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(4));
    let slow = NodeFacts { read_bytes_per_s: 1e9, ..node("slow", layers_of_memory(4)) };
    let small = node("small", layers_of_memory(1) - 1);
    let (cluster, model) = (Cluster::new(coordinator, vec![slow, small], Links::new(LINK)).unwrap(), model(4));
    let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap();
    let plan = planner.plan().unwrap();
    assert_eq!(layers(&plan), [(0, 0, 4)]);
    let comparison = planner.compare(&plan);
    check_close(comparison[0].with.unwrap(), 1.0 / 44e-3);
    check_close(comparison[0].without.unwrap(), 1.0 / (4e-3 + 2e-3 + 401e-3 + 2e-3));
    check_close(comparison[1].with.unwrap(), 1.0 / (34e-3 + 2e-3 + 101e-3 + 2e-3));
    check_close(comparison[1].without.unwrap(), 1.0 / 44e-3);
    assert_eq!(comparison[1].not_used, Some(NotUsed::Slower));
    assert_eq!(comparison[2].with, None);
    let needed = 101_000_000;
    assert_eq!(comparison[2].not_used, Some(NotUsed::NoRoom { needed, free: needed - 1 }));
}

#[test]
fn equal_nodes_share_the_layers_evenly_and_the_first_ones_come_first() {
    let coordinator = node("a", HEAD_MEMORY);
    let others = (0..3).map(|index| node(&format!("n{index}"), layers_of_memory(4))).collect();
    let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(6));
    let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap();
    assert_eq!(layers(&planner.plan().unwrap()), [(1, 0, 3), (2, 3, 6)]);
}

#[test]
fn without_room_the_error_says_what_is_missing() {
    let small = node("a", HEAD_MEMORY - 1);
    let (others, model) = (vec![node("b", layers_of_memory(3))], model(8));
    let cluster = Cluster::new(small, others.clone(), Links::new(LINK)).unwrap();
    let error = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).err();
    assert_eq!(error, Some(PlanError::CoordinatorTooSmall { needed: HEAD_MEMORY, free: HEAD_MEMORY - 1 }));
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(2) + 7);
    let cluster = Cluster::new(coordinator, others, Links::new(LINK)).unwrap();
    let error = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap().plan().unwrap_err();
    let needed = PlanError::NoRoom {
        missing: 3 * 101_000_000,
        weights: 800_000_000,
        kv: 8_000_000,
        free: 5 * 101_000_000 + 7,
        nodes: 2,
    };
    assert_eq!(error, needed);
    assert_eq!(
        error.to_string(),
        "no plan fits: 289.0 MiB are missing. The layers need 762.9 MiB of weights and 7.6 MiB of keys and values; \
         481.6 MiB are free on 2 nodes"
    );
}

#[test]
fn a_split_is_checked_like_any_plan() {
    let coordinator = node("a", HEAD_MEMORY + layers_of_memory(3));
    let others = vec![node("b", layers_of_memory(2)), node("c", layers_of_memory(4))];
    let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(6));
    let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap();
    let split = |counts: &[usize; 2]| Assignment::split(&cluster, 6, &[(Some(1), counts[0]), (Some(2), counts[1])]);
    let plan = planner.evaluate(&split(&[2, 1]).unwrap()).unwrap();
    assert_eq!(layers(&plan), [(0, 0, 3), (1, 3, 5), (2, 5, 6)]);
    assert_eq!(layers(&planner.evaluate(&split(&[2, 4]).unwrap()).unwrap()), [(1, 0, 2), (2, 2, 6)]);
    assert_eq!(split(&[6, 1]), Err(AssignmentError::SplitSum { sum: 7, model: 6 }));
    assert_eq!(split(&[usize::MAX, 2]), Err(AssignmentError::SplitSum { sum: usize::MAX, model: 6 }));
    let too_large = planner.evaluate(&split(&[3, 0]).unwrap()).unwrap_err();
    let (layers, needed, free) = (range(3, 6).unwrap(), 303_000_000, 202_000_000);
    assert_eq!(too_large, PlanError::StageTooLarge { node: "b".to_owned(), layers, needed, free });
    // The best plan without c does not fit either; with more than was asked for of b it would not.
    let comparison = planner.compare(&plan);
    assert_eq!(comparison[2].without, None);
    assert!(comparison[1].without.unwrap() > comparison[1].with.unwrap());
}

#[test]
fn the_layers_of_a_missing_peer_go_to_a_spare_or_to_a_neighbour() {
    let others = ["b", "c", "d", "e"].map(|name| node(name, layers_of_memory(6)));
    let cluster = Cluster::new(node("a", layers_of_memory(6)), others.to_vec(), Links::new(LINK)).unwrap();
    let check = |peers: &[(Option<usize>, usize)], expected: &[(usize, usize, usize)]| {
        let split = Assignment::split(&cluster, 6, peers).unwrap();
        let found: Vec<_> = split.stages().iter().map(|(node, range)| (*node, range.start(), range.end())).collect();
        assert_eq!(found, expected, "{peers:?}");
    };
    check(&[(Some(1), 3), (Some(2), 2), (Some(3), 1), (Some(4), 0)], &[(1, 0, 3), (2, 3, 5), (3, 5, 6)]);
    check(&[(Some(1), 3), (None, 2), (Some(3), 1), (Some(4), 0)], &[(1, 0, 3), (4, 3, 5), (3, 5, 6)]);
    check(&[(Some(1), 3), (None, 2), (Some(3), 1), (None, 0)], &[(1, 0, 5), (3, 5, 6)]);
    check(&[(None, 3), (Some(2), 2), (Some(3), 1)], &[(2, 0, 5), (3, 5, 6)]);
    check(&[(None, 1), (Some(2), 2), (Some(3), 1)], &[(0, 0, 3), (2, 3, 5), (3, 5, 6)]);
    check(&[(Some(1), 3), (Some(2), 2), (None, 1)], &[(1, 0, 3), (2, 3, 6)]);
    check(&[(None, 3), (None, 3), (None, 0)], &[(0, 0, 6)]);
}

#[test]
fn a_plan_says_whether_bits_are_the_same_everywhere() {
    let check = |levels: [Level; 3], own: u64, expected: Bits| {
        let with = |name, memory, level| NodeFacts { level, ..node(name, memory) };
        let coordinator = with("a", HEAD_MEMORY + layers_of_memory(own), levels[0]);
        let others = vec![with("b", layers_of_memory(4), levels[1]), with("c", layers_of_memory(1), levels[2])];
        let (cluster, model) = (Cluster::new(coordinator, others, Links::new(LINK)).unwrap(), model(4));
        let planner = Planner::new(&cluster, &model, WORKLOAD, Optimise::Latency).unwrap();
        assert_eq!(planner.plan().unwrap().bits, expected);
    };
    check([Level::Avx2; 3], 2, Bits::Same(Level::Avx2));
    check([Level::Avx2, Level::Avx2, Level::Amx], 2, Bits::SameWhileUsed(Level::Avx2));
    check([Level::Avx2, Level::Amx, Level::Amx], 2, Bits::Unlike { lowest: Level::Avx2, highest: Level::Amx });
    check([Level::Avx2, Level::Amx, Level::Amx], 4, Bits::SameWhileUsed(Level::Avx2));
}

#[test]
fn facts_that_no_machine_has_are_refused() {
    let check = |coordinator: NodeFacts, link: Link| {
        let cluster = Cluster::new(coordinator, vec![node("b", 1)], Links::new(link));
        assert!(matches!(cluster, Err(PlanError::Facts { .. })), "{cluster:?}");
    };
    for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        check(NodeFacts { read_bytes_per_s: wrong, ..node("a", 1) }, LINK);
        check(NodeFacts { multiply_adds_per_s: wrong, ..node("a", 1) }, LINK);
        check(node("a", 1), Link { bytes_per_s: wrong, ..LINK });
    }
    check(NodeFacts { step_seconds: -1e-3, ..node("a", 1) }, LINK);
    check(node("a", 1), Link { round_trip_seconds: f64::NAN, ..LINK });
}

#[test]
fn a_model_larger_than_any_number_has_no_room() {
    let mut model = model(3);
    model.layers[1].weight_bytes = u64::MAX;
    model.layers[2].kv_bytes = u64::MAX;
    let cluster = Cluster::new(node("a", u64::MAX), vec![node("b", u64::MAX)], Links::new(LINK)).unwrap();
    let workload = Workload { kv_tokens: u64::MAX, positions: u64::MAX, ..WORKLOAD };
    let planner = Planner::new(&cluster, &model, workload, Optimise::Latency).unwrap();
    assert!(matches!(planner.plan(), Err(PlanError::NoRoom { missing: u64::MAX, .. })));
}

/// A small problem that random facts make: with links that differ, nodes without room, and layers that differ.
#[derive(Clone, Debug)]
struct Instance {
    cluster: Cluster,
    model: ModelFacts,
    workload: Workload,
}

impl Instance {
    fn planner(&self, optimise: Optimise) -> Option<Planner<'_>> {
        Planner::new(&self.cluster, &self.model, self.workload, optimise).ok()
    }
}

fn node_strategy() -> impl Strategy<Value = NodeFacts> {
    (0..8u64, 1..20u32, 1..20u32, 0..4u32).prop_map(|(layers, read, compute, step)| NodeFacts {
        read_bytes_per_s: f64::from(read) * 1e9,
        multiply_adds_per_s: f64::from(compute) * 5e9,
        step_seconds: f64::from(step) * 1e-3,
        ..node("n", layers_of_memory(layers))
    })
}

fn links_strategy(nodes: usize) -> impl Strategy<Value = Links> {
    let link = (0..20u32, 1..20u32).prop_map(|(trip, rate)| Link {
        round_trip_seconds: f64::from(trip) * 1e-3,
        bytes_per_s: f64::from(rate) * 1e6,
    });
    proptest::collection::vec(link, nodes * (nodes + 1) / 2).prop_map(move |all| {
        let mut links = Links::new(LINK);
        let pairs = (0..=nodes).flat_map(|a| (0..a).map(move |b| (a, b)));
        pairs.zip(all).for_each(|((a, b), link)| links.set(a, b, link));
        links
    })
}

fn instance_strategy(nodes: std::ops::Range<usize>, layers: std::ops::Range<usize>) -> impl Strategy<Value = Instance> {
    let layer = (1..6u64, 1..4u64, 0..3u64).prop_map(|(size, compute, kv)| LayerFacts {
        weight_bytes: size * 40_000_000,
        token_bytes: size * 20_000_000,
        kv_bytes: kv * 10_000,
        multiply_adds: compute * 100_000_000,
    });
    let layers = proptest::collection::vec(layer, layers);
    (nodes, layers, 1..6usize, 0..1000u64).prop_flat_map(|(count, layers, batch, positions)| {
        let nodes = proptest::collection::vec(node_strategy(), count + 1);
        (nodes, links_strategy(count), Just((layers, batch, positions))).prop_map(
            |(mut nodes, links, (layers, batch, positions))| {
                nodes[0].memory_free += HEAD_MEMORY;
                let coordinator = nodes.remove(0);
                Instance {
                    cluster: Cluster::new(coordinator, nodes, links).unwrap(),
                    model: ModelFacts { layers, ..model(1) },
                    workload: Workload { batch, positions, ..WORKLOAD },
                }
            },
        )
    })
}

fn optimise_strategy() -> impl Strategy<Value = Optimise> {
    prop_oneof![Just(Optimise::Latency), Just(Optimise::Throughput)]
}

/// The least cost of all assignments that have room and fulfil the constraint.
fn brute_force(problem: &Problem, constraint: Constraint) -> Option<u64> {
    let mut best = None;
    let mut stages = Vec::new();
    let own = if constraint.allows(COORDINATOR) { problem.layers() } else { 0 };
    for end in 0..=own {
        stages.clear();
        stages.extend(range(0, end).map(|layers| (COORDINATOR, layers)));
        if problem.room.fits(COORDINATOR, 0, end) {
            try_all(problem, constraint, end, &mut stages, &mut best);
        }
    }
    best
}

fn try_all(
    problem: &Problem,
    constraint: Constraint,
    start: usize,
    stages: &mut Vec<(usize, types::LayerRange)>,
    best: &mut Option<u64>,
) {
    let nodes = problem.cluster.nodes().len();
    if start == problem.layers() {
        let used = |node: usize| stages.iter().any(|(other, _)| *other == node);
        if (0..nodes).all(|node| used(node) || !constraint.requires(node)) {
            let assignment = Assignment::new(problem.cluster, start, stages.clone()).unwrap();
            let cost = problem.cost(&assignment);
            *best = Some(best.map_or(cost, |best| best.min(cost)));
        }
        return;
    }
    for node in 1..nodes {
        if stages.iter().any(|(other, _)| *other == node) || !constraint.allows(node) {
            continue;
        }
        for end in start + 1..=problem.layers() {
            if problem.room.fits(node, start, end) {
                stages.extend(range(start, end).map(|layers| (node, layers)));
                try_all(problem, constraint, end, stages, best);
                stages.pop();
            }
        }
    }
}

fn check_found(problem: &Problem, found: &Option<Found>) {
    if let Some(Found { cost, assignment }) = found {
        let stages = assignment.stages().to_vec();
        assert_eq!(Assignment::new(problem.cluster, problem.layers(), stages).as_ref(), Ok(assignment));
        assert_eq!(problem.cost(assignment), *cost);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_plan_is_better_than_the_one_that_is_found(
        instance in instance_strategy(0..4, 1..7), optimise in optimise_strategy(), node in 0..4usize,
    ) {
        let Some(planner) = instance.planner(optimise) else { return Ok(()) };
        let problem = &planner.problem;
        let node = node % instance.cluster.nodes().len();
        for constraint in [Constraint::None, Constraint::With(node), Constraint::Without(node)] {
            let found = problem.best(constraint);
            check_found(problem, &found);
            prop_assert_eq!(found.map(|found| found.cost), brute_force(problem, constraint), "{:?}", constraint);
        }
    }

    #[test]
    fn a_plan_covers_all_layers_within_the_memory_of_each_node(
        instance in instance_strategy(0..6, 1..30), optimise in optimise_strategy(),
    ) {
        let Some(planner) = instance.planner(optimise) else { return Ok(()) };
        let plan = match planner.plan() {
            Ok(plan) => plan,
            Err(PlanError::NoRoom { missing, .. }) => {
                prop_assert!(missing > 0);
                return Ok(());
            }
            Err(error) => panic!("{error}"),
        };
        let stages = plan.assignment.stages().to_vec();
        prop_assert!(Assignment::new(&instance.cluster, instance.model.layers.len(), stages).is_ok());
        for memory in &plan.memory {
            prop_assert!(memory.total() <= memory.free, "{:?}", memory);
        }
        prop_assert_eq!(planner.evaluate(&plan.assignment), Ok(plan.clone()));
        prop_assert_eq!(planner.plan(), Ok(plan));
    }

    #[test]
    fn another_node_or_more_bandwidth_never_makes_the_plan_slower(
        instance in instance_strategy(1..5, 1..12), optimise in optimise_strategy(), node in 0..5usize,
    ) {
        let cost = |instance: &Instance| {
            let planner = instance.planner(optimise)?;
            planner.problem.best(Constraint::None).map(|found| found.cost)
        };
        let Some(all) = cost(&instance) else { return Ok(()) };
        let nodes = instance.cluster.nodes();
        let others = nodes[1..nodes.len() - 1].to_vec();
        let links = instance.cluster.links().clone();
        let fewer = Cluster::new(nodes[0].clone(), others, links.clone()).unwrap();
        if let Some(fewer) = cost(&Instance { cluster: fewer, ..instance.clone() }) {
            prop_assert!(all <= fewer, "{} with all nodes, {} with fewer", all, fewer);
        }
        let mut faster = nodes.to_vec();
        faster[node % nodes.len()].read_bytes_per_s *= 1.5;
        let coordinator = faster.remove(0);
        let faster = Cluster::new(coordinator, faster, links).unwrap();
        let faster = cost(&Instance { cluster: faster, ..instance.clone() });
        prop_assert!(faster.unwrap() <= all);
    }
}

/// The ratio of the local search's cost to the exact one, for clusters of six nodes of which it searches three exactly.
#[test]
fn the_local_search_comes_close_to_the_exact_one() {
    let mut runner = TestRunner::deterministic();
    let strategy = (instance_strategy(6..7, 4..14), optimise_strategy());
    let mut ratios = Vec::new();
    for _ in 0..150 {
        let (instance, optimise) = strategy.new_tree(&mut runner).unwrap().current();
        let Some(planner) = instance.planner(optimise) else { continue };
        let problem = &planner.problem;
        let (exact, found) = (problem.best(Constraint::None), orders::best_with(problem, Constraint::None, 3));
        check_found(problem, &found);
        if let (Some(exact), Some(found)) = (exact, found) {
            ratios.push(found.cost as f64 / exact.cost as f64);
        }
    }
    ratios.sort_by(f64::total_cmp);
    assert!(ratios.len() > 50, "{}", ratios.len());
    assert!(ratios[0] >= 1.0, "{ratios:?}");
    assert!(ratios[ratios.len() * 3 / 4] < 1.001 && ratios[ratios.len() - 1] < 1.5, "{ratios:?}");
}
