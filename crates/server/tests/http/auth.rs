use axum::http::{Method, StatusCode};
use serde_json::json;
use server::{ApiKeys, Config, HeaderValue};

use crate::client::Client;
use crate::fixture;

fn guarded() -> Client {
    let keys = ApiKeys::new(["first-key", "second-key"]).unwrap();
    Client::of(&fixture::ready(Config { keys, ..fixture::config() }, fixture::shared()))
}

#[tokio::test]
async fn without_a_key_nothing_is_told() {
    for path in ["/v1/models", "/metrics", "/status", "/v1/models/tiny", "/tokenizer_info"] {
        let answer = guarded().get(path).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
        assert_eq!(answer.json()["error"]["code"], "missing_api_key");
    }
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"] {
        let (status, error) = guarded().error(path, "{}").await;
        assert_eq!((status, &error["type"]), (401, &json!("authentication_error")), "{path}");
    }
    for path in ["/health", "/ready", "/openapi.json"] {
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
        let app = fixture::ready(Config { origins, ..fixture::config() }, fixture::shared());
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
