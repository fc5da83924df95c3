//! The HTTP server: OpenAI's, Anthropic's and Ollama's APIs in front of one [`engine::Service`].
//!
//! Each API is a folder that converts its requests into one common format, [`generation::GenerationRequest`], and the events
//! of a [`generation::Generation`] into its own format, with a `StreamEncoder`. This crate knows no tensors; the crates
//! below it know no HTTP.
#![forbid(unsafe_code)]

mod api_docs;
mod app;
mod auth;
mod block_admin;
mod blocking;
mod body_budget;
mod cluster;
mod compression;
mod contract;
mod conversation;
mod descriptors;
mod error;
mod error_body;
mod error_responses;
mod excerpt;
pub mod generation;
mod host_check;
mod hosted_tools;
mod ids;
mod json_body;
mod kept_answers;
mod listen;
mod load_stage;
mod messages;
mod metrics;
mod monitoring;
mod ollama;
mod openai;
mod openapi;
mod page;
mod redact;
mod responses;
mod router;
mod served_model;
mod server_info;
mod sse;
mod stream;
mod text_or_parts;

pub use app::{App, BODY_BYTES_MAX, Config};
pub use auth::{ApiKeys, KeyError};
pub use axum::Router;
pub use axum::http::HeaderValue;
pub use block_admin::{BlockMonitor, BlockSnapshot, block_admin_router};
pub use cluster::{
    BatchPrediction, ChainBits, ChainPrediction, ChainSnapshot, ClusterEvent, ClusterEventKind, ClusterMonitor,
    EventMachine, HopSnapshot, HopWay, NodePeer, NodeSnapshot, NodeUse, PeerBlock, PeerReach, PeerRecord, PeerService,
    StageMemory, StagePeer, StageSnapshot, StageTime, SwarmSnapshot,
};
pub use descriptors::DescriptorLimit;
pub use error::{ApiError, ApiErrorKind};
pub use listen::{CONNECTIONS_MAX, ConnectionLimits, ListenError, Listener, Tls, TlsError};
pub use load_stage::{LoadStage, Progress};
pub use metrics::ConnectionMetrics;
pub use router::{admin_router, router};
pub use served_model::{CpuDescription, ModelDescription, ServedModel, ServedModelError};
