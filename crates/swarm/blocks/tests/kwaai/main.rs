//! KwaaiNet's block protocol with the programs of `tests/kwaai` on the other side: generations with our side in each role give
//! the tokens of one process, and what hostile peers try is refused.
//!
//! KwaaiNet's activations are f16, so logits are compared within a tolerance, position by position with the same tokens before
//! them; greedy tokens are compared where they are equal in spite of that, which they are for the prompts that are used.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod absent;
mod coordinator;
mod finder;
mod fixture;
mod hostile;
mod libp2p_node;
mod logits;
mod registry;
mod server;
mod span;
