//! `PlacementMonitor`: what a peer serves, as its admin port shows it.

use peers::node::{PlacementState, PlacementWatch, SwarmNode};
use server::{BlockMonitor, BlockSnapshot};

pub struct PlacementMonitor {
    pub placement: PlacementWatch,
    pub node: SwarmNode,
}

impl BlockMonitor for PlacementMonitor {
    fn snapshot(&self) -> BlockSnapshot {
        let state = self.placement.state();
        let stats = self.placement.block().map(|block| block.stats()).unwrap_or_default();
        BlockSnapshot {
            layers: match state {
                PlacementState::Choosing => None,
                PlacementState::Loading(layers)
                | PlacementState::Serving(layers)
                | PlacementState::Draining { layers, .. }
                | PlacementState::Failed { layers, .. } => Some(layers),
            },
            is_serving: matches!(state, PlacementState::Serving(_)),
            sessions: stats.sessions,
            clients: stats.clients,
            tokens_free: stats.tokens_free,
            steps: stats.steps,
            rows: stats.rows,
            failures: stats.failures,
            step_s: stats.step_total_s,
            queue_s: stats.queue_total_s,
            streams: self.node.server().streams(),
            push_keys: self.node.server().push_keys(),
            peers: self.node.handle().peers().len(),
        }
    }
}
