//! A chain over a range of layers, one of whose stages is shared by two ranks: the states of one process, within the tolerance
//! of tensor parallelism.

use cluster::coordinator::Arithmetic;
use engine::{Executor, ExecutorError, Health};
use kernels::cpu::Level;
use std::time::Duration;

use crate::rank;
use testing::cluster_chain::setup::{TestNode, chain_for, cluster_model, oracle_model};
use testing::cluster_chain::states::{Activations, range, stage, states, try_step};

/// How far states may differ from those of one process, beside the largest of them: partial sums are rounded.
const APART_MAX: f32 = 1e-4;

pub fn middle_layers() {
    let level = Level::detect();
    let (shared, plain) = (TestNode::start(2, level), TestNode::start(1, level));
    let layers = range(1, 4);
    for name in ["llama", "qwen3_moe", "gemma3"] {
        let model = oracle_model(name);
        let activations = Activations::before(&model, layers);
        let expected = states(&mut stage(&model, layers), &activations);
        let largest = expected.iter().flatten().fold(0.0_f32, |most, value| most.max(value.abs()));
        for nodes in [[&shared, &plain], [&plain, &shared]] {
            let part = cluster_model(&model, Some(layers), level);
            let mut chain = chain_for(part, &nodes, Some(&[1, 1]), Arithmetic::Best);
            let found = states(&mut chain, &activations);
            let pairs = found.iter().flatten().zip(expected.iter().flatten());
            let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert_eq!(found.concat().len(), expected.concat().len());
            assert!(apart <= APART_MAX * largest, "{name}: {apart} beside {largest}");
            assert!(states(&mut chain, &activations) == found, "{name} again");

            rank::kill(rank::pids()[1]);
            let lost = loop {
                if let Err(error) = try_step(&mut chain, &activations) {
                    break error;
                }
            };
            assert!(matches!(lost, ExecutorError::Lost { .. }), "{lost}");
            while chain.poll_health(Duration::from_millis(10)) != Health::Ready {}
            assert!(states(&mut chain, &activations) == found, "{name} after a rank was lost");
        }
    }
}
