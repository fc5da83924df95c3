//! HTTP tests: requests and responses, with a real engine and a small model with random weights.
#![allow(clippy::unwrap_used)] // helpers of tests

mod auth;
mod chat;
mod client;
mod cluster;
mod completions;
mod contract;
mod embeddings;
mod errors;
mod invitation;
mod listen;
mod messages;
mod models;
mod monitoring;
mod ollama;
mod ranks;
mod responses;
mod same_prompt;
mod server_info;
mod structured;
mod swarm;
mod tokens;
mod tools;
mod waiting;
