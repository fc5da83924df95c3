//! Loads model files and runs the forward pass over a `LayerRange` for a `Rank`.
//!
//! An architecture is described once, as a table of its layer's tensors (`architecture`). The sizes in a file become a
//! checked [`Description`]. The slice of every tensor that a rank holds (`split`), and the loading of [`Block`],
//! [`Embedding`] and [`LmHead`], are derived from both.
#![deny(unsafe_code)]

mod architecture;
mod block;
mod checkpoint;
mod collective;
mod description;
mod digest;
mod embedding;
pub mod files;
mod footprint;
mod lm_head;
mod load;
mod manifest;
mod metadata;
mod part;
mod rope;
mod split;
mod tensor_names;

pub use architecture::Architecture;
pub use block::Block;
pub use checkpoint::{Checkpoint, StoredFormat};
pub use collective::{Collective, CollectiveError, MapRows, SingleRank};
pub use description::{Description, DescriptionError, FeedForward, Layer};
pub use digest::CheckpointDigest;
pub use embedding::Embedding;
pub use footprint::Footprint;
pub use lm_head::LmHead;
pub use load::{Limits, LoadError, LoadOptions};
pub use manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestError, TensorEntry};
pub use part::ModelPart;
pub use rope::{Rope, Scaling};
