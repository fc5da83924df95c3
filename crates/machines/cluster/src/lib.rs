//! Layers of one model on the machines of a LAN.
//!
//! A [coordinator](chain) keeps the embedding, the head and the tokens; [nodes](node) run ranges of layers. Every connection is
//! authenticated and encrypted with the cluster key (`net`).
#![deny(unsafe_code)]

pub mod chain;
pub mod coordinator;
pub mod discovery;
pub mod measure;
pub mod node;
mod outbox;
pub mod purpose;
pub mod wire;
