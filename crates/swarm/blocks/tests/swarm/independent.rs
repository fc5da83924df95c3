//! Sessions on different peers do not wait for each other.

use std::sync::Arc;

use blocks::block::BlockLimits;
use blocks::client::ClientOptions;
use engine::{Executor, ExecutorError, Phase, Prefix, RequestedOutput, SamplingParams, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use types::TokenId;

use crate::gated::{Gate, GatedStage};
use crate::models::{Model, peer, range};
use crate::network::Network;

/// More steps than the test has.
const ALL: usize = 1000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_does_not_wait_for_another_one_on_other_peers() {
    let (model, network) = (Model::qwen3(), Network::new(false));
    let all = range(0, 4);
    let limits = BlockLimits { sessions_per_client_max: 1, ..BlockLimits::default() };
    let gates = [Arc::new(Gate::default()), Arc::new(Gate::default())];
    // The first session is at the fast peer, which has no room for the second one.
    for (number, gate, seconds) in [(1, &gates[0], 1e-5), (2, &gates[1], 1e-3)] {
        let stage = GatedStage { stage: model.stage(all), gate: Arc::clone(gate) };
        network.add(peer(number), model.digest, all, model.block_of(all, Box::new(stage), limits), seconds);
    }
    let mut executor = model.client(&network, ClientOptions::default());
    let begin = |executor: &mut blocks::client::SwarmExecutor<CpuBackend>| loop {
        match executor.open(8, Prefix::NONE) {
            Ok(opened) => return opened.session,
            Err(ExecutorError::Opening) => {}
            Err(error) => panic!("{error}"),
        }
    };
    tokio::task::block_in_place(|| {
        let sessions = [begin(&mut executor), begin(&mut executor)];
        let submit = |executor: &mut blocks::client::SwarmExecutor<CpuBackend>, session| {
            let mut plan = StepPlan::new();
            let sample = RequestedOutput::sample(2, SamplingParams::default());
            plan.push(session, Phase::Prefill, 0, &[TokenId(1), TokenId(2)], sample);
            executor.submit(&plan).unwrap();
        };
        sessions.into_iter().for_each(|session| submit(&mut executor, session));
        gates[1].allow(ALL);
        let mut output = StepOutput::new();
        executor.collect(&mut output).unwrap();
        assert_eq!((output.samples[0].session, output.overtaken), (sessions[1], 1));
        gates[0].allow(ALL);
        executor.collect(&mut output).unwrap();
        assert_eq!((output.samples[0].session, output.overtaken), (sessions[0], 0));
        assert!(matches!(executor.collect(&mut output), Err(ExecutorError::NoStepInFlight)));
    });
}
