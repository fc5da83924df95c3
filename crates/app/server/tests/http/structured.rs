use std::sync::Arc;
use std::time::Instant;

use axum::http::Method;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::client::Client;

const CHAT: &str = "/v1/chat/completions";

/// The output of a random model with this constraint.
async fn answer(fields: Value, seed: u64) -> (String, String) {
    let mut body = json!({
        "messages": [{"role": "user", "content": "Tell me"}],
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 1, "seed": seed, "max_tokens": 400,
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let answer = Client::new().post(CHAT, body).await;
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap().to_owned();
    (text, choice["finish_reason"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn an_answer_follows_its_schema() {
    let schema = json!({
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["size", "count"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": true}});
    for seed in 0..4 {
        let (text, finish) = answer(json!({"response_format": format}), seed).await;
        assert_eq!(finish, "stop", "{text}");
        let thing: Value = serde_json::from_str(&text).unwrap();
        assert!(["small", "large"].contains(&thing["size"].as_str().unwrap()), "{text}");
        assert!(thing["count"].as_u64().unwrap() <= 99, "{text}");
    }
}

#[tokio::test]
async fn an_answer_is_an_object_as_far_as_it_goes() {
    let (text, _) = answer(json!({"response_format": {"type": "json_object"}}), 3).await;
    assert!(text.trim_start().starts_with('{'), "{text}");
}

#[tokio::test]
async fn an_answer_matches_its_expression_in_both_of_vllm_s_ways() {
    for fields in [json!({"structured_outputs": {"regex": "[a-c]{5}"}}), json!({"guided_regex": "[a-c]{5}"})] {
        let (text, finish) = answer(fields, 5).await;
        assert!(text.len() == 5 && text.chars().all(|c| ('a'..='c').contains(&c)), "{text}");
        assert_eq!(finish, "stop");
    }
}

#[tokio::test]
async fn an_answer_is_one_of_the_choices_or_follows_a_grammar() {
    let (text, _) = answer(json!({"structured_outputs": {"choice": ["yes", "no \"maybe\""]}}), 6).await;
    assert!(["yes", "no \"maybe\""].contains(&text.as_str()), "{text}");
    let grammar = "start: \"<\" /[0-9]/ \">\"";
    let (text, _) = answer(json!({"structured_outputs": {"grammar": grammar}}), 7).await;
    assert!(text.len() == 3 && text.starts_with('<') && text.ends_with('>'), "{text}");
}

#[tokio::test]
async fn a_form_that_cannot_be_is_refused() {
    let client = Client::new();
    let bodies = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
        json!({"structured_outputs": {"regex": "("}}),
        json!({"structured_outputs": {"grammar": "start: undefined_rule"}}),
        json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        json!({"response_format": {"type": "yaml"}}),
        // These contradict themselves.
        json!({"structured_outputs": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}}),
        json!({"structured_outputs": {"json": {"type": "string", "minLength": 5, "maxLength": 2}}}),
        json!({"structured_outputs": {"regex": r"[^\s\S]"}}),
        // This one only after its first tokens.
        json!({"structured_outputs": {"json": {"type": "object", "required": ["a"], "properties": {
            "a": {"type": "string", "pattern": "^x$", "minLength": 2}}}}}),
    ];
    for mut body in bodies {
        body["messages"] = json!([{"role": "user", "content": "x"}]);
        body["chat_template_kwargs"] = json!({"enable_thinking": false});
        let (status, error) = client.error(CHAT, &body.to_string()).await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{body}");
    }
}

/// Schemas of few bytes that take minutes and gigabytes if nothing limits them.
fn hostile_schemas() -> Vec<Value> {
    let lengths: Vec<Value> = (0..60).map(|n| json!({"minLength": n})).collect();
    let long = json!({"type": "string", "pattern": format!("^{}$", "x".repeat(60_000))});
    vec![
        json!({"type": "integer", "multipleOf": 1_000_003}),
        json!({"type": "integer", "multipleOf": 100_000_007}),
        json!({"type": "object", "properties": {"n": {"multipleOf": 1_000_003}}, "required": ["n"]}),
        json!({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        json!({"allOf": [{"anyOf": lengths}, long]}),
    ]
}

/// Prints how long each kind of request took: `cargo test -p server --test http hostile -- --nocapture`.
#[test]
fn hostile_schemas_are_refused_and_the_requests_beside_them_answered() {
    // As few threads for blocking work as a server has on a small machine.
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Arc::new(Client::new());
        let ask = |fields: Value| {
            let mut body = json!({
                "messages": [{"role": "user", "content": "x"}], "max_tokens": 4,
                "chat_template_kwargs": {"enable_thinking": false},
            });
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let client = Arc::clone(&client);
            tokio::spawn(async move {
                let began = Instant::now();
                let answer = client.call(Method::POST, CHAT, body.to_string()).await;
                (answer.status.as_u16(), answer.text(), began.elapsed())
            })
        };
        let hostile: Vec<_> = hostile_schemas().into_iter().cycle().take(40).collect();
        let hostile: Vec<_> =
            hostile.into_iter().map(|json| ask(json!({"structured_outputs": {"json": json}}))).collect();
        let schema = json!({"structured_outputs": {"regex": "[ab]{2}"}});
        let ordinary: Vec<_> = (0..10).map(|n| ask(if n % 2 == 0 { json!({}) } else { schema.clone() })).collect();
        // The last of many that take long may not get a thread in time.
        for (kind, statuses, requests) in [("ordinary", &[200][..], ordinary), ("hostile", &[400, 503], hostile)] {
            let mut times = Vec::new();
            for answer in join_all(requests).await {
                let (got, text, time) = answer.unwrap();
                assert!(statuses.contains(&got), "{got}: {text}");
                times.push(time);
            }
            println!("{kind}: the slowest of {} took {:?}", times.len(), times.iter().max().unwrap());
        }
    });
}
