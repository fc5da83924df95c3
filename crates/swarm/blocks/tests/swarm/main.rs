//! Peers and clients in one process, with connections that can be cut, slowed and garbled: whole models on chains of blocks.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod attacker;
mod crowd;
mod floods;
mod gated;
mod hoarder;
mod hostile;
mod hostile_peers;
mod independent;
mod loss;
mod lying;
mod mangler;
mod models;
mod network;
mod room;
mod same_bits;
mod verify;
mod waiting;
