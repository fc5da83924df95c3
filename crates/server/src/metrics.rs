//! Numbers for Prometheus: what the engine holds now, and how requests fared.
//!
//! Times are taken on the engine's thread as events pass, so that a slow reader does not look like a slow model. What the
//! engine counts itself is read when somebody asks.

mod ranks;

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

use ranks::RankMetrics;

/// Seconds: from a cached prompt on a GPU to a long one on an old machine.
const FIRST_TOKEN_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
const BETWEEN_TOKENS_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
const REQUEST_BUCKETS: [f64; 12] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

/// All that `/metrics` tells, about one model.
pub struct Metrics {
    registry: Registry,
    requests: RequestMetrics,
    engine: EngineMetrics,
    ranks: RankMetrics,
    told: Mutex<Told>,
}

/// Counts that are already in the counters.
#[derive(Default)]
struct Told {
    stats: EngineStats,
    ranks: Vec<RankReport>,
}

/// How long parts of a request take, and how it ends. Clones share their numbers.
#[derive(Clone)]
struct RequestMetrics {
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    prompt_tokens: Counter,
    finished: Family<Reason, Counter>,
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

impl Metrics {
    pub fn new(model: &str) -> Self {
        let labels = [("model".into(), model.to_owned().into())];
        let mut registry = Registry::with_prefix_and_labels("consort", labels.into_iter());
        let requests = RequestMetrics::new(&mut registry);
        let engine = EngineMetrics::default();
        engine.register(&mut registry);
        let ranks = RankMetrics::default();
        ranks.register(&mut registry);
        Self { registry, requests, engine, ranks, told: Mutex::default() }
    }

    /// Follows one request from now on.
    pub fn request(&self, prompt_tokens: usize) -> RequestClock {
        RequestClock {
            metrics: self.requests.clone(),
            prompt_tokens,
            begun: Instant::now(),
            last: None,
            satisfied: Arc::default(),
            ended: false,
        }
    }

    /// The text that Prometheus reads, with what the engine counts, where there is one.
    pub fn text(&self, service: Option<&Service>) -> String {
        if let Some(service) = service {
            // Under the lock, so that two who read at once do not both add the same difference.
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Told { stats: service.stats(), ranks: service.ranks() };
            self.engine.update(&now.stats, &told.stats);
            self.ranks.update(&now.ranks, &told.ranks);
            *told = now;
        }
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string does not fail");
        text
    }
}

impl RequestMetrics {
    fn new(registry: &mut Registry) -> Self {
        let mut seconds = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
            histogram
        };
        let first_token =
            seconds("time_to_first_token", "From a request's arrival to its first token", &FIRST_TOKEN_BUCKETS);
        let between_tokens =
            seconds("time_between_tokens", "From one token of an answer to the next", &BETWEEN_TOKENS_BUCKETS);
        let whole = seconds("request_duration", "From a request's arrival to the end of its answer", &REQUEST_BUCKETS);
        let (prompt_tokens, finished) = (Counter::default(), Family::default());
        registry.register("prompt_tokens", "Tokens of the prompts of accepted requests", prompt_tokens.clone());
        registry.register("requests_finished", "Requests that have ended, by reason", finished.clone());
        Self { first_token, between_tokens, whole, prompt_tokens, finished }
    }
}

impl EngineMetrics {
    fn register(&self, registry: &mut Registry) {
        let gauges = [
            ("requests_running", "Requests that hold a session", &self.running),
            ("requests_waiting", "Requests that wait for one", &self.waiting),
            ("kv_pages", "Pages of the K/V cache", &self.kv_pages),
            ("kv_pages_used", "Pages that running requests hold", &self.kv_pages_used),
            ("kv_pages_cached", "Free pages that hold a prefix that may be asked for again", &self.kv_pages_cached),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        let usage = self.kv_usage.clone();
        registry.register("kv_usage_ratio", "Part of the K/V cache that running requests hold", usage);
        let counters = [
            ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache", &self.prefix_lookups),
            ("prefix_hit_tokens", "Prompt tokens found in the prefix cache", &self.prefix_hits),
            ("prefilled_tokens", "Prompt tokens that were computed", &self.prefilled),
            ("generated_tokens", "Tokens of answers", &self.generated),
            ("preemptions", "Times that a request gave its pages up and began again", &self.preemptions),
            ("replays", "Times that a request began again because a rank was lost", &self.replays),
            ("steps", "Steps of the engine", &self.steps),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
    }

    fn update(&self, now: &EngineStats, told: &EngineStats) {
        let used = now.pages_total.saturating_sub(now.pages_free);
        self.running.set(now.running as i64);
        self.waiting.set(now.waiting as i64);
        self.kv_pages.set(now.pages_total as i64);
        self.kv_pages_used.set(used as i64);
        self.kv_pages_cached.set(now.pages_cached as i64);
        self.kv_usage.set(used as f64 / now.pages_total.max(1) as f64);
        let grow = |counter: &Counter, now: u64, told: u64| counter.inc_by(now.saturating_sub(told));
        grow(&self.prefix_lookups, now.prefix_lookup_tokens, told.prefix_lookup_tokens);
        grow(&self.prefix_hits, now.prefix_hit_tokens, told.prefix_hit_tokens);
        grow(&self.prefilled, now.prefilled_tokens, told.prefilled_tokens);
        grow(&self.generated, now.decoded_tokens, told.decoded_tokens);
        grow(&self.preemptions, now.preemptions, told.preemptions);
        grow(&self.replays, now.replays, told.replays);
        grow(&self.steps, now.steps, told.steps);
    }
}

/// Watches the events of one request.
pub struct RequestClock {
    metrics: RequestMetrics,
    prompt_tokens: usize,
    begun: Instant,
    last: Option<Instant>,
    satisfied: Arc<AtomicBool>,
    ended: bool,
}

impl RequestClock {
    /// To be set when the request is cancelled because its answer is complete: a stop string came.
    pub fn satisfied(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.satisfied)
    }

    pub fn note(&mut self, event: &EventKind) {
        match event {
            EventKind::Accepted => {
                self.metrics.prompt_tokens.inc_by(self.prompt_tokens as u64);
            }
            EventKind::Token(_) => {
                let now = Instant::now();
                match self.last.replace(now) {
                    None => self.metrics.first_token.observe((now - self.begun).as_secs_f64()),
                    Some(last) => self.metrics.between_tokens.observe((now - last).as_secs_f64()),
                }
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
            let satisfied = reason == "cancelled" && self.satisfied.load(Ordering::Relaxed);
            let reason = if satisfied { "stop" } else { reason };
            self.metrics.whole.observe(self.begun.elapsed().as_secs_f64());
            self.metrics.finished.get_or_create(&Reason { reason }).inc();
        }
    }
}

impl Drop for RequestClock {
    /// The engine had nobody to tell.
    fn drop(&mut self) {
        self.end("cancelled");
    }
}
