use axum::http::{Method, StatusCode};
use serde_json::{Value, json};
use server::{App, Config, LoadStage};

use crate::client::{Answer, Client};
use testing::served_model::{self, MODEL};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn chat(fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": "How is the weather?"}]);
    let options = json!({"temperature": 0, "num_predict": 9});
    with(json!({"model": MODEL, "messages": messages, "think": false, "options": options}), fields)
}

fn generate(fields: Value) -> Value {
    let options = json!({"temperature": 0, "num_predict": 9});
    with(json!({"model": MODEL, "prompt": "How is the weather?", "think": false, "options": options}), fields)
}

/// The one body of a reply that is not streamed.
async fn whole(client: &Client, path: &str, body: Value) -> Value {
    let answer = client.call(Method::POST, path, with(body, json!({"stream": false})).to_string()).await;
    assert_eq!(
        (answer.status, &answer.headers["content-type"]),
        (StatusCode::OK, &"application/json".parse().unwrap())
    );
    answer.json()
}

/// The lines of a reply, which must end with a line that is `done`.
async fn lines(client: &Client, path: &str, body: Value) -> Vec<Value> {
    let answer = client.call(Method::POST, path, body.to_string()).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    let text = answer.text();
    assert!(text.ends_with('\n'));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, parts) = lines.split_last().unwrap();
    assert!(last["done"] == true && parts.iter().all(|line| line["done"] == false), "{text}");
    lines
}

fn check_metrics(reply: &Value) {
    let number = |name: &str| reply[name].as_u64().unwrap_or_else(|| panic!("{name} in {reply}"));
    assert!(number("prompt_eval_count") > 0 && number("eval_count") > 0);
    let parts = number("load_duration") + number("prompt_eval_duration") + number("eval_duration");
    assert_eq!(number("total_duration"), parts);
    assert!(number("prompt_eval_duration") > 0 && number("eval_duration") > 0);
}

#[tokio::test]
async fn lines_add_up_to_the_reply_that_is_given_whole() {
    let client = Client::new();
    for (path, body, text) in
        [(CHAT, chat(json!({})), "/message/content"), (GENERATE, generate(json!({})), "/response")]
    {
        let text = |reply: &Value| reply.pointer(text).unwrap().as_str().unwrap().to_owned();
        let reply = whole(&client, path, body.clone()).await;
        let lines = lines(&client, path, body).await;
        assert!(lines.len() > 2, "{lines:?}");
        assert_eq!(lines.iter().map(text).collect::<String>(), text(&reply));
        let last = lines.last().unwrap();
        for reply in [&reply, last] {
            assert_eq!((&reply["model"], &reply["done_reason"]), (&json!(MODEL), &json!("length")));
            assert_eq!(reply["eval_count"], 9);
            check_metrics(reply);
        }
        assert!(lines[0].get("total_duration").is_none() && lines[0].get("done_reason").is_none());
    }
}

#[tokio::test]
async fn reasoning_has_a_field_of_its_own() {
    let client = Client::new();
    // The template opens the reasoning, which a random model never closes.
    let think = json!({"think": true, "options": {"temperature": 0, "num_predict": 5}});
    let quiet = whole(&client, CHAT, chat(json!({}))).await;
    assert!(quiet["message"].get("thinking").is_none(), "{quiet}");
    let (chat, generate) = (chat(think.clone()), generate(think));
    assert_ne!(whole(&client, CHAT, chat.clone()).await["prompt_eval_count"], quiet["prompt_eval_count"]);
    let levels = with(chat, json!({"think": "high"}));
    assert_eq!(whole(&client, CHAT, levels).await["done"], true);
    assert_eq!(whole(&client, GENERATE, generate).await["done"], true);
}

#[tokio::test]
async fn an_answer_follows_its_format() {
    let client = Client::new();
    let schema = json!({"type": "object", "properties": {"size": {"enum": ["small", "large"]}}, "required": ["size"],
        "additionalProperties": false});
    let options = json!({"temperature": 1, "seed": 3, "num_predict": 300});
    let reply = whole(&client, CHAT, chat(json!({"format": schema, "options": options}))).await;
    let thing: Value = serde_json::from_str(reply["message"]["content"].as_str().unwrap()).unwrap();
    assert!(["small", "large"].contains(&thing["size"].as_str().unwrap()), "{reply}");
    let reply = whole(&client, GENERATE, generate(json!({"format": "json"}))).await;
    assert!(reply["response"].as_str().unwrap().trim_start().starts_with('{'), "{reply}");
    assert_eq!(whole(&client, GENERATE, generate(json!({"format": ""}))).await["done"], true);
}

#[tokio::test]
async fn tools_their_calls_and_their_results_reach_the_model() {
    let client = Client::new();
    let tool = json!({"type": "function", "function": {"name": "look", "description": "Look", "parameters": {"type": "object"}}});
    let call = json!({"function": {"name": "look", "arguments": {"at": "the sky"}}});
    let messages = json!([
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "look"},
    ]);
    let count = async |fields: Value| whole(&client, CHAT, chat(fields)).await["prompt_eval_count"].as_u64().unwrap();
    let plain = count(json!({})).await;
    assert!(count(json!({"tools": [tool]})).await > plain);
    assert!(count(json!({"messages": messages})).await > plain);
}

#[tokio::test]
async fn a_context_is_continued() {
    let client = Client::new();
    let first = whole(&client, GENERATE, generate(json!({}))).await;
    let context = first["context"].as_array().unwrap();
    let tokens = first["prompt_eval_count"].as_u64().unwrap() + first["eval_count"].as_u64().unwrap();
    assert_eq!(context.len() as u64, tokens);
    let streamed = lines(&client, GENERATE, generate(json!({}))).await;
    assert_eq!(streamed.last().unwrap()["context"], first["context"]);
    let second = whole(&client, GENERATE, generate(json!({"context": context}))).await;
    assert_eq!(second["prompt_eval_count"].as_u64().unwrap(), tokens + first["prompt_eval_count"].as_u64().unwrap());
    assert_eq!(second["context"].as_array().unwrap()[..context.len()], context[..]);
    let raw = whole(&client, GENERATE, generate(json!({"raw": true, "think": null}))).await;
    assert!(raw.get("context").is_none() && raw["prompt_eval_count"].as_u64() < first["prompt_eval_count"].as_u64());
}

#[tokio::test]
async fn a_request_without_a_prompt_says_that_the_model_is_there() {
    let client = Client::new();
    let check = async |path: &str, fields: Value, reason: &str| {
        let reply = client.post(path, with(json!({"model": MODEL}), fields)).await;
        assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!(reason)), "{reply}");
    };
    check(CHAT, json!({}), "load").await;
    check(CHAT, json!({"messages": [], "keep_alive": "5m"}), "load").await;
    check(CHAT, json!({"messages": [], "keep_alive": 0}), "unload").await;
    check(GENERATE, json!({"keep_alive": -1}), "load").await;
    check(GENERATE, json!({"prompt": "", "keep_alive": "0s"}), "unload").await;
    // The model stays.
    assert_eq!(client.get("/api/ps").await.json()["models"][0]["model"], format!("{MODEL}:latest"));
}

#[tokio::test]
async fn names_may_have_the_tag_latest() {
    let client = Client::new();
    for name in [MODEL, "tiny", &format!("{MODEL}:latest"), "tiny:latest"] {
        assert_eq!(client.post(GENERATE, json!({"model": name})).await["model"], *name);
    }
    for (name, status, message) in [
        ("nobody", 404, "model 'nobody' not found"),
        ("tiny:7b", 404, "model 'tiny:7b' not found"),
        ("", 400, "model is required"),
    ] {
        for path in [CHAT, GENERATE, "/api/embed", "/api/embeddings", "/api/show"] {
            let error = client.error(path, &json!({"model": name}).to_string()).await;
            assert_eq!(error, (status, json!(message)), "{path}");
        }
    }
}

#[tokio::test]
async fn embeddings_are_those_of_the_other_api() {
    let client = Client::new();
    let theirs = client.post("/v1/embeddings", json!({"input": ["a river", "a hill"]})).await;
    let ours = client.post("/api/embed", json!({"model": MODEL, "input": ["a river", "a hill"]})).await;
    for index in 0..2 {
        assert_eq!(ours["embeddings"][index], theirs["data"][index]["embedding"]);
    }
    assert_eq!(ours["prompt_eval_count"], theirs["usage"]["prompt_tokens"]);
    let old = client.post("/api/embeddings", json!({"model": MODEL, "prompt": "a river"})).await;
    assert_eq!(old["embedding"], ours["embeddings"][0]);
    let short = client.post("/api/embed", json!({"model": MODEL, "input": "a river", "dimensions": 8})).await;
    let short = short["embeddings"][0].as_array().unwrap().clone();
    let length: f64 = short.iter().map(|value| value.as_f64().unwrap().powi(2)).sum();
    assert!(short.len() == 8 && (length - 1.0).abs() < 1e-5, "{short:?}");
}

#[tokio::test]
async fn texts_to_embed_may_be_many_none_or_long() {
    let client = Client::new();
    let embed = |input: Value| json!({"model": MODEL, "input": input});
    let many = client.post("/api/embed", embed(json!(vec!["a"; 130]))).await;
    assert_eq!(many["embeddings"].as_array().unwrap().len(), 130);
    assert_eq!(many["embeddings"][0], many["embeddings"][129]);
    for none in [json!(""), json!([]), json!(null)] {
        assert_eq!(client.post("/api/embed", embed(none)).await["embeddings"], json!([]));
    }
    let long = embed(json!("x ".repeat(2000)));
    assert_eq!(client.post("/api/embed", long.clone()).await["embeddings"].as_array().unwrap().len(), 1);
    let (status, _) = client.error("/api/embed", &with(long, json!({"truncate": false})).to_string()).await;
    assert_eq!(status, 400);
}

#[tokio::test]
async fn the_oldest_turns_of_a_long_conversation_are_left_out() {
    let client = Client::new();
    let long = "word ".repeat(40);
    let turn = |role: &str| json!({"role": role, "content": long});
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    messages.extend((0..20).flat_map(|_| [turn("user"), turn("assistant")]));
    messages.push(json!({"role": "user", "content": "And now?"}));
    let reply = whole(&client, CHAT, chat(json!({"messages": messages}))).await;
    let context = client.get("/v1/models").await.json()["data"][0]["max_model_len"].as_u64().unwrap();
    let tokens = reply["prompt_eval_count"].as_u64().unwrap();
    assert!(tokens < context && tokens > context / 2, "{tokens} of {context}");
    let refused = chat(json!({"messages": messages, "truncate": false}));
    let (status, error) = client.error(CHAT, &refused.to_string()).await;
    assert!(status == 400 && error.as_str().unwrap().contains("tokens"), "{error}");
    let hopeless = chat(json!({"messages": [{"role": "user", "content": "x ".repeat(3000)}]}));
    assert_eq!(client.error(CHAT, &hopeless.to_string()).await.0, 400);
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_tokens() {
    let client = Client::new();
    let reply = whole(&client, CHAT, chat(json!({"logprobs": true, "top_logprobs": 2}))).await;
    let tokens = reply["logprobs"].as_array().unwrap();
    assert_eq!(tokens.len() as u64, reply["eval_count"].as_u64().unwrap());
    for token in tokens {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["logprob"], token["top_logprobs"][0]["logprob"], "greedy");
    }
    let streamed = lines(&client, GENERATE, generate(json!({"logprobs": true}))).await;
    let count: usize = streamed.iter().filter_map(|line| line["logprobs"].as_array()).map(Vec::len).sum();
    assert_eq!(count as u64, streamed.last().unwrap()["eval_count"].as_u64().unwrap());
}

#[tokio::test]
async fn what_cannot_be_done_is_said_in_one_sentence() {
    let client = Client::new();
    let image = json!([{"role": "user", "content": "x", "images": ["aGk="]}]);
    for (path, body, word) in [
        (CHAT, chat(json!({"messages": image})), "images"),
        (CHAT, chat(json!({"think": "much"})), "low, medium, high"),
        (CHAT, chat(json!({"keep_alive": "for ever"})), "keep_alive"),
        (CHAT, chat(json!({"format": "xml"})), "json"),
        (CHAT, chat(json!({"top_logprobs": 2})), "logprobs"),
        (CHAT, chat(json!({"options": {"temperature": -1}})), "options.temperature"),
        (GENERATE, generate(json!({"suffix": "x"})), "suffix"),
        (GENERATE, generate(json!({"template": "{{ .Prompt }}"})), "template"),
        (GENERATE, generate(json!({"images": ["aGk="]})), "images"),
        (GENERATE, generate(json!({"raw": true, "system": "x"})), "raw"),
        (GENERATE, generate(json!({"context": [99_999_999]})), "99999999"),
        ("/api/create", json!({"model": "x", "from": "y"}), "one model"),
        ("/api/copy", json!({"source": "x", "destination": "y"}), "one model"),
        ("/api/push", json!({"model": MODEL}), "uploads nothing"),
        ("/api/pull", json!({"model": "llama3"}), "one model"),
        ("/api/show", json!({}), "model is required"),
    ] {
        let (status, error) = client.error(path, &body.to_string()).await;
        assert!(status == 400 && error.as_str().is_some_and(|error| error.contains(word)), "{path} {body}: {error}");
    }
    let answer = client.call(Method::DELETE, "/api/delete", json!({"model": MODEL}).to_string()).await;
    assert!(answer.status == 400 && answer.json()["error"].is_string());
    assert!(client.get("/api/nothing").await.json()["error"].is_string());
}

#[tokio::test]
async fn pulling_the_served_model_succeeds() {
    let client = Client::new();
    let answer = client.call(Method::POST, "/api/pull", json!({"model": "tiny"}).to_string()).await;
    assert_eq!(
        (answer.text().as_str(), &answer.headers["content-type"]),
        ("{\"status\":\"success\"}\n", &"application/x-ndjson".parse().unwrap())
    );
    let whole = json!({"name": format!("{MODEL}:latest"), "stream": false});
    assert_eq!(client.post("/api/pull", whole).await, json!({"status": "success"}));
}

#[tokio::test]
async fn the_model_is_described() {
    let client = Client::new();
    let listed = client.get("/api/tags").await.json()["models"][0].clone();
    let running = client.get("/api/ps").await.json()["models"][0].clone();
    for model in [&listed, &running] {
        assert_eq!((&model["name"], &model["model"]), (&json!("tiny-qwen3:latest"), &json!("tiny-qwen3:latest")));
        assert_eq!(model["digest"].as_str().unwrap().len(), 64);
        assert_eq!(
            (&model["details"]["family"], &model["details"]["format"]),
            (&json!("qwen3"), &json!("safetensors"))
        );
    }
    assert!(running["expires_at"].as_str().unwrap() > "2100" && running["size_vram"] == 0);
    assert!(running["context_length"].as_u64().unwrap() > 0);
    let shown = client.post("/api/show", json!({"name": "tiny"})).await;
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert!(shown["template"].as_str().unwrap().contains("messages"));
    assert_eq!(shown["model_info"]["general.architecture"], "qwen3");
    assert_eq!(shown["model_info"]["qwen3.embedding_length"], 64);
    assert!(client.get("/api/version").await.json()["version"].as_str().unwrap().contains('.'));
    for path in ["/", "/api/tags", "/api/version"] {
        assert_eq!(client.call(Method::HEAD, path, "").await.status, StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn a_model_that_loads_is_listed_but_does_not_run() {
    let app = App::new(Config::new("soon"));
    let client = Client::of(&app);
    assert_eq!(client.get("/api/tags").await.json()["models"][0]["name"], "soon:latest");
    assert_eq!(client.get("/api/ps").await.json(), json!({"models": []}));
    let (status, error) = client.error(CHAT, r#"{"model": "soon"}"#).await;
    assert!(status == 503 && error.is_string());
    app.set_stage(LoadStage::Ready(served_model::shared()));
    assert_eq!(client.get("/api/ps").await.json()["models"][0]["name"], "soon:latest");
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_an_error() {
    let served = std::sync::Arc::new(served_model::fresh(Default::default()));
    let client = Client::of(&served_model::ready(served_model::config(), std::sync::Arc::clone(&served)));
    let long = json!({"type": "array", "items": {"type": "integer"}, "minItems": 300});
    let body = json!({"model": MODEL, "prompt": "x", "raw": true, "format": long});
    let response = client.send(Method::POST, GENERATE, body.to_string()).await;
    tokio::task::spawn_blocking(move || served.service.drain(std::time::Duration::ZERO)).await.unwrap();
    let bytes = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last, json!({"error": "the server is shutting down"}), "{text}");
}

#[tokio::test]
async fn scripts_need_not_name_the_type_of_a_body_and_pages_must() {
    let send = async |client: Client| -> Answer {
        client.call(Method::POST, GENERATE, json!({"model": MODEL}).to_string()).await
    };
    let form = || Client::new().with_header("content-type", "application/x-www-form-urlencoded");
    assert_eq!(send(form()).await.status, StatusCode::OK);
    assert_eq!(
        send(form().with_header("origin", "https://a.example")).await.status,
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    );
    let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
    let from_page = form().with_header("origin", "https://a.example");
    assert_eq!(form().call(Method::POST, "/v1/completions", body.clone()).await.status, StatusCode::OK);
    assert_eq!(from_page.error("/v1/completions", &body).await.0, 415);
}

#[tokio::test]
async fn there_is_a_limit_on_the_texts_of_one_request() {
    let body = json!({"model": MODEL, "input": vec!["a"; 2049]});
    let (status, error) = Client::new().error("/api/embed", &body.to_string()).await;
    assert_eq!((status, &error), (400, &json!("there are more than 2048 texts")));
}
