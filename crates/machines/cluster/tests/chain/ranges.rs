//! Chains over a range of layers, between activations and states: the bits of one stage, also when a node is lost or replaced.

use std::time::{Duration, Instant};

use engine::{Executor, ExecutorError, Health, Phase, Prefix, RequestedOutput, StepOutput, StepPlan};
use model::{Checkpoint, ModelPart};
use tempfile::TempDir;
use types::{LayerRange, TokenId};

use crate::loopback::oracle_models;
use crate::nodes::{NodeChain, TestNode, chain, coordinator_for, key, memory_for, used, wait_until_used};
use testing::cluster_chain::DEADLINE;
use testing::cluster_chain::states::{Activations, range, stage, states, try_step};

const MEMORY: u64 = u64::MAX >> 1;

fn bits(states: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    states.iter().map(|rows| rows.iter().map(|value| value.to_bits()).collect()).collect()
}

fn check(chain: &mut NodeChain, activations: &Activations, expected: &[Vec<u32>]) {
    assert!(bits(states(chain, activations)) == expected, "{:?}", chain.builder().report().stages);
}

/// What goes into these layers, and the bits of what one stage gives.
fn expected(model: &std::path::Path, layers: LayerRange) -> (Activations, Vec<Vec<u32>>) {
    let activations = Activations::before(model, layers);
    let expected = bits(states(&mut stage(model, layers), &activations));
    (activations, expected)
}

#[test]
fn a_chain_over_a_range_gives_the_states_of_one_stage() {
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let nodes: Vec<_> = stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    for model in oracle_models() {
        let count = Checkpoint::open(&model).unwrap().description().layers.len();
        // The first layers, those in the middle, the last ones.
        for (start, end) in [(0, count - 1), (1, count - 1), (1, count)] {
            let layers = range(start, end);
            let (activations, expected) = expected(&model, layers);
            for own in [0, 1, layers.count()].into_iter().filter(|own| *own <= layers.count()) {
                let of_nodes = layers.count() - own;
                let split = [of_nodes.min(1), of_nodes.saturating_sub(1)];
                let part = (Checkpoint::open(&model).unwrap(), Some(layers));
                let mut chain = chain(coordinator_for(part, key("one"), &peers, Some(&split), MEMORY));
                check(&mut chain, &activations, &expected);

                let report = chain.builder().report();
                let ranges: Vec<_> = report.stages.iter().map(|(_, layers)| *layers).collect();
                assert_eq!((ranges[0].start(), ranges[ranges.len() - 1].end()), (start, end), "{report:?}");
                assert!(ranges.windows(2).all(|pair| pair[0].meets(pair[1])), "{report:?}");
                let planned: Vec<_> = report.plan.unwrap().stages.iter().filter_map(|stage| stage.layers).collect();
                assert_eq!(planned, ranges);
                assert_eq!(chain.depth(), ranges.len());
            }
        }
    }
}

#[test]
fn what_is_not_for_a_range_is_refused_and_the_chain_goes_on() {
    let model = oracle_models().remove(0);
    let layers = range(1, 4);
    let (activations, expected) = expected(&model, layers);
    let store = TempDir::new().unwrap();
    let node = TestNode::start("node", key("one"), store.path(), None);
    let part = (Checkpoint::open(&model).unwrap(), Some(layers));
    let mut chain = chain(coordinator_for(part, key("one"), &[node.address], Some(&[2]), MEMORY));
    let session = chain.open(100, Prefix::NONE).unwrap().session;
    let rows = || activations.plan(0, session, 0, 3);
    let mut tokens = StepPlan::new();
    tokens.push(session, Phase::Prefill, 0, &[TokenId(1)], RequestedOutput::Nothing);
    let mut sampled = StepPlan::new();
    sampled.push_rows(session, Phase::Prefill, 0, 1, RequestedOutput::Logits { rows: 1 });
    sampled.activations_mut().resize(activations.width, 0.5);
    let (mut short, mut infinite, mut part) = (rows(), rows(), rows());
    short.activations_mut().pop();
    infinite.activations_mut()[7] = f32::INFINITY;
    part.set_layers(Some(range(2, 3)));
    let refused = [
        (tokens, "does not have activations"),
        (sampled, "does not return what the head computes"),
        (short, "values were given for 3 rows"),
        (infinite, "does not have finite activations"),
        (part, "always runs all of its layers"),
    ];
    for (plan, why) in refused {
        let error = chain.submit(&plan).expect_err(why).to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // Numbers that nobody's model has, but that are finite, are no fault of a machine.
    let mut huge = rows();
    huge.activations_mut().iter_mut().for_each(|value| *value = f32::MAX.copysign(*value));
    chain.submit(&huge).unwrap();
    chain.collect(&mut StepOutput::new()).unwrap();
    chain.close(session);
    check(&mut chain, &activations, &expected);
    assert_eq!(chain.builder().report().chains, 1);
}

#[test]
fn a_coordinator_needs_only_the_tensors_of_its_range() {
    let model = oracle_models().remove(0);
    let layers = range(1, 3);
    let (activations, expected) = expected(&model, layers);
    let (whole, folder, store) = (Checkpoint::open(&model).unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut manifest, part) = (whole.manifest().unwrap(), ModelPart::stage(layers));
    for index in manifest.tensors_of(part).unwrap() {
        let bytes = whole.tensor_bytes(&manifest.tensors()[index]).unwrap();
        manifest.set_hash(index, blake3::hash(bytes).into());
        std::fs::write(folder.path().join(manifest.tensors()[index].file_name().unwrap()), bytes).unwrap();
    }
    let checkpoint = Checkpoint::from_tensor_folder(&manifest, part, folder.path()).unwrap();
    let node = TestNode::start("node", key("one"), store.path(), None);
    let part = (checkpoint, Some(layers));
    let mut chain = chain(coordinator_for(part, key("one"), &[node.address], Some(&[1]), MEMORY));
    check(&mut chain, &activations, &expected);
}

/// Waits until a chain is formed again.
fn wait_until_ready(chain: &mut NodeChain) {
    let end = Instant::now() + DEADLINE;
    while chain.poll_health(Duration::from_millis(10)) != Health::Ready {
        assert!(Instant::now() < end, "{:?}", chain.builder().report());
    }
}

#[test]
fn a_range_goes_on_on_another_node_when_one_is_lost() {
    let model = oracle_models().remove(0);
    let layers = range(1, 4);
    let (activations, expected) = expected(&model, layers);
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let mut nodes: Vec<_> =
        stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    let checkpoint = Checkpoint::open(&model).unwrap();
    let memory = memory_for(&checkpoint, ModelPart::stage(layers).first(0));
    let mut chain = chain(coordinator_for((checkpoint, Some(layers)), key("one"), &peers, None, memory));
    let before = used(&chain);
    assert_eq!((before.len(), chain.depth()), (1, 1), "the coordinator has no layers");
    check(&mut chain, &activations, &expected);
    nodes.iter_mut().find(|node| node.address == before[0]).unwrap().stop();
    let end = Instant::now() + DEADLINE;
    let lost = loop {
        assert!(Instant::now() < end, "{:?}", chain.builder().report());
        if let Err(error) = try_step(&mut chain, &activations) {
            break error;
        }
    };
    assert!(matches!(lost, ExecutorError::Lost { .. }), "{lost}");
    wait_until_ready(&mut chain);
    check(&mut chain, &activations, &expected);
    let after = used(&chain);
    assert!(after.len() == 1 && after != before, "{before:?}, then {after:?}");
}

#[test]
fn a_faster_node_takes_a_range_over() {
    let model = oracle_models().remove(0);
    let layers = range(2, 4);
    let (activations, expected) = expected(&model, layers);
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let slow = TestNode::start_with("slow", key("one"), stores[0].path(), None, 1e6);
    let checkpoint = Checkpoint::open(&model).unwrap();
    let memory = memory_for(&checkpoint, ModelPart::stage(layers).first(0));
    let part = (checkpoint, Some(layers));
    let mut chain = chain(coordinator_for(part, key("one"), &[slow.address], None, memory));
    check(&mut chain, &activations, &expected);
    let fast = TestNode::start_with("fast", key("one"), stores[1].path(), None, 1e9);
    assert!(chain.builder().finder().found(fast.address));
    let mut chain = wait_until_used(chain, fast.address, |_| {});
    check(&mut chain, &activations, &expected);
    assert_eq!(chain.builder().report().chains, 2);
}
