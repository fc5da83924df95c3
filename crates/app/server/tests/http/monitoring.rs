use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use futures_util::StreamExt;
use serde_json::{Value, json};
use server::LoadStage;

use crate::client::{Client, wait_until};
use testing::fragile::{Fragile, Switch};
use testing::served_model;

#[tokio::test]
async fn metrics_count_what_happened() {
    let mut served = served_model::fresh(Default::default());
    served.digest = Some("b3:12".to_owned());
    let served = Arc::new(served);
    let app = served_model::ready(served_model::config(), Arc::clone(&served));
    let client = Client::of(&app);
    client.post("/v1/completions", json!({"prompt": "a river", "max_tokens": 5, "ignore_eos": true})).await;
    // Counters are updated at the end of a step, just after the last token is sent.
    wait_until("nothing runs", async || served.service.stats().running == 0).await;
    let answer = client.get("/metrics").await;
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("application/openmetrics-text"));
    let text = answer.text();
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.split([' ', '{']).next() == Some(name));
        line.unwrap_or_else(|| panic!("{name} is missing:\n{text}")).rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("consort_requests_running"), 0.0);
    assert_eq!(value("consort_requests_waiting"), 0.0);
    assert_eq!(value("consort_kv_pages_used"), 0.0);
    assert!(value("consort_kv_pages") > 0.0);
    assert_eq!(value("consort_generated_tokens_total"), 5.0);
    assert_eq!(value("consort_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(value("consort_time_between_tokens_seconds_count"), 4.0);
    assert_eq!(value("consort_requests_finished_total"), 1.0);
    assert!(text.contains("model=\"tiny-qwen3\"") && text.contains("reason=\"length\""));
    assert!(value("consort_prefix_lookup_tokens_total") > 0.0);
    assert_eq!(value("consort_prompt_preparation_seconds_count"), 1.0);
    assert!(value("consort_descriptors") > 0.0);

    let status = client.get("/status").await.json();
    assert_eq!((&status["state"], &status["tokens"]["generated_total"]), (&json!("ready"), &json!(5)));
    assert_eq!(status["requests"], json!({"running": 0, "waiting": 0, "finished": 1}));
    assert_eq!((&status["kv"]["tokens_used"], &status["digest"]), (&json!(0), &json!("b3:12")));
    assert!(status["resident_bytes"].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{status}");

    // While requests may finish, the numbers stay.
    app.set_stage(LoadStage::Draining(Arc::downgrade(&served)));
    let status = client.get("/status").await.json();
    assert_eq!((&status["state"], &status["tokens"]["generated_total"]), (&json!("draining"), &json!(5)));
    assert_eq!(client.get("/ready").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(client.get("/metrics").await.status, StatusCode::OK);
    let (status, error) = client.error("/v1/completions", r#"{"prompt": "x"}"#).await;
    assert_eq!((status, &error["code"]), (503, &json!("shutting_down")));
}

#[tokio::test]
async fn hanging_up_frees_the_pages() {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    let client = Client::of(&served_model::ready(served_model::config(), Arc::clone(&served)));
    // The answers do not end before the client hangs up.
    switch.hold_after_with(5, 4);
    let body = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 800, "stream": true, "ignore_eos": true});
    let response = client.send(Method::POST, "/v1/completions", body.to_string()).await;
    assert_eq!(response.status(), StatusCode::OK);
    let mut frames = response.into_body().into_data_stream();
    frames.next().await.unwrap().unwrap();
    let total = served.service.stats().pages_total;
    // The engine publishes its numbers after the step whose tokens it has sent.
    wait_until("it runs", async || served.service.stats().pages_free < total).await;
    drop(frames);
    switch.release();
    let is_idle = async || {
        let stats = served.service.stats();
        stats.running == 0 && stats.waiting == 0 && stats.pages_free == total
    };
    wait_until("all pages are free", is_idle).await;
    assert_eq!(served.service.stats().finished.cancelled, 4);
}

#[tokio::test]
async fn a_stop_string_frees_the_pages_of_its_choice() {
    let served = Arc::new(served_model::fresh(Default::default()));
    let client = Client::of(&served_model::ready(served_model::config(), Arc::clone(&served)));
    let body = json!({"prompt": "a", "max_tokens": 800, "ignore_eos": true, "logit_bias": {"65": 1e6}, "logprobs": 0});
    let text = client.post("/v1/completions", json!({"prompt": "a", "max_tokens": 3, "logit_bias": {"65": 1e6}})).await;
    let mut body = body;
    body["stop"] = text["choices"][0]["text"].clone();
    let answer = client.post("/v1/completions", body).await;
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]), (&json!(""), &json!("stop")));
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let all_free = async || served.service.stats().pages_free == served.service.stats().pages_total;
    wait_until("all pages are free", all_free).await;
    assert!(!client.get("/metrics").await.text().contains("reason=\"cancelled\""), "nothing was lost");
}

#[tokio::test]
async fn every_response_has_an_id_and_the_document_tells_every_path() {
    let client = Client::new();
    let answer = client.get("/openapi.json").await;
    assert!(answer.headers["x-request-id"].to_str().unwrap().starts_with("req_"));
    assert_eq!(answer.headers["request-id"], answer.headers["x-request-id"]);
    let document = answer.json();
    let paths = document["paths"].as_object().unwrap();
    let expected = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/ready",
        "/metrics",
        "/status",
        "/v1/cluster",
        "/openapi.json",
    ];
    for path in expected {
        assert!(paths.contains_key(path), "{path} is missing");
    }
    for (path, item) in paths {
        for method in item.as_object().unwrap().keys() {
            let method: Method = method.to_uppercase().parse().unwrap();
            let answer = client.call(method, &path.replace("{model}", "tiny"), "{}").await;
            assert_ne!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{path}");
            // There is nothing with the id in the path, but there is the path.
            let is_missing = |code: &Value| {
                ["response_not_found", "answer_not_found", "no_cluster"].iter().any(|missing| code == missing)
            };
            let is_path = answer.status != StatusCode::NOT_FOUND || is_missing(&answer.json()["error"]["code"]);
            assert!(is_path, "{path}: {}", answer.text());
        }
    }
}

#[test]
fn a_server_that_takes_no_requests_is_not_ready() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.max_blocking_threads(1).enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let client = Client::new();
        assert_eq!(client.get("/ready").await.status, StatusCode::OK);
        // The thread that parses bodies is busy.
        let (release, released) = std::sync::mpsc::channel::<()>();
        let busy = tokio::task::spawn_blocking(move || released.recv());
        let seconds_pass = async {
            for _ in 0..10 {
                tokio::time::advance(Duration::from_secs(1)).await;
            }
        };
        let (ready, ()) = tokio::join!(client.get("/ready"), seconds_pass);
        assert_eq!(ready.status, StatusCode::SERVICE_UNAVAILABLE);
        let ready = ready.json();
        assert!(ready["reason"].as_str().unwrap().contains("takes no requests"), "{ready}");
        assert_eq!(client.get("/health").await.status, StatusCode::OK);
        drop(release);
        busy.await.unwrap().unwrap_err();
        assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    });
}
