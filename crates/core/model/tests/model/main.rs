//! Models from files to logits, against Hugging Face and a plain reference. One program, because each compiles the model anew.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod checkpoint;
mod converted;
#[path = "../driver/mod.rs"]
mod driver;
mod files;
mod head_sizes;
mod manifest;
mod oracle;
#[path = "../random/mod.rs"]
mod random;
#[path = "../reference/mod.rs"]
mod reference;
mod shards;
mod tensor_parallel;
