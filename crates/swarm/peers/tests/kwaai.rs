//! KwaaiNet's block protocol with the programs of `tests/kwaai` on the other side: generations with our side in each role give
//! the tokens of one process, and what hostile peers try is refused.
//!
//! KwaaiNet's activations are f16, so logits are compared within a tolerance, position by position with the same tokens before
//! them; greedy tokens are compared where they are equal in spite of that, which they are for the prompts that are used.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[path = "kwaai/finder.rs"]
mod finder;
#[path = "kwaai/fixture.rs"]
mod fixture;
#[path = "kwaai/hostile.rs"]
mod hostile;
#[path = "kwaai/listener.rs"]
mod listener;
#[path = "kwaai/logits.rs"]
mod logits;
#[path = "kwaai/node.rs"]
mod node;
#[path = "kwaai/programs.rs"]
mod programs;
#[path = "kwaai/registry.rs"]
mod registry;
#[path = "kwaai/server.rs"]
mod server;
#[path = "kwaai/span.rs"]
mod span;
