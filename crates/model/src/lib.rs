//! From files to a forward pass over a `LayerRange` for a `Rank`.
//!
//! An architecture is described once, as a table of its layer's tensors (`architecture`); what a file says of its
//! sizes becomes a checked [`Description`]; the slice of every tensor that a rank holds is derived from both
//! (`split`), and so is the loading of a [`Block`] of layers and of the [`Embedding`] and [`LmHead`] around them.
#![deny(unsafe_code)]

mod architecture;
mod block;
mod checkpoint;
mod collective;
mod description;
mod embedding;
mod facts;
pub mod files;
mod footprint;
mod lm_head;
mod load;
mod rope;
mod split;

pub use architecture::Architecture;
pub use block::Block;
pub use checkpoint::Checkpoint;
pub use collective::{Collective, CollectiveError, MapRows, Solo};
pub use description::{Description, DescriptionError, FeedForward, Layer};
pub use embedding::Embedding;
pub use footprint::Footprint;
pub use lm_head::LmHead;
pub use load::{Limits, LoadError, LoadOptions};
pub use rope::{Rope, Scaling};
