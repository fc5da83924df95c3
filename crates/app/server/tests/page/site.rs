//! A fake server with the real page: the test writes its responses piece by piece. `real.rs` uses a real model; here
//! responses are used that no small model would generate.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use server::{App, Config, Listener};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// If the page sends no request in this time, the test fails.
const WAIT: Duration = Duration::from_secs(100);

pub struct Site {
    pub address: String,
    asked: Receiver<Asked>,
    status: Arc<Mutex<(StatusCode, Value)>>,
    cluster: Arc<Mutex<(StatusCode, Value)>>,
    models: Arc<Mutex<Value>>,
    invitation: Arc<Mutex<Value>>,
    _runtime: Runtime,
}

/// A request for a completion that has no response yet.
pub struct Asked {
    pub body: Value,
    /// The API key of the request.
    pub key: Option<String>,
    answer: oneshot::Sender<Response>,
}

/// A response in progress. Dropping it breaks the stream off.
pub struct Answer(UnboundedSender<String>);

#[derive(Clone)]
struct Script {
    asked: Sender<Asked>,
    status: Arc<Mutex<(StatusCode, Value)>>,
    cluster: Arc<Mutex<(StatusCode, Value)>>,
    models: Arc<Mutex<Value>>,
    invitation: Arc<Mutex<Value>>,
}

impl Site {
    pub fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let (sender, asked) = channel();
        let status = Arc::new(Mutex::new((StatusCode::OK, ready_status())));
        let cluster = Arc::new(Mutex::new((StatusCode::OK, chain_of_three())));
        let models = Arc::new(Mutex::new(json!([{ "id": "test/tiny-model" }])));
        let invitation = Arc::<Mutex<Value>>::default();
        let script = Script {
            asked: sender,
            status: Arc::clone(&status),
            cluster: Arc::clone(&cluster),
            models: Arc::clone(&models),
            invitation: Arc::clone(&invitation),
        };
        let scripted = Router::new()
            .route("/v1/chat/completions", post(chat))
            .route("/tokenize", post(tokenize))
            .route("/status", get(report))
            .route("/v1/cluster/invitation", get(show_invitation).post(show_invitation))
            .route("/v1/models", get(list_models))
            .route("/v1/answers/{id}/cancel", post(async || Json(json!({ "cancelled": true }))))
            .route("/v1/cluster", get(report_cluster))
            .with_state(script)
            .fallback_service(server::router(&App::new(Config::new("test/tiny-model"))));
        let address = serve(&runtime, scripted);
        Self { address, asked, status, cluster, models, invitation, _runtime: runtime }
    }

    /// The next request that the page sends.
    pub fn asked(&self) -> Asked {
        self.asked.recv_timeout(WAIT).expect("the page asks for an answer")
    }

    /// Whether there is a request that the test has not taken.
    pub fn was_asked(&self) -> bool {
        self.asked.try_recv().is_ok()
    }

    /// Sets the response of `/status`.
    pub fn set_status(&self, code: StatusCode, body: Value) {
        *self.status.lock().unwrap() = (code, body);
    }

    /// Sets the list of `/v1/models`.
    pub fn set_models(&self, list: Value) {
        *self.models.lock().unwrap() = list;
    }

    /// Sets the response of `/v1/cluster/invitation`.
    pub fn set_invitation(&self, body: Value) {
        *self.invitation.lock().unwrap() = body;
    }

    /// Sets the response of `/v1/cluster`.
    pub fn set_cluster(&self, code: StatusCode, body: Value) {
        *self.cluster.lock().unwrap() = (code, body);
    }
}

impl Asked {
    pub fn answer(self) -> Answer {
        let (sender, receiver) = unbounded_channel::<String>();
        let chunks = futures_util::stream::unfold(receiver, |mut receiver| async {
            let chunk = receiver.recv().await?;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(chunk)), receiver))
        });
        let response = ([("content-type", "text/event-stream")], Body::from_stream(chunks)).into_response();
        self.answer.send(response).expect("the page waits for its answer");
        Answer(sender)
    }

    pub fn refuse(self, status: StatusCode, message: &str, headers: &[(&'static str, &'static str)]) {
        self.refuse_with_code(status, Value::Null, message, headers);
    }

    /// Refuses with a code, such as `model_not_found`.
    pub fn refuse_with_code(
        self,
        status: StatusCode,
        code: impl Into<Value>,
        message: &str,
        headers: &[(&'static str, &'static str)],
    ) {
        let error = json!({ "error": { "message": message, "type": "error", "code": code.into() } });
        let mut response = (status, Json(error)).into_response();
        for (name, value) in headers {
            response.headers_mut().insert(*name, value.parse().unwrap());
        }
        self.answer.send(response).expect("the page waits for its answer");
    }
}

impl Answer {
    pub fn delta(&self, delta: Value) {
        self.event(&json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] }).to_string());
    }

    pub fn write(&self, text: &str) {
        self.delta(json!({ "content": text }));
    }

    /// Writes text in an event that counts the tokens so far.
    pub fn write_counted(&self, text: &str, prompt: u32, generated: u32) {
        let choice = json!({ "index": 0, "delta": { "content": text }, "finish_reason": null });
        self.event(&json!({ "choices": [choice], "usage": usage(prompt, generated) }).to_string());
    }

    pub fn event(&self, data: &str) {
        self.raw(&format!("data: {data}\n\n"));
    }

    pub fn raw(&self, bytes: &str) {
        self.0.send(bytes.to_owned()).expect("the page still listens");
    }

    pub fn finish(self, reason: &str) {
        self.finish_with_usage(reason, 21, 34);
    }

    pub fn finish_with_usage(self, reason: &str, prompt: u32, generated: u32) {
        self.event(&json!({ "choices": [{ "index": 0, "delta": {}, "finish_reason": reason }] }).to_string());
        self.event(&json!({ "choices": [], "usage": usage(prompt, generated) }).to_string());
        self.event("[DONE]");
    }

    /// Waits until the page has closed the connection.
    pub fn wait_hung_up(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let closed = runtime.block_on(async { tokio::time::timeout(WAIT, self.0.closed()).await });
        closed.expect("the page hangs up");
    }
}

fn usage(prompt: u32, generated: u32) -> Value {
    let details = json!({ "cached_tokens": 16 });
    json!({ "prompt_tokens": prompt, "completion_tokens": generated, "prompt_tokens_details": details })
}

/// Serves a router on a free port while the runtime lives; returns its address.
pub fn serve(runtime: &Runtime, router: Router) -> String {
    let listener = runtime.block_on(Listener::bind("127.0.0.1", 0, None)).unwrap();
    let address = format!("http://{}/", listener.address().unwrap());
    runtime.spawn(listener.serve(router, std::future::pending(), Duration::ZERO));
    address
}

pub fn ready_status() -> Value {
    json!({
        "model": "test/tiny-model", "state": "ready", "reason": null, "progress": null, "context": 8192,
        "memory_bytes": 657_000_000, "resident_bytes": 402_500_000,
        "kv": { "tokens_total": 65_536, "tokens_used": 9_300, "tokens_cached": 21_000 },
        "requests": { "running": 3, "waiting": 1, "finished": 128 },
        "tokens": { "prompt_total": 40_210, "generated_total": 18_544 },
        "ranks": [],
        "uptime_s": 4521.5,
        "sampling_defaults": {
            "temperature": 0.7, "top_p": 0.949_999_988_079_071, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0,
        },
    })
}

/// The status of a model with two ranks.
pub fn shared_status() -> Value {
    let rank = |rank: u32, wait_s: f64| {
        json!({
            "rank": rank, "ready": true, "state": "ready", "pid": 4_100 + rank, "restarts": rank, "weight_bytes": 310_000_000,
            "kv_bytes": 40_000_000, "resident_bytes": 402_500_000, "steps": 900, "step_s": 40.0, "wait_s": wait_s,
        })
    };
    let mut status = ready_status();
    status["ranks"] = json!([rank(0, 1.2), rank(1, 0.5)]);
    status
}

async fn chat(State(script): State<Script>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    let (answer, answered) = oneshot::channel();
    let key = headers.get("authorization").map(|value| value.to_str().unwrap().to_owned());
    script.asked.send(Asked { body, key, answer }).unwrap();
    answered.await.unwrap_or_else(|_| StatusCode::IM_A_TEAPOT.into_response())
}

/// Each character is a token.
async fn tokenize(Json(body): Json<Value>) -> Json<Value> {
    let messages = body["messages"].as_array().unwrap();
    let count: usize = messages.iter().map(|message| message["content"].as_str().unwrap().chars().count()).sum();
    Json(json!({ "count": count, "max_model_len": 1000, "tokens": [] }))
}

/// The cluster of a model on three machines, and two that are not used.
pub fn chain_of_three() -> Value {
    let stage = |index: u32, name: &str, address: Value, layers: Value| {
        json!({
            "index": index, "name": name, "coordinator": address.is_null(), "address": address, "layers": layers,
            "level": "avx512", "threads": 8, "ranks": 1, "compute_s": 0.003_21,
            "memory": {
                "weight_bytes": 1_500_000_000_u64, "kv_bytes": 400_000_000, "working_bytes": 100_000_000,
                "used_bytes": 2_000_000_000_u64, "free_bytes": 6_000_000_000_u64,
            },
            "hop": { "seconds": 0.000_45, "round_trip_s": 0.000_3, "bytes": 1_048_576 },
        })
    };
    let node = |name: Value, address: &str, state: &str, reason: Value| {
        json!({
            "name": name, "address": address, "state": state, "reason": reason, "level": "avx2", "threads": 4,
            "memory_bytes": 4_000_000_000_u64, "round_trip_s": 0.002,
        })
    };
    json!({
        "kind": "chain", "state": "ready", "reason": null, "waiting": null, "model": "test/tiny-model", "layers": 30,
        "chains": 1, "bits": "same",
        "speed": {
            "tokens_per_s": 41.5, "answer_tokens_per_s": 43.25, "predicted_tokens_per_s": 45.0,
            "predicted_batch_tokens_per_s": 160.0, "predicted_batch": 16,
        },
        "steps": { "count": 1234, "seconds": 0.011_5, "between_s": 0.001_8 },
        "stages": [
            stage(0, "this machine", Value::Null, json!({ "start": 0, "end": 10 })),
            stage(1, "attic", json!("10.0.0.2:7420"), json!({ "start": 10, "end": 18 })),
            stage(2, "cellar", json!("10.0.0.3:7420"), json!({ "start": 18, "end": 30 })),
        ],
        "nodes": [
            node(json!("attic"), "10.0.0.2:7420", "used", Value::Null),
            node(json!("cellar"), "10.0.0.3:7420", "used", Value::Null),
            node(json!("old laptop"), "10.0.0.4:7420", "spare", json!("a chain with it is slower")),
            node(Value::Null, "10.0.0.5:7420", "failed", json!("it has another key")),
        ],
        "ranks": [],
    })
}

/// A swarm: a chain of two peers, the second of which gets its rows through the server, and three peers that are not used.
pub fn swarm_of_five() -> Value {
    let stage = |index: u32, name: &str, address: Value, layers: Value, way: &str, peer: Value| {
        json!({
            "index": index, "name": name, "coordinator": peer.is_null(), "address": address, "layers": layers,
            "level": null, "threads": null, "ranks": null, "compute_s": 0.012_5, "memory": null,
            "hop": { "seconds": 0.020_4, "round_trip_s": 0.039_7, "bytes": 1_048_576, "way": way }, "peer": peer,
        })
    };
    let peer = |id: &str, reach: &str, failures: u32| {
        json!({
            "id": id, "reach": reach, "round_trip_s": 0.040_1, "queue_s": 0.000_21, "runs": 420, "sent_bytes": 4_200_000,
            "returned_bytes": 3_900_000, "failures": failures, "checks": 7, "differences": 0,
        })
    };
    let node = |id: &str, state: &str, reason: Value, service: &str, avoided: bool| {
        json!({
            "name": &id[id.len() - 8..], "address": if avoided { Value::Null } else { json!("/ip4/203.0.113.7/udp/4101/quic-v1") },
            "state": state, "reason": reason, "level": null, "threads": null, "memory_bytes": null, "round_trip_s": 0.08,
            "peer": {
                "id": id, "reach": "relayed", "score": 0.5, "avoided": avoided, "failures": u32::from(avoided), "checks": 0,
                "differences": 0, "block": {
                    "layers": { "start": 8, "end": 16 }, "state": service, "tokens_free": 16_384, "layer_s": 0.001_5,
                    "layer_tokens_per_s": 900.0, "queue_s": 0.0,
                },
            },
        })
    };
    let (first, second) =
        ("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6attic", "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Ncellar");
    let relayed = "/ip4/198.51.100.4/tcp/4101/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN/p2p-circuit";
    let layers = |start: u32, end: u32| json!({ "start": start, "end": end });
    let mut own = stage(0, "this machine", Value::Null, Value::Null, "direct", Value::Null);
    (own["level"], own["threads"], own["ranks"], own["compute_s"]) = (json!("avx512"), json!(8), json!(1), Value::Null);
    let mut unknown =
        node("12D3KooWSHj3RRbBjD15g6wekV8y3mm57Pobmps2g2WJ6bootstrap", "spare", Value::Null, "serving", false);
    (unknown["reason"], unknown["peer"]["block"]) = (json!("it serves no layers of this model"), Value::Null);
    json!({
        "kind": "swarm", "state": "ready", "reason": null, "waiting": null, "model": "test/tiny-model", "layers": 30,
        "chains": 12, "bits": null,
        "speed": {
            "tokens_per_s": 8.5, "answer_tokens_per_s": 9.25, "predicted_tokens_per_s": 9.5,
            "predicted_batch_tokens_per_s": null, "predicted_batch": null,
        },
        "steps": { "count": 1234, "seconds": 0.105, "between_s": 0.08 },
        "stages": [
            own,
            stage(1, "2kj6attic", json!("/ip4/203.0.113.5/tcp/4101"), layers(0, 16), "coordinator", peer(first, "direct", 0)),
            stage(2, "1Ncellar", json!(relayed), layers(16, 30), "direct", peer(second, "relayed", 2)),
        ],
        "nodes": [
            node(first, "used", Value::Null, "serving", false),
            node(second, "used", Value::Null, "serving", false),
            node("12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kLoading1", "spare", json!("its layers are loading"), "loading", false),
            node("12D3KooWH3uVF6wv47WnArKHk5p6cvgCJEb74UTmxztmQEvilPeer", "failed", json!("it returned malformed messages or wrong results; it is avoided (score 4.0)"), "serving", true),
            unknown,
        ],
        "swarm": {
            "peers": 4, "sessions": 3, "replaced": 2, "replace_s": 0.35, "checks": 40, "differences": 1, "identical": 38,
            "reach": "direct",
        },
        "ranks": [],
    })
}

async fn show_invitation(State(script): State<Script>) -> Json<Value> {
    Json(script.invitation.lock().unwrap().clone())
}

async fn list_models(State(script): State<Script>) -> Json<Value> {
    Json(json!({ "object": "list", "data": script.models.lock().unwrap().clone() }))
}

async fn report_cluster(State(script): State<Script>) -> (StatusCode, Json<Value>) {
    let (code, body) = script.cluster.lock().unwrap().clone();
    (code, Json(body))
}

async fn report(State(script): State<Script>) -> (StatusCode, Json<Value>) {
    let (code, body) = script.status.lock().unwrap().clone();
    (code, Json(body))
}
