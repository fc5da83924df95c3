use axum::http::{Method, StatusCode};
use serde_json::json;
use server::{ApiKeys, Config, HeaderValue};

use crate::client::Client;
use testing::served_model;

fn guarded() -> Client {
    let keys = ApiKeys::new(["first-key", "second-key"]).unwrap();
    Client::of(&served_model::ready(Config { keys, ..served_model::config() }, served_model::shared()))
}

#[tokio::test]
async fn without_a_key_nothing_is_told() {
    for path in
        ["/v1/models", "/v1/cluster", "/metrics", "/status", "/v1/models/tiny", "/tokenizer_info", "/version", "/props"]
    {
        let answer = guarded().get(path).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert_eq!(answer.json()["error"]["code"], "missing_api_key");
    }
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"] {
        let (status, error) = guarded().error(path, "{}").await;
        assert_eq!((status, &error["type"]), (401, &json!("authentication_error")), "{path}");
    }
    for path in ["/api/tags", "/api/ps", "/api/version"] {
        let answer = guarded().get(path).await;
        assert_eq!(
            (answer.status, answer.json()),
            (StatusCode::UNAUTHORIZED, json!({"error": "an API key is needed"}))
        );
        assert_eq!(guarded().with_header("authorization", "Bearer first-key").get(path).await.status, StatusCode::OK);
    }
    for path in ["/health", "/ready", "/openapi.json", "/docs"] {
        assert_eq!(guarded().get(path).await.status, StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn each_key_opens_in_either_header() {
    for (name, value, status) in [
        ("authorization", "Bearer first-key", 200),
        ("authorization", "bearer second-key", 200),
        ("x-api-key", "second-key", 200),
        ("authorization", "Bearer first-ke", 401),
        ("authorization", "Basic first-key", 401),
        ("authorization", "first-key", 401),
        ("x-api-key", "", 401),
    ] {
        let answer = guarded().with_header(name, value).get("/v1/models").await;
        assert_eq!(answer.status.as_u16(), status, "{name}: {value}");
    }
}

#[tokio::test]
async fn pages_of_other_origins_may_ask_only_if_they_were_named() {
    let preflight = async |origins: &[&'static str]| {
        let origins = origins.iter().map(|&origin| HeaderValue::from_static(origin)).collect();
        let app = served_model::ready(Config { origins, ..served_model::config() }, served_model::shared());
        let client = Client::of(&app).with_header("origin", "https://ours.example");
        let client = client.with_header("access-control-request-method", "POST");
        let answer = client.call(Method::OPTIONS, "/v1/chat/completions", "").await;
        answer.headers.get("access-control-allow-origin").map(|value| value.to_str().unwrap().to_owned())
    };
    assert_eq!(preflight(&[]).await, None);
    assert_eq!(preflight(&["https://theirs.example"]).await, None);
    assert_eq!(preflight(&["https://ours.example"]).await.as_deref(), Some("https://ours.example"));
    assert_eq!(preflight(&["*"]).await.as_deref(), Some("*"));
}

#[tokio::test]
async fn without_keys_only_names_of_the_server_are_answered() {
    let open = || Config { allowed_hosts: vec!["gpu.lan".to_owned()], ..served_model::config() };
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    for (host, status) in [("127.0.0.1:8000", 200), ("localhost", 200), ("gpu.lan", 200), ("rebound.example", 403)] {
        let client = Client::of(&served_model::ready(open(), served_model::shared())).with_header("host", host);
        assert_eq!(client.get("/status").await.status.as_u16(), status, "{host}");
        let answer = client.call(Method::POST, "/v1/completions", body.clone()).await;
        assert_eq!(answer.status.as_u16(), status, "{host}: {}", answer.text());
        assert_eq!(client.get("/health").await.status, StatusCode::OK);
    }
    let client =
        Client::of(&served_model::ready(open(), served_model::shared())).with_header("host", "rebound.example");
    let (_, error) = client.error("/v1/completions", &body).await;
    assert_eq!((&error["type"], &error["code"]), (&json!("permission_error"), &json!("host_not_allowed")));
    let client = guarded().with_header("host", "any.example").with_header("x-api-key", "first-key");
    assert_eq!(client.get("/v1/models").await.status, StatusCode::OK, "with a key, the name does not matter");
}

#[tokio::test]
async fn keys_are_replaced_while_the_server_runs() {
    let keys = ApiKeys::new(["first-key", "second-key"]).unwrap();
    let app = served_model::ready(Config { keys, ..served_model::config() }, served_model::shared());
    app.replace_keys(ApiKeys::new(["second-key", "third-key"]).unwrap());
    for (key, status) in [("first-key", 401), ("second-key", 200), ("third-key", 200)] {
        let client = Client::of(&app).with_header("x-api-key", key);
        assert_eq!(client.get("/v1/models").await.status.as_u16(), status, "{key}");
    }
    let metrics = Client::of(&app).with_header("x-api-key", "third-key").get("/metrics").await.text();
    let line = r#"consort_requests_refused_total{reason="invalid_api_key"} 1"#;
    assert!(metrics.lines().any(|own| own == line), "{metrics}");
}

#[tokio::test]
async fn the_admin_port_has_probes_and_metrics_alone() {
    let keys = ApiKeys::new(["first-key"]).unwrap();
    let app = served_model::ready(Config { keys, ..served_model::config() }, served_model::shared());
    for (require_key, status) in [(true, 401), (false, 200)] {
        let client = Client::with(server::admin_router(&app, require_key));
        assert_eq!(client.get("/metrics").await.status.as_u16(), status);
        assert_eq!(client.get("/status").await.status.as_u16(), status);
        assert_eq!(client.get("/ready").await.status, StatusCode::OK);
        assert_eq!(client.get("/v1/models").await.status, StatusCode::NOT_FOUND);
    }
    let rebound = Client::with(server::admin_router(&app, false)).with_header("host", "rebound.example");
    assert_eq!(rebound.get("/metrics").await.status, StatusCode::FORBIDDEN);
}
