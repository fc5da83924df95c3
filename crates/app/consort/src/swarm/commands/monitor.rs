//! `BlockHostMonitor`: what a peer serves, as its admin port shows it.

use blocks::node::{BlockHostState, BlockHostWatch, SwarmNode};
use server::{BlockMonitor, BlockSnapshot};

pub struct BlockHostMonitor {
    pub host: BlockHostWatch,
    pub node: SwarmNode,
}

impl BlockMonitor for BlockHostMonitor {
    fn snapshot(&self) -> BlockSnapshot {
        let state = self.host.state();
        let stats = self.host.block().map(|block| block.stats()).unwrap_or_default();
        BlockSnapshot {
            layers: match state {
                BlockHostState::Choosing => None,
                BlockHostState::Loading(layers)
                | BlockHostState::Serving(layers)
                | BlockHostState::Draining { layers, .. }
                | BlockHostState::Failed { layers, .. } => Some(layers),
            },
            is_serving: matches!(state, BlockHostState::Serving(_)),
            sessions: stats.sessions,
            clients: stats.clients,
            tokens_free: stats.tokens_free,
            steps: stats.steps,
            rows: stats.rows,
            failures: stats.failures,
            step_s: stats.step.total_s,
            queue_s: stats.queue.total_s,
            streams: self.node.server().streams(),
            push_keys: self.node.server().push_keys(),
            peers: self.node.handle().peers().len(),
        }
    }
}
