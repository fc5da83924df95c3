use axum::http::Method;
use serde_json::{Value, json};

use crate::client::{Client, named_events};
use testing::served_model::MODEL;

const MESSAGES: &str = "/v1/messages";

fn ask(fields: Value) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false});
    let mut body = json!({
        "model": MODEL, "max_tokens": 200, "temperature": 0,
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "thinking": {"type": "disabled"},
        "tools": [{"name": "weather", "input_schema": city}],
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// The message that a client builds from the events, and the event names.
async fn streamed(client: &Client, body: Value) -> (Value, Vec<String>) {
    let events = named_events(client, MESSAGES, body).await;
    let mut message = events[0].1["message"].clone();
    for (name, event) in &events[1..] {
        assert_eq!(event["type"], **name);
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match name.as_str() {
            "content_block_start" => {
                assert_eq!(index, message["content"].as_array().unwrap().len());
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][index], &event["delta"]);
                let (key, piece) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "input_json_delta" => ("json", &delta["partial_json"]),
                    other => panic!("{other}"),
                };
                block[key] = json!(block[key].as_str().unwrap_or_default().to_owned() + piece.as_str().unwrap());
            }
            "message_delta" => {
                for (key, value) in event["delta"].as_object().unwrap() {
                    message[key] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "ping" | "content_block_stop" | "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    for block in message["content"].as_array_mut().unwrap() {
        if let Some(json) = block.as_object_mut().unwrap().remove("json") {
            block["input"] = serde_json::from_str(json.as_str().unwrap()).unwrap();
        }
    }
    (message, events.into_iter().map(|(name, _)| name).collect())
}

/// Removes ids and cache counts, which differ between requests.
fn without_what_varies(mut message: Value) -> Value {
    message["id"].take();
    let usage = message["usage"].take();
    let count = |name: &str| usage[name].as_u64().unwrap();
    message["usage"] = json!([count("input_tokens") + count("cache_read_input_tokens"), count("output_tokens")]);
    for block in message["content"].as_array_mut().unwrap() {
        if let Some(id) = block.get_mut("id") {
            assert!(id.take().as_str().unwrap().starts_with("toolu_"));
        }
    }
    message
}

#[tokio::test]
async fn events_add_up_to_the_message_that_is_given_whole() {
    let client = Client::new();
    let call = json!({"tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    for (fields, stop_reason) in [(json!({"max_tokens": 9}), "max_tokens"), (call, "tool_use")] {
        let whole = client.post(MESSAGES, ask(fields.clone())).await;
        assert_eq!(whole["stop_reason"], stop_reason, "{whole}");
        let (message, names) = streamed(&client, ask(fields)).await;
        assert_eq!(without_what_varies(message), without_what_varies(whole));
        assert_eq!(names[..2], ["message_start", "ping"]);
        assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    }
}

#[tokio::test]
async fn a_tool_is_used_with_input_that_follows_its_schema() {
    let choice = json!({"tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": true}});
    let message = Client::new().post(MESSAGES, ask(choice)).await;
    let uses: Vec<_> =
        message["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use").collect();
    assert_eq!(uses.len(), 1, "{message}");
    assert_eq!(uses[0]["name"], "weather");
    assert!(["Paris", "Rome"].contains(&uses[0]["input"]["city"].as_str().unwrap()), "{message}");
}

#[tokio::test]
async fn the_stop_sequence_that_came_is_named() {
    let client = Client::new();
    let whole = client.post(MESSAGES, ask(json!({"max_tokens": 12, "tools": []}))).await;
    let text = whole["content"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(2).take(2).collect();
    let fields = json!({"max_tokens": 12, "tools": [], "stop_sequences": ["never", stop]});
    let message = client.post(MESSAGES, ask(fields)).await;
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
    assert_eq!(message["content"][0]["text"].as_str().unwrap_or_default(), &text[..text.find(&stop).unwrap()]);
}

#[tokio::test]
async fn tokens_are_counted_as_they_are_used() {
    let client = Client::new();
    let body = ask(json!({"max_tokens": 1, "system": "Be brief."}));
    let counted = client.post("/v1/messages/count_tokens", body.clone()).await;
    let usage = client.post(MESSAGES, body).await["usage"].clone();
    let used = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(counted, json!({"input_tokens": used}));
}

#[tokio::test]
async fn errors_have_anthropics_envelope() {
    let client = Client::new();
    let cases = [
        (ask(json!({"model": "nobody"})).to_string(), 404, "not_found_error"),
        (ask(json!({"messages": []})).to_string(), 400, "invalid_request_error"),
        (ask(json!({"max_tokens": "many"})).to_string(), 400, "invalid_request_error"),
        (ask(json!({"temperature": 1.5})).to_string(), 400, "invalid_request_error"),
        (ask(json!({"tool_choice": {"type": "tool", "name": "fly"}})).to_string(), 400, "invalid_request_error"),
        ("{".to_owned(), 400, "invalid_request_error"),
    ];
    for (body, status, kind) in cases {
        let answer = client.call(Method::POST, MESSAGES, body.clone()).await;
        assert_eq!(answer.status.as_u16(), status, "{body}: {}", answer.text());
        assert_eq!(
            (&answer.json()["type"], &answer.json()["error"]["type"]),
            (&json!("error"), &json!(kind)),
            "{body}"
        );
    }
    let answer = client.get(MESSAGES).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["type"]), (405, &json!("error")));
}

#[tokio::test]
async fn tools_of_anthropics_services_are_left_out() {
    let client = Client::new();
    let count = async |tools: Value| {
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": tools});
        client.post("/v1/messages/count_tokens", body).await["input_tokens"].as_u64().unwrap()
    };
    let search = json!({"type": "web_search_20250305", "name": "web_search", "max_uses": 3});
    assert_eq!(count(json!([search])).await, count(json!([])).await);
}

#[tokio::test]
async fn the_model_is_listed_once_in_the_form_of_the_client() {
    let listed = Client::new().get("/v1/models").await.json();
    assert_eq!((&listed["object"], listed["data"].as_array().unwrap().len()), (&json!("list"), 1));
    assert_eq!(listed["data"][0]["id"], MODEL);
    let client = Client::new().with_header("anthropic-version", "2023-06-01");
    let listed = client.get("/v1/models").await.json();
    assert_eq!(
        (&listed["first_id"], &listed["last_id"], &listed["has_more"]),
        (&json!(MODEL), &json!(MODEL), &json!(false))
    );
    let model = &listed["data"][0];
    assert_eq!((&model["type"], &model["id"], &model["display_name"]), (&json!("model"), &json!(MODEL), &json!(MODEL)));
    assert!(model["created_at"].as_str().unwrap().starts_with("20"), "{model}");
    assert_eq!(client.get("/v1/models/tiny").await.json()["id"], "tiny");
    let unknown = client.get("/v1/models/gpt-0").await;
    assert_eq!((unknown.status.as_u16(), &unknown.json()["type"]), (404, &json!("error")));
}

#[tokio::test]
async fn messages_without_content_are_refused() {
    let client = Client::new();
    let body = json!({"model": MODEL, "messages": [{"role": "system", "content": []}]});
    let (status, error) = client.error("/v1/messages/count_tokens", &body.to_string()).await;
    assert_eq!((status, &error["message"]), (400, &json!("no message has content")));
}
