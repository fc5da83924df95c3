//! The admin port of a process that serves a block of layers to a swarm: `/health` and `/metrics`. There are no API keys, so the
//! `Host` is checked everywhere.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use axum::extract::{Request, State};
use axum::http::header;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use types::LayerRange;

use crate::monitoring::{HealthBody, METRICS_TYPE};
use crate::{error_body, host_check};

/// What a process serves to a swarm, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockSnapshot {
    /// `None` before the first block is chosen.
    pub layers: Option<LayerRange>,
    /// It takes sessions.
    pub is_serving: bool,
    pub sessions: usize,
    pub clients: usize,
    /// Tokens that can still be reserved.
    pub tokens_free: usize,
    /// Since the block was loaded.
    pub steps: u64,
    pub rows: u64,
    /// Runs that were answered with an error.
    pub failures: u64,
    /// Of all steps, in seconds: their time, and how long the oldest of their rows waited.
    pub step_s: f64,
    pub queue_s: f64,
    /// Streams of clients and of other peers.
    pub streams: usize,
    /// Sessions to which other peers may pass rows on.
    pub push_keys: usize,
    /// Peers with a connection.
    pub peers: usize,
}

/// Knows what the process serves.
pub trait BlockMonitor: Send + Sync {
    fn snapshot(&self) -> BlockSnapshot;
}

struct Admin {
    monitor: Box<dyn BlockMonitor>,
    model: String,
    allowed_hosts: Vec<String>,
}

/// The service of the admin port. `allowed_hosts`: names by which clients may call it, beside addresses and `localhost`.
pub fn block_admin_router(monitor: Box<dyn BlockMonitor>, model: String, allowed_hosts: Vec<String>) -> Router {
    let admin = Arc::new(Admin { monitor, model, allowed_hosts });
    Router::new()
        .route("/health", get(async || Json(HealthBody::OK)))
        .route("/metrics", get(metrics))
        .layer(from_fn_with_state(Arc::clone(&admin), check_host))
        .layer(from_fn(error_body::write))
        .with_state(admin)
}

async fn check_host(State(admin): State<Arc<Admin>>, request: Request, next: Next) -> Response {
    match host_check::check(&request, &admin.allowed_hosts) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let text = text(&admin.model, &admin.monitor.snapshot());
    ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response()
}

/// In Prometheus' text format.
fn text(model: &str, block: &BlockSnapshot) -> String {
    let labels = [("model".into(), model.to_owned().into())];
    let mut registry = Registry::with_prefix_and_labels("consort", labels.into_iter());
    let [first, layers] = block.layers.map_or([0, 0], |layers| [layers.start(), layers.count()]);
    for (name, help, value) in [
        ("block_first_layer", "The first layer of the block", first),
        ("block_layers", "Layers of the block", layers),
        ("block_serving", "1 if the block takes sessions", usize::from(block.is_serving)),
        ("block_sessions", "Open sessions", block.sessions),
        ("block_clients", "Clients with open sessions", block.clients),
        ("block_tokens_free", "Tokens that sessions can still reserve", block.tokens_free),
        ("block_streams", "Streams of clients and of other peers", block.streams),
        ("block_push_keys", "Sessions to which other peers may pass rows on", block.push_keys),
        ("block_peers", "Peers with a connection", block.peers),
    ] {
        let gauge = Gauge::<i64>::default();
        gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register(name, help, gauge);
    }
    for (name, help, value) in [
        ("block_steps", "Steps of the block", block.steps),
        ("block_rows", "Rows of these steps", block.rows),
        ("block_failures", "Runs that were answered with an error", block.failures),
    ] {
        let counter = Counter::<u64>::default();
        counter.inc_by(value);
        registry.register(name, help, counter);
    }
    for (name, help, value) in [
        ("block_step", "Time of steps", block.step_s),
        ("block_queue", "Time that the oldest rows of steps waited", block.queue_s),
    ] {
        let counter = Counter::<f64, AtomicU64>::default();
        counter.inc_by(value);
        registry.register_with_unit(name, help, Unit::Seconds, counter);
    }
    let mut text = String::new();
    encode(&mut text, &registry).expect("writing to a string does not fail");
    text
}
