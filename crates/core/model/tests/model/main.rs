//! Models from files to logits, against Hugging Face and a plain reference. One program, because each compiles the model anew.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod checkpoint;
mod converted;
mod files;
mod head_sizes;
mod manifest;
mod oracle;
mod shards;
mod tensor_parallel;
