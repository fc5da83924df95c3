//! Ranks are killed: the group replaces them, the chain is formed again with the same node, and answers stay the same.

use std::time::Duration;

use cluster::coordinator::Arithmetic;
use engine::{Capacity, Executor, ExecutorError, Health, OpenedSession, Prefix, StepOutput, StepPlan};
use kernels::cpu::Level;
use types::SessionId;

use crate::rank;
use testing::cluster_chain::answers::{answers, options, requests};
use testing::cluster_chain::setup::{NodeChain, TestNode, chain, oracle_model, wait_for};

/// A chain of which a rank is killed before a step.
struct Killing {
    chain: NodeChain,
    rank: usize,
    /// The steps before it.
    left: usize,
}

impl Executor for Killing {
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
        if self.left == 0 {
            rank::kill(rank::pids()[self.rank]);
        }
        self.left = self.left.checked_sub(1).unwrap_or(usize::MAX);
        self.chain.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.chain.collect(output)
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.chain.poll_health(wait)
    }
}

pub fn at_work() {
    let (level, model) = (Level::detect(), oracle_model("qwen3"));
    let node = TestNode::start(2, level);
    let mut chain = chain(&model, &[&node], Some(&[1]), level, Arithmetic::Best);
    let expected;
    (expected, chain) = answers(chain, requests(&model), options(32));
    // In the middle of prompts, and of answers.
    for (rank, left) in [(0, 0), (1, 2), (0, 12), (1, 17)] {
        let (before, chains) = (rank::pids(), chain.builder().report().chains);
        assert_eq!(before.len(), 2);
        let (found, killing) = answers(Killing { chain, rank, left }, requests(&model), options(32));
        chain = killing.chain;
        assert!(found == expected, "rank {rank} after {left} steps");
        let (after, report) = (rank::pids(), chain.builder().report());
        assert!(after.len() == 2 && after[rank] != before[rank], "{before:?}, then {after:?}");
        assert_eq!(after[1 - rank], before[1 - rank], "the other rank keeps its weights");
        assert!(report.chains > chains && report.stages.len() == 2, "{report:?}");
    }
}

pub fn idle() {
    let (level, model) = (Level::detect(), oracle_model("qwen3"));
    let node = TestNode::start(2, level);
    let chain = chain(&model, &[&node], Some(&[1]), level, Arithmetic::Best);
    let (expected, mut chain) = answers(chain, requests(&model), options(32));
    rank::kill(rank::pids()[1]);
    while chain.poll_health(Duration::from_millis(10)) == Health::Ready {}
    while chain.poll_health(Duration::from_millis(10)) != Health::Ready {}
    wait_for(&chain, |report| report.chains == 2 && report.stages.len() == 2);
    assert!(answers(chain, requests(&model), options(32)).0 == expected);
}
