//! Machines whose CPUs have different instructions: without `--exact` they work together; with it, they compute the bits of one
//! process with the lowest level, and the level stays the same for as long as the coordinator runs.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::path::{Path, PathBuf};

use cluster::coordinator::Arithmetic;
use engine::Executor;
use kernels::cpu::Level;

use testing::cluster_chain::answers::{Answer, answers, options, requests};
use testing::cluster_chain::setup::{NodeChain, TestNode, chain, oracle_model, wait_for, whole_at};
use testing::{needs, oracle};

/// Formats whose arithmetic depends on the level.
fn models() -> Vec<PathBuf> {
    ["llama/model-f32", "llama/model-bf16-sharded", "llama/gguf/tiny-llama-q8_0.gguf"].map(oracle).to_vec()
}

fn all<E: Executor>(executor: E, model: &Path) -> (Vec<Answer>, E) {
    answers(executor, requests(model), options(48))
}

/// The lowest and the best level of this CPU, if it has two.
fn two_levels() -> Option<(Level, Level)> {
    let best = Level::detect();
    needs::level(Level::Avx2, best).then_some((Level::Scalar, best))
}

fn stages(chain: &NodeChain) -> usize {
    chain.builder().report().stages.len()
}

#[test]
fn exact_chains_of_unlike_machines_have_the_bits_of_one_process_with_the_lowest_level() {
    for model in models() {
        for lowest in needs::levels(Level::ALL, Level::detect()) {
            let expected = all(whole_at(&model, lowest), &model).0;
            // The lowest level is that of a node, or the coordinator's.
            for own in [lowest, Level::detect()] {
                let nodes = [Level::detect(), lowest].map(|level| TestNode::start(1, level));
                let chain = chain(&model, &nodes.each_ref(), Some(&[1, 1]), own, Arithmetic::Common);
                let report = chain.builder().report();
                assert_eq!((report.stages.len(), report.exact), (3, Some(lowest)));
                assert!(all(chain, &model).0 == expected, "{} with {lowest}, {own}", model.display());
            }
        }
    }
}

#[test]
fn unlike_machines_work_together_without_exact() {
    let Some((lowest, best)) = two_levels() else { return };
    for model in models() {
        for (own, other) in [(lowest, best), (best, lowest)] {
            let node = TestNode::start(1, other);
            let chain = chain(&model, &[&node], Some(&[2]), own, Arithmetic::Best);
            assert_eq!((stages(&chain), chain.builder().report().exact), (2, None));
            let expected: Vec<_> = requests(&model).iter().map(|request| request.tokens_max).collect();
            let found = all(chain, &model).0;
            assert_eq!(found.iter().map(|(tokens, ..)| tokens.len()).collect::<Vec<_>>(), expected);
        }
    }
}

#[test]
fn a_machine_without_the_exact_level_is_not_used_and_the_report_says_why() {
    let Some((lowest, best)) = two_levels() else { return };
    let model = oracle_model("llama");
    let node = TestNode::start(1, lowest);
    let chain = chain(&model, &[&node], None, best, Arithmetic::Exact(best));
    let report = wait_for(&chain, |report| report.nodes.iter().any(|node| node.not_used.is_some()));
    let why = report.nodes[0].not_used.as_ref().unwrap();
    assert!(why.contains(&format!("exactly with {best}")), "{why}");
    assert_eq!(report.stages.iter().filter(|(address, _)| address.is_some()).count(), 0, "{report:?}");
    assert!(all(chain, &model).0 == all(whole_at(&model, best), &model).0);
}

#[test]
fn the_level_of_the_first_chain_stays_when_others_come_and_go() {
    let Some((lowest, best)) = two_levels() else { return };
    let model = oracle_model("llama");
    let expected = all(whole_at(&model, best), &model).0;
    let mut first = TestNode::start(1, best);
    let chain = chain(&model, &[&first], Some(&[2]), best, Arithmetic::Common);
    let (found, chain) = all(chain, &model);
    assert!(found == expected);
    let (later, better) = (TestNode::start(1, lowest), TestNode::start(1, best));
    for node in [&later, &better] {
        assert!(chain.builder().finder().found(node.address));
    }
    wait_for(&chain, |report| report.nodes.iter().any(|node| node.not_used.is_some()));
    first.stop();
    let (found, chain) = all(chain, &model);
    assert!(found == expected);
    let report = chain.builder().report();
    assert_eq!(report.exact, Some(best));
    assert!(!report.stages.iter().any(|(address, _)| *address == Some(later.address)), "{report:?}");
}
