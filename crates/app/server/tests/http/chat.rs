use serde_json::{Value, json};

use crate::client::Client;

const CHAT: &str = "/v1/chat/completions";

/// A greedy request with these fields added.
fn ask(fields: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Tell me"}], "temperature": 0, "max_tokens": 12});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[tokio::test]
async fn an_answer_has_its_text_its_reason_and_its_usage() {
    let answer = Client::new().post(CHAT, ask(json!({"ignore_eos": true}))).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny-qwen3");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(!text(&answer).is_empty());
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"], sum);
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let client = Client::new();
    let whole = client.post(CHAT, ask(json!({"ignore_eos": true, "n": 2, "seed": 7, "temperature": 1}))).await;
    let fields =
        json!({"ignore_eos": true, "n": 2, "seed": 7, "temperature": 1, "stream_options": {"include_usage": true}});
    let events = client.stream(CHAT, ask(fields)).await;
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk["id"] == last["id"]));
    for index in 0..2 {
        let of_choice: Vec<_> =
            chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == index).collect();
        assert_eq!(of_choice[0]["delta"]["role"], "assistant");
        let said: String = of_choice.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(said, whole["choices"][index]["message"]["content"]);
        assert_eq!(of_choice.last().unwrap()["finish_reason"], "length");
        assert!(of_choice.iter().rev().skip(1).all(|choice| choice["finish_reason"].is_null()));
    }
}

#[tokio::test]
async fn every_event_counts_the_tokens_so_far_if_asked_to() {
    let client = Client::new();
    for (path, prompt) in [(CHAT, json!({})), ("/v1/completions", json!({"prompt": "Tell me"}))] {
        let usage = json!({"include_usage": true, "continuous_usage_stats": true});
        let mut body = ask(json!({"ignore_eos": true, "stream_options": usage}));
        body.as_object_mut().unwrap().extend(prompt.as_object().unwrap().clone());
        let events = client.stream(path, body).await;
        let count = |event: &Value| event["usage"]["completion_tokens"].as_u64().unwrap();
        let counts: Vec<_> = events.iter().map(count).collect();
        assert!(counts.is_sorted() && counts[0] <= 1 && counts.contains(&6), "{path}: {counts:?}");
        assert_eq!(counts.last(), Some(&12), "{path}");
        assert!(events.iter().all(|event| event["usage"]["prompt_tokens"] == events[0]["usage"]["prompt_tokens"]));
    }
    // Without `include_usage` there is none.
    let events = client.stream(CHAT, ask(json!({"stream_options": {"continuous_usage_stats": true}}))).await;
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn the_same_seed_gives_the_same_answer_and_choices_differ() {
    let client = Client::new();
    let fields = json!({"seed": 42, "temperature": 1, "top_p": 1, "top_k": 0, "n": 3, "ignore_eos": true});
    let (first, second) = (client.post(CHAT, ask(fields.clone())).await, client.post(CHAT, ask(fields)).await);
    assert_eq!(first["choices"], second["choices"]);
    assert_eq!(first["choices"].as_array().unwrap().len(), 3);
    assert_ne!(first["choices"][0]["message"], first["choices"][1]["message"]);
    assert_eq!(first["usage"]["completion_tokens"], 36);
}

#[tokio::test]
async fn log_probabilities_come_with_each_token() {
    let client = Client::new();
    let fields = json!({"logprobs": true, "top_logprobs": 3, "ignore_eos": true});
    let answer = client.post(CHAT, ask(fields.clone())).await;
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 12);
    for token in &content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        // Greedy: the chosen token is the most probable one.
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"]);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let events = client.stream(CHAT, ask(fields)).await;
    let streamed = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array()).flatten();
    assert_eq!(streamed.cloned().collect::<Vec<_>>(), content);
}

#[tokio::test]
async fn a_stop_string_ends_the_answer_and_is_not_part_of_it() {
    let client = Client::new();
    let whole = client.post(CHAT, ask(json!({"ignore_eos": true}))).await;
    let whole = text(&whole);
    let middle = whole.char_indices().nth(whole.chars().count() / 2).unwrap().0;
    let stop: String = whole[middle..].chars().take(2).collect();
    let before = &whole[..whole.find(&stop).unwrap()];
    let answer = client.post(CHAT, ask(json!({"ignore_eos": true, "stop": stop}))).await;
    assert_eq!(text(&answer), before);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() <= 12);
}

#[tokio::test]
async fn stop_tokens_end_the_answer_but_not_too_early() {
    let client = Client::new();
    // The only token that can be sampled.
    let fields = json!({"logit_bias": {"65": 1e6}, "stop_token_ids": [65]});
    let answer = client.post(CHAT, ask(fields)).await;
    assert_eq!((&answer["usage"]["completion_tokens"], text(&answer)), (&json!(0), ""));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let fields = json!({"stop_token_ids": [65], "logit_bias": {"65": 50}, "min_tokens": 5});
    let answer = client.post(CHAT, ask(fields)).await;
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn a_bias_decides_which_token_is_chosen() {
    let answer = Client::new().post(CHAT, ask(json!({"logit_bias": {"70": 1e6}, "logprobs": true}))).await;
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(tokens.iter().all(|token| token["bytes"] == tokens[0]["bytes"]));
    assert_eq!(tokens.len(), 12);
}

#[tokio::test]
async fn content_may_be_text_or_parts_and_developers_are_heard() {
    let client = Client::new();
    let parts = json!([{"type": "text", "text": "Tell me"}]);
    let as_text = client.post(CHAT, ask(json!({}))).await;
    let as_parts = client.post(CHAT, ask(json!({"messages": [{"role": "user", "content": parts}]}))).await;
    assert_eq!(as_text["choices"], as_parts["choices"]);
    let with = |role: &str| json!({"messages": [{"role": role, "content": "Be brief"}, {"role": "user", "content": "Tell me"}]});
    let system = client.post(CHAT, ask(with("system"))).await;
    let developer = client.post(CHAT, ask(with("developer"))).await;
    assert_eq!(system["usage"]["prompt_tokens"], developer["usage"]["prompt_tokens"]);
    assert_eq!(system["choices"], developer["choices"]);
    assert!(system["usage"]["prompt_tokens"].as_u64() > as_text["usage"]["prompt_tokens"].as_u64());
}

#[tokio::test]
async fn the_template_sees_its_variables() {
    let client = Client::new();
    let thinking = client.post(CHAT, ask(json!({}))).await;
    let quiet = client.post(CHAT, ask(json!({"chat_template_kwargs": {"enable_thinking": false}}))).await;
    let effort = client.post(CHAT, ask(json!({"reasoning_effort": "none"}))).await;
    assert!(quiet["usage"]["prompt_tokens"].as_u64() > thinking["usage"]["prompt_tokens"].as_u64());
    assert_eq!(quiet["usage"]["prompt_tokens"], effort["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn a_prompt_that_was_seen_before_is_cached() {
    let client = Client::new();
    let long = json!({"messages": [{"role": "user", "content": "once upon a time ".repeat(12)}]});
    let first = client.post(CHAT, ask(long.clone())).await;
    let second = client.post(CHAT, ask(long)).await;
    assert_eq!(first["choices"], second["choices"]);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached(&second) >= 32 && cached(&second) < second["usage"]["prompt_tokens"].as_u64().unwrap());
}

#[tokio::test]
async fn an_alias_means_the_same_model_and_unknown_fields_are_ignored() {
    let fields = json!({"model": "tiny", "user": "me", "store": true, "metadata": {"a": "b"}, "made_up": [1]});
    let answer = Client::new().post(CHAT, ask(fields)).await;
    assert_eq!(answer["model"], "tiny-qwen3");
}
