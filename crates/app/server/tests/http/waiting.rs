//! Streams of requests whose prompt is not computed yet.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use engine::EngineOptions;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use server::Config;

use crate::client::Client;
use testing::fragile::{Fragile, Switch};
use testing::served_model::{self, MODEL};

/// Sends a request to a model that computes nothing, and lets it compute once the stream contains `wait` three times.
/// Returns all that the client received.
async fn stream_that_waits(path: &str, mut body: Value, wait: &str) -> String {
    let switch = Switch::default();
    let options = EngineOptions { rebuild_timeout: Duration::from_secs(3600), ..EngineOptions::default() };
    let served = Arc::new(served_model::fresh_on(options, |local| Fragile::new(local, &switch)));
    let config = Config { keep_alive: Duration::from_millis(1), ..served_model::config() };
    let client = Client::of(&served_model::ready(config, served));
    switch.lose();
    body["stream"] = true.into();
    let response = client.send(Method::POST, path, body.to_string()).await;
    let (mut stream, mut received) = (response.into_body(), String::new());
    while let Some(frame) = stream.frame().await {
        received += std::str::from_utf8(&frame.unwrap().into_data().unwrap()).unwrap();
        if received.matches(wait).count() == 3 {
            switch.mend();
        }
    }
    received
}

fn names(received: &str) -> Vec<&str> {
    received.lines().filter_map(|line| line.strip_prefix("event: ")).collect()
}

#[tokio::test]
async fn a_message_begins_before_its_prompt_is_computed_and_pings_follow() {
    let body = json!({"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let received = stream_that_waits("/v1/messages", body, "event: ping\n").await;
    let names = names(&received);
    assert_eq!(names[..4], ["message_start", "ping", "ping", "ping"]);
    assert_eq!(names.last(), Some(&"message_stop"));
    let event = |name: &str| -> Value {
        let data = received.split(&format!("event: {name}\ndata: ")).nth(1).unwrap().lines().next().unwrap();
        serde_json::from_str(data).unwrap()
    };
    let (start, end) = (&event("message_start")["message"]["usage"], &event("message_delta")["usage"]);
    assert!(start["input_tokens"].as_u64().unwrap() > 0);
    assert_eq!((&start["input_tokens"], &end["output_tokens"]), (&end["input_tokens"], &json!(2)));
}

#[tokio::test]
async fn a_response_begins_before_its_prompt_is_computed_and_stays_in_progress() {
    let body = json!({"model": MODEL, "max_output_tokens": 2, "input": "hello"});
    let received = stream_that_waits("/v1/responses", body, "event: response.in_progress\n").await;
    let names = names(&received);
    assert_eq!(
        names[..4],
        ["response.created", "response.in_progress", "response.in_progress", "response.in_progress"]
    );
    assert_eq!(names.last(), Some(&"response.incomplete"));
    let numbers = received.lines().filter_map(|line| line.strip_prefix("data: "));
    let numbers = numbers.map(|data| serde_json::from_str::<Value>(data).unwrap()["sequence_number"].as_u64());
    assert!(numbers.enumerate().all(|(index, number)| number == Some(index as u64)));
}

#[tokio::test]
async fn a_chat_begins_before_its_prompt_is_computed_and_comments_follow() {
    let body = json!({"max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]});
    let received = stream_that_waits("/v1/chat/completions", body, ": still here\n\n").await;
    assert!(received.starts_with("data: {") && received.ends_with("data: [DONE]\n\n"), "{received}");
}
