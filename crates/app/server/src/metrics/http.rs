//! Metrics of the HTTP server: connections, descriptors, the preparation of prompts, and callers that were refused.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Reason;
use crate::descriptors;
use crate::error::{ApiError, ApiErrorKind};

const PREPARATION_BUCKETS: [f64; 10] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5, 10.0];

/// The connections of a listener. Clones share their values.
#[derive(Clone, Debug, Default)]
pub struct ConnectionMetrics {
    pub(crate) open: Gauge,
    pub(crate) refused: Counter,
    pub(crate) evicted: Counter,
}

pub struct HttpMetrics {
    pub connections: ConnectionMetrics,
    descriptors_open: Gauge,
    descriptors_max: Gauge,
    preparation: Histogram,
    refused: Family<Reason, Counter>,
}

impl HttpMetrics {
    pub fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            connections: ConnectionMetrics::default(),
            descriptors_open: Gauge::default(),
            descriptors_max: Gauge::default(),
            preparation: Histogram::new(PREPARATION_BUCKETS.iter().copied()),
            refused: Family::default(),
        };
        let ConnectionMetrics { open, refused, evicted } = metrics.connections.clone();
        registry.register("connections", "Open connections", open);
        registry.register("connections_refused", "Connections refused because all others had requests", refused);
        let eviction = "Connections without an answer under way that were evicted";
        registry.register("connections_evicted", eviction, evicted);
        let (open, max) = (metrics.descriptors_open.clone(), metrics.descriptors_max.clone());
        registry.register("descriptors", "Open descriptors (files and sockets) of the server", open);
        registry.register("descriptors_max", "The limit of open descriptors; 0: none", max);
        let preparation = "Time to render the template, tokenize the prompt and compile the grammar of a request";
        registry.register_with_unit("prompt_preparation", preparation, Unit::Seconds, metrics.preparation.clone());
        registry.register("requests_refused", "Refused callers (401, 403, 429), by reason", metrics.refused.clone());
        metrics
    }

    /// Reads what the system counts.
    pub fn update(&self) {
        let count = |count: Option<u64>| i64::try_from(count.unwrap_or(0)).unwrap_or(i64::MAX);
        self.descriptors_open.set(count(descriptors::open_count()));
        self.descriptors_max.set(count(descriptors::limit()));
    }

    pub fn prepared(&self, time: Duration) {
        self.preparation.observe(time.as_secs_f64());
    }

    /// Counts an error that refuses the caller rather than the request.
    pub fn failed(&self, error: &ApiError) {
        let refuses_caller =
            matches!(error.kind, ApiErrorKind::Authentication | ApiErrorKind::Forbidden | ApiErrorKind::Overloaded);
        if refuses_caller {
            self.refused.get_or_create(&Reason { reason: error.code.unwrap_or("other") }).inc();
        }
    }
}
