//! HTTP: the APIs that people's tools already speak, in front of one [`engine::Service`].
//!
//! Each API is a folder that turns its requests into one inner form, [`answer::Ask`], and the parts of an
//! [`answer::Answer`] into its own events. Nothing here knows a tensor; nothing below here knows HTTP.
#![forbid(unsafe_code)]

pub mod answer;
mod anthropic;
mod app;
mod auth;
mod body;
mod contract;
mod envelope;
mod error;
mod failures;
mod identity;
mod listen;
mod metrics;
mod narrate;
mod observe;
mod openai;
mod openapi;
mod page;
mod parts;
mod responses;
mod router;
mod served;
mod sse;
mod state;
mod transcript;

pub use app::{App, BODY_BYTES_MAX, Config};
pub use auth::{ApiKeys, KeyError};
pub use axum::http::HeaderValue;
pub use error::{ApiError, ErrorKind};
pub use listen::{CONNECTIONS_MAX, ListenError, Listener, Tls, TlsError};
pub use router::router;
pub use served::{Served, ServedError};
pub use state::{LoadStage, Progress};
