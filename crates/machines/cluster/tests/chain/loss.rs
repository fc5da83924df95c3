//! Stages are lost in the middle of answers: a new chain is formed, and the answers stay the same.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use engine::{Capacity, Executor, ExecutorError, Health, OpenedSession, Prefix, StepOutput, StepPlan};
use types::SessionId;

use crate::loopback::{TestChain, chain, oracle_models, whole};
use testing::cluster_chain::answers::{answers, options, requests};

/// A chain in which a connection is closed when a number of steps have been submitted.
struct Breaking {
    chain: TestChain,
    connections: Arc<std::sync::Mutex<Vec<net::MessageSender>>>,
    /// Which connection is closed before which step.
    breaks: Vec<(usize, usize)>,
    steps: usize,
}

impl Executor for Breaking {
    fn depth(&self) -> usize {
        self.chain.depth()
    }

    fn capacity(&self) -> Capacity {
        self.chain.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.chain.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.chain.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.chain.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.steps += 1;
        if let Some(index) = self.breaks.iter().position(|(step, _)| *step == self.steps) {
            let (_, connection) = self.breaks.swap_remove(index);
            let mut connections = self.connections.lock().unwrap();
            let count = connections.len();
            connections[connection % count].close();
            connections.clear();
        }
        self.chain.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.chain.collect(output)
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.chain.poll_health(wait)
    }
}

#[test]
fn answers_survive_the_loss_of_any_stage_at_any_step() {
    let model = oracle_models().remove(0);
    let (expected, _) = answers(whole(&model), requests(&model), options(32));
    for connection in 0..6 {
        for step in [1, 2, 5, 9] {
            // After the loss, fewer stages have other layers.
            let chain = chain(&model, &[&[1, 1, 1, 1], &[2, 1, 1], &[0, 4]]);
            let connections = Arc::clone(&chain.builder().connections);
            let formed = Arc::clone(&chain.builder().formed);
            let breaks = vec![(step, connection), (step + 12, connection + 1)];
            let breaking = Breaking { chain, connections, breaks, steps: 0 };
            let (found, _) = answers(breaking, requests(&model), options(32));
            assert!(found == expected, "connection {connection}, step {step}");
            assert_eq!(formed.load(Ordering::Relaxed), 3, "connection {connection}, step {step}");
        }
    }
}
