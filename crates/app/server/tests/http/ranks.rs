//! Tests of a model that loses its processes and recovers, as clients and operators see it.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{Method, StatusCode};
use engine::{EngineOptions, EngineStats};
use serde_json::{Value, json};
use server::ServedModel;

use crate::client::{Answer, Client, named_events, wait_until};
use testing::fragile::{Fragile, Switch, WHY};
use testing::served_model;

/// A server whose requests wait up to `rebuild_timeout` for lost ranks.
fn fragile(rebuild_timeout: Duration) -> (Client, Arc<ServedModel>, Switch) {
    let switch = Switch::default();
    let options = EngineOptions { rebuild_timeout, ..EngineOptions::default() };
    let served = Arc::new(served_model::fresh_on(options, |local| Fragile::new(local, &switch)));
    (Client::of(&served_model::ready(served_model::config(), Arc::clone(&served))), served, switch)
}

/// The response of `/ready`, once it has this status.
async fn until_ready_says(client: &Client, status: StatusCode) -> Answer {
    let mut answer = client.get("/ready").await;
    wait_until("/ready has the status", async || {
        answer = client.get("/ready").await;
        answer.status == status
    })
    .await;
    answer
}

/// Repairs the executor once `/ready` reports the loss, and waits until `/ready` reports the recovery.
async fn recover(client: &Client, switch: &Switch) {
    until_ready_says(client, StatusCode::SERVICE_UNAVAILABLE).await;
    switch.mend();
    until_ready_says(client, StatusCode::OK).await;
}

/// Repairs the executor as soon as the engine's counters show the loss.
async fn mend_when(served: &ServedModel, switch: &Switch, noticed: impl Fn(&EngineStats) -> bool) {
    wait_until("the engine notices the loss", async || noticed(&served.service.stats())).await;
    switch.mend();
}

const LONG: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn while_a_rank_is_away_the_server_is_not_ready_and_requests_wait() {
    let (client, served, switch) = fragile(LONG);
    assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    switch.lose();
    let ready = until_ready_says(&client, StatusCode::SERVICE_UNAVAILABLE).await;
    assert!(ready.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(ready.json()["state"], "rebuilding");
    assert!(ready.json()["reason"].as_str().unwrap().contains(WHY), "{}", ready.text());
    assert_eq!(client.get("/health").await.status, StatusCode::OK);
    let status = client.get("/status").await.json();
    assert_eq!((&status["state"], &status["ranks"][1]["state"]), (&json!("rebuilding"), &json!("absent")));
    assert!(client.get("/v1/models").await.json()["data"][0]["max_model_len"].is_number());

    let ask = client.post("/v1/completions", json!({"prompt": "a river", "max_tokens": 5, "ignore_eos": true}));
    let (answer, ()) = tokio::join!(ask, mend_when(&served, &switch, |stats| stats.waiting > 0));
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    until_ready_says(&client, StatusCode::OK).await;
}

#[tokio::test]
async fn an_answer_that_lost_its_rank_goes_on_where_it_was() {
    let (client, served, switch) = fragile(LONG);
    let body = json!({"prompt": "a river", "max_tokens": 40, "ignore_eos": true, "temperature": 0});
    let whole = client.post("/v1/completions", body.clone()).await;
    switch.lose_after(10);
    let ask = client.post("/v1/completions", body);
    let (answer, ()) = tokio::join!(ask, mend_when(&served, &switch, |stats| stats.replays > 0));
    assert_eq!(answer["choices"], whole["choices"]);
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.contains("consort_replays_total{model=\"tiny-qwen3\"} 1\n"), "{metrics}");
}

#[tokio::test]
async fn who_waited_in_vain_is_told_to_come_back() {
    let (client, _served, switch) = fragile(Duration::ZERO);
    let chat = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 20});
    for (path, body, anthropic) in [
        ("/v1/chat/completions", chat.clone(), false),
        ("/v1/completions", json!({"prompt": "x"}), false),
        ("/v1/responses", json!({"model": "tiny", "input": "x"}), false),
        ("/v1/embeddings", json!({"input": "x"}), false),
        ("/v1/messages", json!({"model": "tiny", "messages": chat["messages"], "max_tokens": 20}), true),
    ] {
        // The first request fails in its step; the second one is refused.
        switch.lose_after(0);
        for _ in 0..2 {
            let answer = client.call(Method::POST, path, body.to_string()).await;
            assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{path}: {}", answer.text());
            assert!(answer.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
            let error = &answer.json()["error"];
            assert!(error["message"].as_str().unwrap().contains(WHY), "{path}: {error}");
            if anthropic {
                assert_eq!(error["type"], "overloaded_error");
            } else {
                assert_eq!((&error["type"], &error["code"]), (&json!("service_unavailable"), &json!("rank_lost")));
            }
        }
        recover(&client, &switch).await;
    }
}

#[tokio::test]
async fn a_loss_in_mid_stream_is_an_error_event() {
    let (client, _served, switch) = fragile(Duration::ZERO);
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 40, "ignore_eos": true})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 40, "ignore_eos": true})),
    ] {
        switch.lose_after(4);
        let mut body = body;
        body["stream"] = true.into();
        let answer = client.call(Method::POST, path, body.to_string()).await;
        assert_eq!(answer.status, StatusCode::OK);
        let text = answer.text();
        let events: Vec<&str> = text.split_terminator("\n\n").collect();
        assert!(events.len() > 1, "{text}");
        let last: Value = serde_json::from_str(events.last().unwrap().strip_prefix("data: ").unwrap()).unwrap();
        let error = &last["error"];
        assert_eq!((&error["type"], &error["code"]), (&json!("service_unavailable"), &json!("rank_lost")), "{text}");
        recover(&client, &switch).await;
    }

    switch.lose_after(2);
    let message = json!({"model": "tiny", "messages": messages, "max_tokens": 40});
    let (name, event) = named_events(&client, "/v1/messages", message).await.pop().unwrap();
    assert_eq!((name.as_str(), &event["error"]["type"]), ("error", &json!("overloaded_error")));
    recover(&client, &switch).await;

    switch.lose_after(2);
    let (name, event) =
        named_events(&client, "/v1/responses", json!({"model": "tiny", "input": "x", "max_output_tokens": 40}))
            .await
            .pop()
            .unwrap();
    assert_eq!(name, "response.failed");
    let error = &event["response"]["error"];
    assert_eq!(error["code"], "rank_lost", "{event}");
    assert!(error["message"].as_str().unwrap().contains(WHY), "{event}");
}

#[tokio::test]
async fn ranks_are_told_to_operators() {
    let (client, _served, switch) = fragile(LONG);
    let status = client.get("/status").await.json();
    let rank = json!({
        "rank": 1, "ready": true, "state": "ready", "pid": 4001, "restarts": 0, "weight_bytes": 3 << 20, "kv_bytes": 1 << 20,
        "resident_bytes": 5 << 20, "steps": 200, "step_s": 4.0, "wait_s": 0.5
    });
    assert_eq!((&status["ranks"][1], status["ranks"].as_array().unwrap().len()), (&rank, 2));
    switch.lose();
    until_ready_says(&client, StatusCode::SERVICE_UNAVAILABLE).await;
    let text = client.get("/metrics").await.text();
    for (name, rank, value) in [
        ("rank_ready", 0, "1"),
        ("rank_ready", 1, "0"),
        ("rank_restarts_total", 1, "1"),
        ("rank_weight_bytes", 0, "3145728"),
        ("rank_steps_total", 0, "200"),
        ("rank_step_seconds_total", 0, "4.0"),
        ("rank_collective_wait_seconds_total", 1, "0.5"),
    ] {
        let line = format!("consort_{name}{{model=\"tiny-qwen3\",rank=\"{rank}\"}} {value}");
        assert!(text.lines().any(|own| own == line), "{line} is missing:\n{text}");
    }
    let alone = Client::new();
    assert_eq!(alone.get("/status").await.json()["ranks"], json!([]));
    assert!(!alone.get("/metrics").await.text().contains("rank="));
}
