//! Prometheus metrics: of the HTTP server, and of each model: the state of its engine, the times and finish reasons of its
//! requests.
//!
//! Times are measured on the engine's thread, so that a slow client does not look like a slow model. The engine's own
//! counters are read when `/metrics` is requested.

mod http;
mod merge;
mod ranks;
mod stages;
mod swarm;
mod token_rate;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use engine::{EngineStats, EventKind, FinishReason, RankReport, Service};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

pub use http::ConnectionMetrics;
use http::HttpMetrics;
pub use merge::merge;
use ranks::RankMetrics;
use stages::StageMetrics;
use swarm::SwarmMetrics;
use token_rate::TokenRate;
pub use token_rate::TokenRates;

use crate::cluster::ChainSnapshot;

const PREFIX: &str = "consort";
/// In seconds: from a cached prompt on a GPU to a long prompt on an old machine.
const FIRST_TOKEN_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
const BETWEEN_TOKENS_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
const REQUEST_BUCKETS: [f64; 12] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

/// The metrics of the server, whatever its models.
pub struct ServerMetrics {
    registry: Registry,
    http: HttpMetrics,
}

impl ServerMetrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let http = HttpMetrics::new(&mut registry);
        Self { registry, http }
    }

    pub fn http(&self) -> &HttpMetrics {
        &self.http
    }

    /// The metrics in Prometheus' text format.
    pub fn text(&self) -> String {
        self.http.update();
        text_of(&self.registry)
    }
}

/// The metrics of one model.
pub struct ModelMetrics {
    registry: Registry,
    requests: RequestMetrics,
    engine: EngineMetrics,
    ranks: RankMetrics,
    stages: StageMetrics,
    swarm: SwarmMetrics,
    reported: Mutex<LastExported>,
}

/// The counts that were already added to the counters.
#[derive(Default)]
struct LastExported {
    stats: EngineStats,
    ranks: Vec<RankReport>,
}

/// Times and finish reasons of requests. Clones share their values.
#[derive(Clone)]
struct RequestMetrics {
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    prompt_tokens: Counter,
    finished: Family<Reason, Counter>,
    rate: TokenRate,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: &'static str,
}

#[derive(Default)]
struct EngineMetrics {
    running: Gauge,
    waiting: Gauge,
    kv_pages: Gauge,
    kv_pages_used: Gauge,
    kv_pages_cached: Gauge,
    kv_usage: Gauge<f64, AtomicU64>,
    prefix_lookups: Counter,
    prefix_hits: Counter,
    prefilled: Counter,
    generated: Counter,
    preemptions: Counter,
    replays: Counter,
    steps: Counter,
}

impl ModelMetrics {
    pub fn new(model: &str) -> Self {
        let labels = [("model".into(), model.to_owned().into())];
        let mut registry = Registry::with_prefix_and_labels(PREFIX, labels.into_iter());
        let requests = RequestMetrics::new(&mut registry);
        let engine = EngineMetrics::default();
        engine.register(&mut registry);
        let ranks = RankMetrics::default();
        ranks.register(&mut registry);
        let stages = StageMetrics::default();
        stages.register(&mut registry);
        let swarm = SwarmMetrics::default();
        swarm.register(&mut registry);
        Self { registry, requests, engine, ranks, stages, swarm, reported: Mutex::default() }
    }

    /// The engine that was reported on has ended: the next one begins to count at zero.
    pub fn end_engine(&self) {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        *reported = LastExported::default();
        self.engine.update(&reported.stats, &reported.stats);
        self.ranks.update(&[], &[]);
    }

    /// Starts to time one request.
    pub fn request(&self, prompt_tokens: usize) -> RequestTimer {
        RequestTimer {
            metrics: self.requests.clone(),
            prompt_tokens,
            started: Instant::now(),
            last: None,
            completed: Arc::default(),
            ended: false,
        }
    }

    /// How many tokens per second are generated now.
    pub fn token_rates(&self) -> TokenRates {
        self.requests.rate.get()
    }

    /// The metrics in Prometheus' text format. Without a `service`, the engine's metrics keep their last values.
    pub fn text(&self, service: Option<&Service>, chain: Option<&ChainSnapshot>) -> String {
        // The lock keeps two concurrent requests from adding the same difference, and from writing half of an update.
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(service) = service {
            let now = LastExported { stats: service.stats(), ranks: service.ranks() };
            self.engine.update(&now.stats, &reported.stats);
            self.ranks.update(&now.ranks, &reported.ranks);
            *reported = now;
        }
        if let Some(chain) = chain {
            self.stages.update(chain);
            self.swarm.update(chain);
        }
        text_of(&self.registry)
    }
}

fn text_of(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("writing to a string does not fail");
    text
}

impl RequestMetrics {
    fn new(registry: &mut Registry) -> Self {
        let mut seconds = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let first_token = seconds(
            "time_to_first_token",
            "Time from the arrival of a request to its first token",
            &FIRST_TOKEN_BUCKETS,
        );
        let between_tokens =
            seconds("time_between_tokens", "Time between two output tokens of a request", &BETWEEN_TOKENS_BUCKETS);
        let whole = seconds("request_duration", "Time from the arrival of a request to its end", &REQUEST_BUCKETS);
        let (prompt_tokens, finished) = (Counter::default(), Family::default());
        registry.register("prompt_tokens", "Prompt tokens of accepted requests", prompt_tokens.clone());
        registry.register("requests_finished", "Finished requests, by reason", finished.clone());
        Self { first_token, between_tokens, whole, prompt_tokens, finished, rate: TokenRate::new() }
    }
}

impl EngineMetrics {
    fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("requests_running", "Requests that are running", &self.running),
            ("requests_waiting", "Requests in the queue", &self.waiting),
            ("kv_pages", "Pages of the KV cache", &self.kv_pages),
            ("kv_pages_used", "KV cache pages of running requests", &self.kv_pages_used),
            ("kv_pages_cached", "Free KV cache pages that the prefix cache can reuse", &self.kv_pages_cached),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        let usage = self.kv_usage.clone();
        registry.register("kv_usage_ratio", "Fraction of the KV cache that running requests use", usage);
        let counters = [
            ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache", &self.prefix_lookups),
            ("prefix_hit_tokens", "Prompt tokens found in the prefix cache", &self.prefix_hits),
            ("prefilled_tokens", "Prompt tokens computed by prefill", &self.prefilled),
            ("generated_tokens", "Output tokens", &self.generated),
            ("preemptions", "Preemptions: a request was requeued because the KV cache was full", &self.preemptions),
            ("replays", "Replays: a request was requeued because a rank was lost", &self.replays),
            ("steps", "Steps of the engine", &self.steps),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
    }

    fn update(&self, now: &EngineStats, reported: &EngineStats) {
        let used = now.pages_total.saturating_sub(now.pages_free);
        self.running.set(now.running as i64);
        self.waiting.set(now.waiting as i64);
        self.kv_pages.set(now.pages_total as i64);
        self.kv_pages_used.set(used as i64);
        self.kv_pages_cached.set(now.pages_cached as i64);
        self.kv_usage.set(used as f64 / now.pages_total.max(1) as f64);
        let add_increase = |counter: &Counter, now: u64, reported: u64| counter.inc_by(now.saturating_sub(reported));
        add_increase(&self.prefix_lookups, now.prefix_lookup_tokens, reported.prefix_lookup_tokens);
        add_increase(&self.prefix_hits, now.prefix_hit_tokens, reported.prefix_hit_tokens);
        add_increase(&self.prefilled, now.prefilled_tokens, reported.prefilled_tokens);
        add_increase(&self.generated, now.decoded_tokens, reported.decoded_tokens);
        add_increase(&self.preemptions, now.preemptions, reported.preemptions);
        add_increase(&self.replays, now.replays, reported.replays);
        add_increase(&self.steps, now.steps, reported.steps);
    }
}

/// Times the events of one request.
pub struct RequestTimer {
    metrics: RequestMetrics,
    prompt_tokens: usize,
    started: Instant,
    last: Option<Instant>,
    completed: Arc<AtomicBool>,
    ended: bool,
}

impl RequestTimer {
    /// A flag to set when the request is cancelled because its output is complete, as after a stop string.
    pub fn completed(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.completed)
    }

    pub fn record(&mut self, event: &EventKind) {
        match event {
            EventKind::Accepted => {
                self.metrics.prompt_tokens.inc_by(self.prompt_tokens as u64);
            }
            EventKind::Token(_) => {
                let now = Instant::now();
                let between = self.last.replace(now).map(|last| now - last);
                match between {
                    None => self.metrics.first_token.observe((now - self.started).as_secs_f64()),
                    Some(between) => self.metrics.between_tokens.observe(between.as_secs_f64()),
                }
                self.metrics.rate.record(between);
            }
            EventKind::Finished(finished) => self.end(match finished.reason {
                FinishReason::Eos(_) | FinishReason::Complete => "stop",
                FinishReason::Length | FinishReason::Context => "length",
                FinishReason::Cancelled => "cancelled",
                FinishReason::Failed(_) => "error",
            }),
            EventKind::Refused(_) => self.end("refused"),
            EventKind::Prefilled { .. } | EventKind::Embedding(_) => {}
        }
    }

    fn end(&mut self, reason: &'static str) {
        if !std::mem::replace(&mut self.ended, true) {
            let completed = reason == "cancelled" && self.completed.load(Ordering::Relaxed);
            let reason = if completed { "stop" } else { reason };
            self.metrics.whole.observe(self.started.elapsed().as_secs_f64());
            self.metrics.finished.get_or_create(&Reason { reason }).inc();
        }
    }
}

impl Drop for RequestTimer {
    /// If no final event was recorded, the request counts as cancelled.
    fn drop(&mut self) {
        self.end("cancelled");
    }
}
