//! Peers and clients in one process, with connections that can be cut, slowed and garbled: whole models on chains of blocks.

mod hostile;
mod loss;
mod models;
mod network;
mod same_bits;
