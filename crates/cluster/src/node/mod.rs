//! What a machine runs that has joined a cluster: it loads ranges of layers and runs them as stages of chains.

mod expected;
mod stage_loop;

pub use expected::{Expectation, ExpectedConnections, NodeConnection};
pub use stage_loop::{StageConnections, StageShape, run};
