//! Peers with less room than a client has requests: some wait, and none is disturbed.

use blocks::block::BlockLimits;
use engine::Request;

use crate::loss::{Swarm, TOKENS, run};
use crate::models::qwen3_prompts;
use crate::network::Fault;

const REQUESTS: usize = 8;

fn swarm(sessions_per_client_max: usize) -> Swarm {
    Swarm::with_limits(BlockLimits { sessions_per_client_max, ..BlockLimits::default() })
}

fn prompts() -> Vec<Vec<types::TokenId>> {
    qwen3_prompts().into_iter().cycle().take(REQUESTS).collect()
}

fn requests() -> Vec<Request> {
    prompts().into_iter().map(|prompt| Request::greedy(prompt, TOKENS)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_until_peers_have_room() {
    // Each layer is served three times: six sessions at most.
    let swarm = swarm(2);
    let expected = swarm.expected(&prompts());
    let mut engine = swarm.engine(0);
    let mut running_max = 0;
    let found = tokio::task::block_in_place(|| {
        run(&mut engine, requests(), |_, engine| running_max = running_max.max(engine.stats().running))
    });
    assert_eq!(found, expected);
    assert!((2..=6).contains(&running_max), "{running_max}");
    let stats = engine.stats();
    assert_eq!((stats.replays, stats.preemptions), (0, 0), "nobody was disturbed");
    drop(engine);
    swarm.check_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_when_a_lost_peer_leaves_too_little_room() {
    let swarm = swarm(3);
    let expected = swarm.expected(&prompts());
    let mut engine = swarm.engine(0);
    let client = engine.executor().client();
    let mut lost = None;
    let found = tokio::task::block_in_place(|| {
        run(&mut engine, requests(), |_, engine| {
            if lost.is_none() && engine.stats().running == REQUESTS {
                // Those that serve the last layer beside it have room for fewer sessions.
                let peers: Vec<_> = client.last_chain().iter().rev().take(1).map(|span| span.peer).collect();
                peers.iter().for_each(|peer| swarm.network.fail(*peer, Fault::Cut));
                lost = Some(peers);
            }
        })
    });
    assert_eq!(found, expected);
    assert!(lost.is_some());
    let stats = engine.stats();
    assert_eq!(stats.replays, 0, "requests that have room go on");
    assert!(stats.preemptions >= 1, "{stats:?}");
}
