//! Nodes that were lost come back: a split that was asked for is kept again.

use std::time::{Duration, Instant};

use engine::{Executor as _, Health};
use tempfile::TempDir;
use testing::cluster_chain::DEADLINE;
use testing::cluster_chain::answers::{answers, options, requests};

use crate::loopback::{oracle_models, whole};
use crate::nodes::{NodeChain, TestNode, chain, coordinator, key, used};

/// Does what an engine without requests does, until the chain has these stages.
fn wait_until(chain: &mut NodeChain, holds: impl Fn(&NodeChain) -> bool) {
    let end = Instant::now() + DEADLINE;
    while chain.poll_health(Duration::from_millis(10)) != Health::Ready || !holds(chain) {
        assert!(Instant::now() < end, "{:?}", chain.builder().report());
    }
}

#[test]
fn a_split_is_kept_again_after_all_of_its_nodes_were_lost_and_came_back() {
    let model = oracle_models().remove(0);
    let (expected, _) = answers(whole(&model), requests(&model), options(32));
    let stores = [(); 2].map(|()| TempDir::new().unwrap());
    let mut nodes: Vec<_> =
        stores.iter().map(|store| TestNode::start("node", key("one"), store.path(), None)).collect();
    let peers: Vec<_> = nodes.iter().map(|node| node.address).collect();
    let mut chain = chain(coordinator(&model, key("one"), &peers, Some(&[1, 1]), u64::MAX >> 1));
    assert_eq!(used(&chain), peers);
    nodes.iter_mut().for_each(TestNode::stop);
    // The coordinator has all layers itself.
    wait_until(&mut chain, |chain| used(chain).is_empty());
    let (alone, mut chain) = answers(chain, requests(&model), options(32));
    assert!(alone == expected);
    let _back: Vec<_> = peers
        .iter()
        .zip(&stores)
        .map(|(&address, store)| TestNode::start_at(address, "node", key("one"), store.path(), None, 1e9))
        .collect();
    wait_until(&mut chain, |chain| used(chain) == peers);
    let (again, chain) = answers(chain, requests(&model), options(32));
    assert!(again == expected);
    assert_eq!(used(&chain), peers);
}
