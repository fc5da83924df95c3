use axum::http::StatusCode;
use serde_json::json;

use crate::client::Client;
use testing::served_model::MODEL;

#[tokio::test]
async fn the_version_is_that_of_the_program() {
    let answer = Client::new().get("/version").await.json();
    assert_eq!(answer, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[tokio::test]
async fn props_are_those_that_users_of_llama_cpp_read() {
    let client = Client::new();
    let props = client.get("/props").await.json();
    let context = client.get("/v1/models").await.json()["data"][0]["max_model_len"].clone();
    assert_eq!(props["default_generation_settings"]["n_ctx"], context);
    assert!(props["default_generation_settings"]["params"]["temperature"].is_number());
    assert_eq!((&props["model_path"], &props["total_slots"]), (&json!(MODEL), &json!(16)));
    assert!(props["chat_template"].as_str().unwrap().contains("messages"));
    assert!(props["build_info"].as_str().unwrap().starts_with("consort "));
}

#[tokio::test]
async fn the_docs_show_every_path_and_schema_without_scripts_or_other_hosts() {
    let client = Client::new();
    let document = client.get("/openapi.json").await.json();
    let answer = client.get("/docs").await;
    assert_eq!(
        (answer.status, &answer.headers["content-type"]),
        (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap())
    );
    let page = answer.text();
    for path in document["paths"].as_object().unwrap().keys() {
        assert!(page.contains(&format!("<code>{path}</code>")), "{path}");
    }
    for name in document["components"]["schemas"].as_object().unwrap().keys() {
        assert!(page.contains(&format!("id=\"{name}\"")), "{name}");
    }
    let links = page.split("href=\"#").skip(1).map(|rest| rest.split('"').next().unwrap());
    links.for_each(|name| assert!(page.contains(&format!("id=\"{name}\"")), "#{name} leads nowhere"));
    for part in ["<script", "http:", "https:", "style="] {
        assert!(!page.contains(part), "{part}");
    }
    let policy = answer.headers["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'"), "{policy}");
    assert_eq!(client.get("/docs/style.css").await.headers["content-type"], "text/css; charset=utf-8");
}

#[tokio::test]
async fn pages_and_json_are_compressed_and_streams_are_not() {
    let plain = Client::new();
    let zipped = || Client::new().with_header("accept-encoding", "gzip, br");
    for path in ["/", "/openapi.json", "/docs"] {
        let answer = zipped().get(path).await;
        assert_eq!(answer.headers["content-encoding"], "gzip", "{path}");
        assert!(answer.bytes.starts_with(&[0x1f, 0x8b]), "{path}");
        let whole = plain.get(path).await;
        assert!(!whole.headers.contains_key("content-encoding"), "{path}");
        assert!(answer.bytes.len() * 2 < whole.bytes.len(), "{path}");
    }
    assert!(!zipped().get("/health").await.headers.contains_key("content-encoding"), "too short");
    let body = json!({"model": MODEL, "prompt": "x", "stream": true, "max_tokens": 20, "options": {"num_predict": 20}});
    for path in ["/v1/completions", "/api/generate"] {
        let answer = zipped().call(axum::http::Method::POST, path, body.to_string()).await;
        assert!(answer.bytes.len() > 1024 && !answer.headers.contains_key("content-encoding"), "{path}");
    }
}
