//! Several models behind one server: loading on demand, within a limit of memory.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use axum::http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use server::{
    App, Config, LibraryError, LibraryModel, LibraryOptions, ModelDescription, ModelDetails, ModelLibrary, ModelSlot,
    PullProgress, RemoteAddress, ServedModel,
};

use crate::client::{Client, wait_until};
use testing::served_model;

const CHAT: &str = "/v1/chat/completions";

/// Real engines, each of which is said to take 10 bytes of memory.
struct Library {
    names: Mutex<Vec<String>>,
    aliases: Mutex<BTreeMap<String, String>>,
    memory: u64,
    loads: AtomicUsize,
    /// The model that cannot be loaded.
    broken: AtomicBool,
}

impl Library {
    fn new(names: &[&str], memory: u64) -> Arc<Self> {
        Arc::new(Self {
            names: Mutex::new(names.iter().map(|name| (*name).to_owned()).collect()),
            aliases: Mutex::default(),
            memory,
            loads: AtomicUsize::new(0),
            broken: AtomicBool::new(true),
        })
    }

    fn loads(&self) -> usize {
        self.loads.load(Ordering::SeqCst)
    }
}

impl ModelLibrary for Library {
    fn list(&self) -> Vec<LibraryModel> {
        let model = |name: &String| LibraryModel {
            name: name.clone(),
            bytes: 7,
            modified: None,
            description: ModelDescription::default(),
        };
        self.names.lock().unwrap().iter().map(model).collect()
    }

    fn resolve(&self, name: &str) -> Option<String> {
        let name = self.aliases.lock().unwrap().get(name).cloned().unwrap_or_else(|| name.to_owned());
        self.names.lock().unwrap().contains(&name).then_some(name)
    }

    fn details(&self, _: &str) -> Result<ModelDetails, LibraryError> {
        Ok(ModelDetails::from(&*served_model::shared()))
    }

    fn memory_needed(&self, _: &str) -> Result<u64, LibraryError> {
        Ok(10)
    }

    fn memory_free(&self, used: u64) -> u64 {
        self.memory - used
    }

    fn load(&self, slot: &ModelSlot) -> Result<ServedModel, LibraryError> {
        self.loads.fetch_add(1, Ordering::SeqCst);
        if slot.name() == "broken" && self.broken.load(Ordering::SeqCst) {
            return Err(LibraryError::Failed("read /srv/models/broken.gguf: it is cut off".to_owned()));
        }
        let mut served = served_model::fresh(Default::default());
        served.memory_bytes = 10;
        Ok(served)
    }

    fn pull(
        &self,
        name: &str,
        progress: &mut dyn FnMut(PullProgress) -> ControlFlow<()>,
    ) -> Result<String, LibraryError> {
        if name == "nowhere" {
            return Err(LibraryError::Invalid("the hub has no nowhere".to_owned()));
        }
        let file = |done| PullProgress { file: "m.gguf".to_owned(), digest: Some("ab".to_owned()), done, total: 9 };
        let _ = (progress(file(0)), progress(file(9)));
        self.names.lock().unwrap().push(name.to_owned());
        Ok(name.to_owned())
    }

    fn set_alias(&self, alias: &str, model: &str) -> Result<(), LibraryError> {
        self.aliases.lock().unwrap().insert(alias.to_owned(), model.to_owned());
        Ok(())
    }

    fn delete(&self, name: &str) -> Result<(), LibraryError> {
        let mut names = self.names.lock().unwrap();
        let before = names.len();
        names.retain(|known| known != name);
        if names.len() < before { Ok(()) } else { Err(LibraryError::NotFound(format!("model '{name}' not found"))) }
    }
}

fn app_with(library: &Arc<Library>, options: LibraryOptions) -> Arc<App> {
    App::with_library(Config::new(""), Arc::clone(library) as Arc<dyn ModelLibrary>, options)
}

/// A server of three models with memory for two.
fn three() -> (Arc<Library>, Client) {
    let library = Library::new(&["a", "b", "c"], 25);
    let client = Client::of(&app_with(&library, LibraryOptions::default()));
    (library, client)
}

/// A client on the machine of a server of these models, which may change what is stored.
pub fn client_of_operator(names: &[&str]) -> Client {
    let router = server::router(&app_with(&Library::new(names, 25), LibraryOptions::default()));
    let local = RemoteAddress(IpAddr::V4(Ipv4Addr::LOCALHOST));
    Client::with(router.layer(axum::Extension(local)))
}

fn chat(model: &str, tokens: usize) -> Value {
    let messages = json!([{"role": "user", "content": "x"}]);
    json!({"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0})
}

async fn states(client: &Client) -> Vec<String> {
    let list = client.get("/v1/models").await.json();
    let state = |model: &Value| format!("{} {}", model["id"].as_str().unwrap(), model["state"].as_str().unwrap());
    list["data"].as_array().unwrap().iter().map(state).collect()
}

#[tokio::test]
async fn a_request_loads_the_model_that_it_names_and_the_one_unused_for_longest_makes_room() {
    let (library, client) = three();
    assert_eq!(states(&client).await, ["a unloaded", "b unloaded", "c unloaded"]);
    assert_eq!(client.get("/ready").await.status, StatusCode::OK);
    for name in ["a", "b", "a"] {
        assert_eq!(client.post(CHAT, chat(name, 1)).await["model"], name);
    }
    assert_eq!(library.loads(), 2);
    assert_eq!(client.post(CHAT, chat("c", 1)).await["model"], "c");
    assert_eq!(states(&client).await, ["a ready", "b unloaded", "c ready"]);
    // A request without a name gets the one that was used last.
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    assert_eq!(client.post(CHAT, body).await["model"], "c");
    let (status, error) = client.error(CHAT, &chat("d", 1).to_string()).await;
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")));
    assert_eq!(client.get("/status?model=b").await.json()["state"], "unloaded");
    assert_eq!(client.get("/v1/cluster?model=a").await.json()["model"], "a");
    assert_eq!(client.get("/status?model=d").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_pinned_model_stays() {
    let library = Library::new(&["a", "b", "c"], 25);
    let options = LibraryOptions { pinned: vec!["a".to_owned()], ..LibraryOptions::default() };
    let client = Client::of(&app_with(&library, options));
    for name in ["a", "b", "c", "b"] {
        client.post(CHAT, chat(name, 1)).await;
    }
    assert_eq!(states(&client).await, ["a ready", "b ready", "c unloaded"]);
}

#[tokio::test]
async fn a_model_that_generates_is_never_unloaded() {
    let library = Library::new(&["a", "b"], 10);
    let client = Client::of(&app_with(&library, LibraryOptions::default()));
    let answer = unread_answer(&client, "a").await;
    let (other, whole) = tokio::join!(client.post(CHAT, chat("b", 1)), answer.collect());
    assert_eq!(other["model"], "b");
    let text = String::from_utf8(whole.unwrap().to_bytes().to_vec()).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(states(&client).await, ["a unloaded", "b ready"]);
}

/// An answer that lasts until it is read.
async fn unread_answer(client: &Client, model: &str) -> axum::body::Body {
    let mut long = chat(model, 40);
    long["stream"] = true.into();
    long["ignore_eos"] = true.into();
    client.send(Method::POST, CHAT, long.to_string()).await.into_body()
}

#[tokio::test]
async fn a_model_that_was_to_be_unloaded_stays_where_another_one_made_room() {
    let (library, client) = three();
    let (first, second) = (unread_answer(&client, "a").await, unread_answer(&client, "b").await);
    // Both are used, so the older one is to go; but the other one is idle first.
    let makes_room = async {
        wait_until("it waits", async || states(&client).await[2] == "c loading").await;
        second.collect().await.unwrap();
    };
    let (other, ()) = tokio::join!(client.post(CHAT, chat("c", 1)), makes_room);
    assert_eq!(other["model"], "c");
    first.collect().await.unwrap();
    assert_eq!(client.post(CHAT, chat("a", 1)).await["model"], "a");
    assert_eq!(
        (states(&client).await, library.loads()),
        (["a ready", "b unloaded", "c ready"].map(String::from).to_vec(), 3)
    );
}

#[tokio::test]
async fn a_model_is_loaded_once_for_all_who_wait_for_it() {
    let (library, client) = three();
    let requests = (0..8).map(|_| client.post(CHAT, chat("a", 1)));
    futures_util::future::join_all(requests).await;
    assert_eq!(library.loads(), 1);
}

#[tokio::test]
async fn requests_for_more_models_than_fit_all_get_their_own() {
    let (_, client) = three();
    let request = async |index: usize| {
        let name = ["a", "b", "c"][index * 7 % 3];
        assert_eq!(client.post(CHAT, chat(name, 3)).await["model"], name);
    };
    futures_util::future::join_all((0..60).map(request)).await;
    let loaded = states(&client).await.iter().filter(|state| state.ends_with(" ready")).count();
    assert!(loaded <= 2, "{loaded} are loaded");
}

#[tokio::test]
async fn a_model_that_failed_to_load_says_why_and_is_not_tried_at_each_request() {
    let library = Library::new(&["a", "broken"], 25);
    let client = Client::of(&app_with(&library, LibraryOptions::default()));
    for _ in 0..3 {
        let (status, error) = client.error(CHAT, &chat("broken", 1).to_string()).await;
        assert_eq!((status, &error["code"]), (503, &json!("model_failed")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("it is cut off") && !message.contains("/srv"), "{message}");
    }
    assert_eq!(library.loads(), 1);
    assert_eq!(states(&client).await, ["a unloaded", "broken failed"]);
    client.post(CHAT, chat("a", 1)).await;
}

#[tokio::test]
async fn ollama_s_clients_load_and_unload() {
    let library = Library::new(&["a", "b"], 25);
    let app = app_with(&library, LibraryOptions::default());
    let client = Client::of(&app);
    let names = async |path: &str| {
        let models = client.get(path).await.json()["models"].as_array().unwrap().clone();
        models.iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(names("/api/tags").await, ["a:latest", "b:latest"]);
    assert!(names("/api/ps").await.is_empty());
    let shown = client.post("/api/show", json!({"model": "a:latest"})).await;
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert!(names("/api/ps").await.is_empty(), "a model is described without being loaded");

    let loaded = client.post("/api/generate", json!({"model": "a:latest", "keep_alive": "1h"})).await;
    assert_eq!(loaded["done_reason"], "load");
    assert_eq!(names("/api/ps").await, ["a:latest"]);
    let expires = client.get("/api/ps").await.json()["models"][0]["expires_at"].as_str().unwrap().to_owned();
    assert!(*expires < *"2100", "{expires}");
    let unloaded = client.post("/api/generate", json!({"model": "a", "keep_alive": 0})).await;
    assert_eq!(unloaded["done_reason"], "unload");
    assert!(names("/api/ps").await.is_empty());

    let unloading = tokio::spawn(Arc::clone(app.models()).unload_idle());
    let body = json!({"model": "b", "prompt": "x", "stream": false, "keep_alive": 0, "options": {"num_predict": 1}});
    client.post("/api/generate", body).await;
    wait_until("the model is unloaded", async || names("/api/ps").await.is_empty()).await;
    unloading.abort();
}

#[tokio::test]
async fn events_tell_how_far_loading_is() {
    let (library, client) = three();
    let answer = client.call(Method::POST, "/models/load", r#"{"model": "a", "stream": true}"#).await;
    let text = answer.text();
    let events: Vec<Value> =
        text.split_terminator("\n\n").map(|e| serde_json::from_str(&e["data: ".len()..]).unwrap()).collect();
    let (last, before) = events.split_last().unwrap();
    assert_eq!(last["state"], "ready");
    assert!(before.iter().all(|event| event["state"] == "loading") && !before.is_empty(), "{text}");
    assert_eq!(client.post("/models/unload", json!({"model": "a"})).await, json!({"success": true}));
    assert_eq!(states(&client).await[0], "a unloaded");
    assert_eq!(client.post("/models/load", json!({"model": "a"})).await, json!({"success": true}));
    assert_eq!(library.loads(), 2);
}

#[tokio::test]
async fn the_store_is_changed_by_programs_on_this_machine_only() {
    let (_, client) = three();
    let body = json!({"model": "new"}).to_string();
    for path in ["/api/pull", "/api/create", "/api/delete"] {
        let method = if path == "/api/delete" { Method::DELETE } else { Method::POST };
        let body = if path == "/api/create" { json!({"model": "n", "from": "a"}).to_string() } else { body.clone() };
        let answer = client.call(method, path, body).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{path}: {}", answer.text());
    }
    assert_eq!(states(&client).await.len(), 3);
}

#[tokio::test]
async fn models_are_pulled_named_and_deleted() {
    let client = client_of_operator(&["a"]);
    let lines = client.call(Method::POST, "/api/pull", r#"{"model": "new:latest"}"#).await.text();
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0], json!({"status": "pulling manifest"}));
    let done = json!({"status": "pulling m.gguf", "digest": "sha256:ab", "total": 9, "completed": 9});
    assert!(lines.contains(&done), "{lines:?}");
    assert_eq!(lines.last(), Some(&json!({"status": "success"})));
    let failed = client.call(Method::POST, "/api/pull", r#"{"model": "nowhere"}"#).await.text();
    assert!(failed.lines().last().unwrap().contains(r#""error":"the hub has no nowhere""#), "{failed}");

    client.post("/api/create", json!({"model": "mine", "from": "a", "stream": false})).await;
    assert_eq!(client.post(CHAT, chat("mine", 1)).await["model"], "a");
    let (status, _) = client.error("/api/create", r#"{"model": "mine", "from": "a", "system": "Be short."}"#).await;
    assert_eq!(status, 400);
    let deleted = client.call(Method::DELETE, "/api/delete", r#"{"model": "a"}"#).await;
    assert_eq!(deleted.status, StatusCode::OK);
    assert_eq!(states(&client).await, ["new unloaded"]);
    let again = client.call(Method::DELETE, "/api/delete", r#"{"model": "a"}"#).await;
    assert_eq!(again.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn metrics_of_all_models_are_one_text() {
    let (_, client) = three();
    for name in ["a", "b", "c"] {
        client.post(CHAT, chat(name, 2)).await;
    }
    let text = client.get("/metrics").await.text();
    assert_eq!(text.matches("# TYPE consort_generated_tokens counter").count(), 1);
    for name in ["a", "b", "c"] {
        assert!(text.contains(&format!("consort_requests_finished_total{{model=\"{name}\"")), "{text}");
    }
    assert!(text.contains("consort_connections ") && text.ends_with("# EOF\n"));
}

#[tokio::test]
async fn a_server_of_one_model_answers_whatever_the_name() {
    let answered = async |config: Config| {
        let client = Client::of(&served_model::ready(config, served_model::shared()));
        client.call(Method::POST, CHAT, chat("gpt-4o", 1).to_string()).await.status
    };
    let lax = Config { strict_names: false, ..served_model::config() };
    assert_eq!(answered(lax).await, StatusCode::OK);
    assert_eq!(answered(served_model::config()).await, StatusCode::NOT_FOUND);
}
