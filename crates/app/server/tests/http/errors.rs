use axum::http::{Method, StatusCode};
use engine::{EventKind, EventSink};
use serde_json::{Value, json};
use server::{App, Config, LoadStage, Progress};

use crate::client::{Client, wait_until};
use testing::served_model::{self, MODEL};

const CHAT: &str = "/v1/chat/completions";
const USER: &str = r#"{"role": "user", "content": "x"}"#;

#[tokio::test]
async fn what_is_wrong_with_a_request_is_said_with_its_field() {
    let client = Client::new();
    let chat = |fields: &str| format!(r#"{{"messages": [{USER}], {fields}}}"#);
    let cases = [
        (CHAT, "{".to_owned(), "invalid_json", None),
        (CHAT, "[]".to_owned(), "invalid_type", None),
        (CHAT, "{}".to_owned(), "missing_required_parameter", Some("messages")),
        (CHAT, r#"{"messages": []}"#.to_owned(), "invalid_value", Some("messages")),
        (
            CHAT,
            r#"{"messages": [{"role": "king", "content": "x"}]}"#.to_owned(),
            "invalid_value",
            Some("messages[0].role"),
        ),
        (CHAT, r#"{"messages": [{"role": "user"}]}"#.to_owned(), "missing_content", Some("messages[0].content")),
        (
            CHAT,
            r#"{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}"#
                .to_owned(),
            "unsupported_content",
            Some("messages[0].content[0].type"),
        ),
        (CHAT, chat(r#""temperature": "hot""#), "invalid_type", Some("temperature")),
        (CHAT, chat(r#""temperature": -1"#), "invalid_value", Some("temperature")),
        (CHAT, chat(r#""temperature": 2.1"#), "invalid_value", Some("temperature")),
        (CHAT, chat(r#""top_p": 0"#), "invalid_value", Some("top_p")),
        (CHAT, chat(r#""n": 0"#), "invalid_value", Some("n")),
        (CHAT, chat(r#""n": 1000"#), "invalid_value", Some("n")),
        (CHAT, chat(r#""max_tokens": 0"#), "invalid_value", Some("max_tokens")),
        (CHAT, chat(r#""max_tokens": -3"#), "invalid_value", Some("max_tokens")),
        (CHAT, chat(r#""top_logprobs": 3"#), "invalid_value", Some("top_logprobs")),
        (CHAT, chat(r#""logprobs": true, "top_logprobs": 21"#), "invalid_value", Some("top_logprobs")),
        (CHAT, chat(r#""logit_bias": {"x": 1}"#), "invalid_value", Some("logit_bias")),
        (CHAT, chat(r#""logit_bias": {"99999": 1}"#), "invalid_value", Some("logit_bias")),
        (CHAT, chat(r#""stop": [""]"#), "invalid_value", Some("stop")),
        (CHAT, chat(r#""audio": {"voice": "x"}"#), "unsupported_parameter", Some("audio")),
        (CHAT, chat(r#""modalities": ["text", "audio"]"#), "unsupported_parameter", Some("modalities")),
        ("/v1/completions", r#"{"prompt": "x", "temperature": 3}"#.to_owned(), "invalid_value", Some("temperature")),
        ("/v1/completions", r#"{"prompt": "x", "suffix": "y"}"#.to_owned(), "unsupported_parameter", Some("suffix")),
        ("/v1/completions", r#"{"prompt": []}"#.to_owned(), "invalid_value", Some("prompt")),
        ("/v1/completions", r#"{"prompt": [9999999]}"#.to_owned(), "invalid_value", None),
        ("/v1/completions", r#"{"prompt": "x", "max_tokens": 0}"#.to_owned(), "invalid_value", Some("max_tokens")),
    ];
    for (path, body, code, param) in cases {
        let (status, error) = client.error(path, &body).await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{body}: {error}");
        assert_eq!((&error["code"], error["param"].as_str()), (&json!(code), param), "{body}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
}

/// What the template refuses is the client's fault; a template that fails or takes too much is the server's.
#[tokio::test]
async fn a_template_that_refuses_is_told_apart_from_one_that_is_broken() {
    let source = "{% set x = messages[0].content %}{% if x == 'no' %}{{ raise_exception('not now') }}{% endif %}\
        {% if x == 'bug' %}{{ x.y.z }}{% endif %}{% if x == 'grow' %}{{ 'x' * 10 ** 12 }}{% endif %}{{ x }}";
    let mut served = served_model::fresh(engine::EngineOptions::default());
    served.template = Some(text::ChatTemplate::new(source, "", "").unwrap());
    let client = Client::of(&served_model::ready(served_model::config(), std::sync::Arc::new(served)));
    for (content, status, code, message) in [
        ("no", 400, "invalid_value", "not now"),
        ("bug", 500, "chat_template_failed", "undefined"),
        ("grow", 500, "chat_template_failed", "limits"),
    ] {
        let body = json!({"messages": [{"role": "user", "content": content}]});
        let (got, error) = client.error(CHAT, &body.to_string()).await;
        assert_eq!((got, &error["code"]), (status, &json!(code)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
    client.post(CHAT, json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1})).await;
}

#[tokio::test]
async fn a_prompt_that_can_never_fit_is_refused_with_the_limit() {
    let client = Client::new();
    let body = json!({"prompt": "x ".repeat(2000), "max_tokens": 1});
    let (status, error) = client.error("/v1/completions", &body.to_string()).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")));
    let models = client.get("/v1/models").await.json();
    let context = models["data"][0]["max_model_len"].as_u64().unwrap();
    let message = error["message"].as_str().unwrap();
    let words = format!("This model's maximum context length is {context} tokens. However, ");
    assert!(message.starts_with(&words), "clients match these words: {message}");
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "x ".repeat(2000)}], "max_tokens": 1});
    let (_, error) = client.error("/v1/messages", &body.to_string()).await;
    assert!(error["message"].as_str().unwrap().starts_with("prompt is too long: "), "{error}");
}

#[tokio::test]
async fn a_model_that_is_not_here_is_not_found() {
    let client = Client::new();
    let body = format!(r#"{{"messages": [{USER}], "model": "gpt-0"}}"#);
    let (status, error) = client.error(CHAT, &body).await;
    assert_eq!((status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
    let answer = client.get("/v1/models/gpt-0").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    assert_eq!(client.get("/v1/models/tiny").await.json()["id"], "tiny");
}

#[tokio::test]
async fn what_a_client_sent_is_repeated_in_short() {
    let client = Client::new();
    let long = "x".repeat(1 << 20);
    let cases = [
        format!(r#"{{"messages": [{USER}], "model": "{long}"}}"#),
        format!(r#"{{"messages": [{{"role": "{long}", "content": "x"}}]}}"#),
        format!(r#"{{"messages": [{USER}], "temperature": "{long}"}}"#),
        format!(r#"{{"messages": [{USER}], "logit_bias": {{"{long}": 1}}}}"#),
        format!(r#"{{"messages": [{USER}], "logit_bias": {{"{long}": "y"}}}}"#),
    ];
    for body in cases {
        let (_, error) = client.error(CHAT, &body).await;
        let error = error.to_string();
        assert!(error.len() < 2000, "{} bytes: {}", error.len(), &error[..500]);
    }
    let answer = client.get(&format!("/{}", "x".repeat(60_000))).await;
    assert!(answer.bytes.len() < 1000);
}

#[tokio::test]
async fn unknown_paths_and_methods_have_an_envelope_too() {
    let client = Client::new();
    let answer = client.get("/v2/nothing").await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (StatusCode::NOT_FOUND, &json!("unknown_url")));
    let answer = client.get(CHAT).await;
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.headers["allow"], "POST");
    assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
}

#[tokio::test]
async fn a_body_must_be_json_and_not_too_long() {
    let client = Client::of(&served_model::ready(
        Config { body_bytes_max: 1000, ..served_model::config() },
        served_model::shared(),
    ));
    let (status, error) = client.error(CHAT, &format!(r#"{{"messages": "{}"}}"#, "x".repeat(1000))).await;
    assert_eq!((status, &error["type"]), (413, &json!("invalid_request_error")));
    for (media, status) in [("text/plain", 415), ("", 415), ("Application/JSON; charset=utf-8", 400)] {
        let (got, error) = Client::new()
            .with_header("content-type", media)
            .with_header("origin", "http://localhost")
            .error(CHAT, "{}")
            .await;
        assert_eq!((got, &error["type"]), (status, &json!("invalid_request_error")), "{media}");
    }
}

#[tokio::test]
async fn requests_are_told_to_come_back_while_the_model_loads() {
    let app = App::new(Config::new("soon"));
    let client = Client::of(&app);
    app.set_stage(LoadStage::Loading(Progress { doing: "loading its layers".to_owned(), done: 3, total: 12 }));
    let answer = client.call(Method::POST, CHAT, format!(r#"{{"messages": [{USER}]}}"#)).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(answer.json()["error"]["code"], "model_loading");
    let ready = client.get("/ready").await;
    assert_eq!(ready.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((&ready.json()["state"], &ready.json()["progress"]["fraction"]), (&json!("loading"), &json!(0.25)));
    assert_eq!(client.get("/health").await.status, StatusCode::OK);
    assert_eq!(client.get("/v1/models").await.json()["data"][0]["id"], "soon");

    app.set_stage(LoadStage::Failed("no such file: /srv/models/secret.gguf".to_owned()));
    let ready = client.get("/ready").await.json();
    assert_eq!((&ready["state"], &ready["reason"]), (&json!("failed"), &json!("no such file: …")));
    let answer = client.call(Method::POST, CHAT, format!(r#"{{"messages": [{USER}]}}"#)).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(!answer.text().contains("secret"), "{}", answer.text());
    app.set_stage(LoadStage::Ready(served_model::shared()));
    assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    let _: Value = client.post(CHAT, json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})).await;
}

/// Panics on the engine's thread, as a bug would.
struct Mistake;

impl EventSink for Mistake {
    fn send(&mut self, _: EventKind) -> bool {
        panic!("as a test wants it")
    }
}

#[tokio::test]
async fn a_server_whose_model_has_stopped_is_not_ready_and_says_so() {
    let served = std::sync::Arc::new(served_model::fresh(Default::default()));
    let client = Client::of(&served_model::ready(served_model::config(), std::sync::Arc::clone(&served)));
    assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    let _ticket =
        served.service.submit(engine::Request::greedy(vec![types::TokenId(1)], 1), Box::new(Mistake)).unwrap();
    wait_until("it is not ready", async || client.get("/ready").await.status != StatusCode::OK).await;
    assert_eq!(client.get("/ready").await.json()["state"], "failed");
    let (status, error) = client.error("/v1/completions", r#"{"prompt": "x"}"#).await;
    assert_eq!((status, &error["code"]), (503, &json!("model_failed")));
    assert_eq!(client.get("/health").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let served =
        std::sync::Arc::new(served_model::fresh(engine::EngineOptions { waiting_max: 0, ..Default::default() }));
    let client = Client::of(&served_model::ready(served_model::config(), served));
    let body = json!({"prompt": "x", "n": 128, "max_tokens": 1, "temperature": 1});
    let answer = client.call(Method::POST, "/v1/completions", body.to_string()).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS, "{}", answer.text());
    assert!(answer.headers["retry-after"].to_str().unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(
        (&answer.json()["error"]["type"], &answer.json()["error"]["code"]),
        (&json!("rate_limit_error"), &json!("queue_full"))
    );
}

#[tokio::test]
async fn after_the_end_of_the_engine_streams_end_with_an_error() {
    let served = std::sync::Arc::new(served_model::fresh(Default::default()));
    let client = Client::of(&served_model::ready(served_model::config(), std::sync::Arc::clone(&served)));
    let body = json!({"prompt": "x", "max_tokens": 800, "stream": true, "ignore_eos": true});
    let response = client.send(Method::POST, "/v1/completions", body.to_string()).await;
    assert_eq!(response.status(), StatusCode::OK);
    tokio::task::spawn_blocking(move || served.service.drain(std::time::Duration::ZERO)).await.unwrap();
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let last = text.split_terminator("\n\n").last().unwrap();
    let event: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(event["error"]["code"], "shutting_down", "{last}");
    let (status, _) = client.error("/v1/completions", r#"{"prompt": "x"}"#).await;
    assert_eq!(status, 503);
}

#[tokio::test]
async fn template_variables_that_the_server_sets_are_refused() {
    let client = Client::new();
    for name in ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"] {
        for value in [json!(null), json!("x"), json!([{"role": "user", "content": "y"}])] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: value}});
            let (status, error) = client.error(CHAT, &body.to_string()).await;
            assert_eq!((status, &error["param"]), (400, &json!("chat_template_kwargs")), "{error}");
            assert!(error["message"].as_str().unwrap().contains(name), "{error}");
        }
    }
}

#[tokio::test]
async fn numbers_without_a_fraction_are_integers_in_every_api() {
    let client = Client::new();
    let said = json!([{"role": "user", "content": "x"}]);
    let requests = [
        (CHAT, json!({"messages": said, "max_tokens": 2.0, "seed": 1.0, "top_k": 1e1, "n": 1.0})),
        ("/v1/completions", json!({"prompt": [1.0, 2.0], "max_tokens": 2.0, "logprobs": 1.0, "stop_token_ids": [3.0]})),
        ("/v1/messages", json!({"model": MODEL, "messages": said, "max_tokens": 2.0, "top_k": 5.0})),
        ("/v1/responses", json!({"model": MODEL, "input": "x", "max_output_tokens": 2e0})),
        (
            "/api/generate",
            json!({"model": MODEL, "prompt": "x", "stream": false, "options": {"num_predict": 2.0, "seed": 1.0}}),
        ),
        (
            "/api/chat",
            json!({"model": MODEL, "messages": said, "stream": false, "options": {"num_predict": 2.0, "top_k": 3.0}}),
        ),
        ("/detokenize", json!({"tokens": [1.0, 2.0]})),
    ];
    for (path, body) in requests {
        client.post(path, body).await;
    }
    let (status, error) = client.error(CHAT, &json!({"messages": said, "max_tokens": 2.5}).to_string()).await;
    assert_eq!((status, &error["code"]), (400, &json!("invalid_type")), "{error}");
}
