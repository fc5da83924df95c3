//! Tests of `/v1/cluster` and of the metrics of stages.

use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use serde_json::{Value, json};
use server::{
    ApiKeys, App, BatchPrediction, ChainBits, ChainPrediction, ChainSnapshot, ClusterMonitor, Config, CpuDescription,
    HopSnapshot, HopWay, LoadStage, NodeSnapshot, NodeUse, Progress, StageMemory, StageSnapshot, StageTime,
};
use types::LayerRange;

use crate::client::{Client, wait_until};
use testing::fragile::{Fragile, Switch};
use testing::served_model;

/// A chain that a test sets.
#[derive(Default)]
pub struct Scripted(Mutex<ChainSnapshot>);

impl ClusterMonitor for Scripted {
    fn snapshot(&self) -> ChainSnapshot {
        self.0.lock().unwrap().clone()
    }
}

pub fn time(mean_s: f64, total_s: f64) -> StageTime {
    StageTime { mean_s, total_s }
}

pub fn stage(name: &str, address: Option<&str>, layers: Option<LayerRange>) -> StageSnapshot {
    StageSnapshot {
        name: name.to_owned(),
        is_coordinator: address.is_none(),
        address: address.map(str::to_owned),
        layers,
        level: Some("avx2".to_owned()),
        threads: Some(4),
        ranks: Some(1),
        memory: Some(StageMemory { weights: 600, kv: 300, working: 100, available: 1500 }),
        compute: Some(time(0.002, 0.5)),
        hop: Some(HopSnapshot {
            time: Some(time(0.001, 0.25)),
            round_trip_s: Some(0.0015),
            bytes: 8192,
            way: HopWay::Direct,
        }),
        peer: None,
    }
}

pub fn node(address: &str, name: Option<&str>, usage: NodeUse) -> NodeSnapshot {
    NodeSnapshot {
        name: name.map(str::to_owned),
        address: Some(address.to_owned()),
        usage,
        level: name.map(|_| "avx2".to_owned()),
        threads: name.map(|_| 4),
        memory_bytes: name.map(|_| 1 << 30),
        round_trip_s: None,
        peer: None,
    }
}

fn two_stages() -> ChainSnapshot {
    let why = |why: &str| why.to_owned();
    let batch = BatchPrediction { tokens_per_s: 300.0, sequences: 8 };
    ChainSnapshot {
        stages: vec![
            stage("this machine", None, LayerRange::new(0, 1)),
            stage("attic", Some("10.0.0.2:7420"), LayerRange::new(1, 4)),
        ],
        nodes: vec![
            node("10.0.0.2:7420", Some("attic"), NodeUse::Used),
            node("10.0.0.3:7420", Some("cellar"), NodeUse::Spare { why: why("a chain with it is slower") }),
            node("10.0.0.4:7420", None, NodeUse::Failed { why: why("another key") }),
        ],
        chains: 2,
        waiting: None,
        rebuilding: None,
        prediction: Some(ChainPrediction { tokens_per_s: 100.0, batch: Some(batch) }),
        bits: Some(ChainBits::Same),
        steps: 250,
        step: time(0.006, 1.5),
        between: time(0.002, 0.5),
        swarm: None,
    }
}

/// A server with a chain that the test may change.
pub fn chained(snapshot: ChainSnapshot) -> (Arc<App>, Arc<Scripted>) {
    let app = served_model::ready(served_model::config(), served_model::shared());
    let monitor = Arc::new(Scripted(Mutex::new(snapshot)));
    app.set_cluster(monitor.clone());
    (app, monitor)
}

pub async fn cluster(client: &Client) -> Value {
    let answer = client.get("/v1/cluster").await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    let body = answer.json();
    assert_documented(client, &body).await;
    body
}

/// Every field of an answer is in the document, with its type, and every field of the document is in the answer.
async fn assert_documented(client: &Client, body: &Value) {
    let document = client.get("/openapi.json").await.json();
    let responses = &document["paths"]["/v1/cluster"]["get"]["responses"];
    check_schema(&document, &responses["200"]["content"]["application/json"]["schema"], body, "");
}

fn check_schema(document: &Value, schema: &Value, value: &Value, at: &str) {
    if let Some(name) = schema["$ref"].as_str() {
        return check_schema(document, document.pointer(name.trim_start_matches('#')).unwrap(), value, at);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let choice = choices.iter().find(|choice| (choice["type"] == "null") == value.is_null());
        return check_schema(document, choice.unwrap_or_else(|| panic!("{at}: {value}")), value, at);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let allows = |allowed: &Value| allowed == kind || allowed == "number" && kind == "integer";
    let allowed = &schema["type"];
    let is_allowed = allowed.as_array().map_or_else(|| allows(allowed), |any| any.iter().any(allows));
    assert!(is_allowed, "{at}: {value} is not {allowed}");
    match value {
        Value::Array(items) => items.iter().for_each(|item| check_schema(document, &schema["items"], item, at)),
        Value::Object(fields) => {
            let documented = schema["properties"].as_object().unwrap();
            let names = |fields: &serde_json::Map<String, Value>| {
                let mut names: Vec<_> = fields.keys().cloned().collect();
                names.sort_unstable();
                names
            };
            assert_eq!(names(fields), names(documented), "{at}");
            fields.iter().for_each(|(name, field)| {
                check_schema(document, &documented[name], field, &format!("{at}/{name}"));
            });
        }
        _ => {}
    }
}

#[tokio::test]
async fn one_process_is_one_stage_with_all_layers() {
    let mut served = served_model::fresh(Default::default());
    served.description.layers = 4;
    (served.memory_bytes, served.kv_bytes) = (1000, 400);
    served.cpu = Some(CpuDescription { level: "avx2".to_owned(), threads: 3 });
    let served = Arc::new(served);
    let client = Client::of(&served_model::ready(served_model::config(), Arc::clone(&served)));
    let body = cluster(&client).await;
    assert_eq!((&body["kind"], &body["state"], &body["layers"]), (&json!("process"), &json!("ready"), &json!(4)));
    let stage = json!({
        "index": 0, "name": "this machine", "address": null, "coordinator": true, "layers": {"start": 0, "end": 4},
        "state": "running", "level": "avx2", "threads": 3, "ranks": 1, "compute_s": null, "hop": null, "peer": null,
        "memory": {"weight_bytes": 600, "kv_bytes": 400, "working_bytes": 0, "used_bytes": 1000, "free_bytes": null},
    });
    assert_eq!(body["stages"], json!([stage]));
    assert_eq!((&body["nodes"], &body["ranks"], &body["bits"]), (&json!([]), &json!([]), &Value::Null));
    assert_eq!(body["speed"]["answer_tokens_per_s"], Value::Null, "nothing was generated yet");
    client.post("/v1/completions", json!({"prompt": "a river", "max_tokens": 9, "ignore_eos": true})).await;
    let speed = &cluster(&client).await["speed"];
    assert!(speed["tokens_per_s"].as_f64().unwrap() > 0.0, "{speed}");
    assert!(speed["answer_tokens_per_s"].as_f64().unwrap() > 0.0, "{speed}");
    let metrics = client.get("/metrics").await.text();
    assert!(!metrics.contains("stage=") && !metrics.contains("consort_chains_formed_total{"), "{metrics}");
}

#[tokio::test]
async fn ranks_are_listed() {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    let client = Client::of(&served_model::ready(served_model::config(), served));
    let body = cluster(&client).await;
    assert_eq!((&body["kind"], &body["stages"][0]["ranks"]), (&json!("ranks"), &json!(2)));
    assert_eq!(body["ranks"][1]["pid"], 4001);
    switch.lose();
    wait_until("it is rebuilt", async || cluster(&client).await["state"] == "rebuilding").await;
    let body = cluster(&client).await;
    assert!(body["reason"].as_str().unwrap().contains("rank 1"), "{body}");
}

#[tokio::test]
async fn a_chain_is_told_stage_by_stage() {
    let client = Client::of(&chained(two_stages()).0);
    let body = cluster(&client).await;
    assert_eq!((&body["kind"], &body["layers"], &body["chains"]), (&json!("chain"), &json!(4), &json!(2)));
    assert_eq!((&body["bits"], &body["waiting"]), (&json!("same"), &Value::Null));
    assert_eq!(body["steps"], json!({"count": 250, "seconds": 0.006, "between_s": 0.002}));
    let stage = json!({
        "index": 1, "name": "attic", "address": "10.0.0.2:7420", "coordinator": false, "layers": {"start": 1, "end": 4},
        "state": "running", "level": "avx2", "threads": 4, "ranks": 1, "compute_s": 0.002,
        "hop": {"seconds": 0.001, "round_trip_s": 0.0015, "bytes": 8192, "way": "direct"}, "peer": null,
        "memory": {"weight_bytes": 600, "kv_bytes": 300, "working_bytes": 100, "used_bytes": 1000, "free_bytes": 500},
    });
    assert_eq!(body["stages"][1], stage);
    assert_eq!((&body["stages"][0]["coordinator"], &body["stages"][0]["address"]), (&json!(true), &Value::Null));
    let speed = &body["speed"];
    assert_eq!((&speed["predicted_tokens_per_s"], &speed["predicted_batch"]), (&json!(100.0), &json!(8)));
    let states: Vec<_> =
        body["nodes"].as_array().unwrap().iter().map(|node| (&node["state"], &node["reason"])).collect();
    let (used, spare, failed) = (json!("used"), json!("spare"), json!("failed"));
    let reasons = [Value::Null, json!("a chain with it is slower"), json!("another key")];
    assert_eq!(states, [(&used, &reasons[0]), (&spare, &reasons[1]), (&failed, &reasons[2])]);

    let metrics = client.get("/metrics").await.text();
    for (name, labels, value) in [
        ("stage_layers", "stage=\"1\",node=\"attic\"", "3"),
        ("stage_compute_seconds_total", "stage=\"1\",node=\"attic\"", "0.5"),
        ("stage_hop_seconds_total", "stage=\"0\",node=\"this machine\"", "0.25"),
        ("stage_activations_bytes_total", "stage=\"0\",node=\"this machine\"", "8192"),
        ("cluster_nodes", "state=\"failed\"", "1"),
    ] {
        let line = format!("consort_{name}{{model=\"tiny-qwen3\",{labels}}} {value}");
        assert!(metrics.lines().any(|own| own == line), "{line} is missing:\n{metrics}");
    }
    assert!(metrics.contains("consort_chains_formed_total{model=\"tiny-qwen3\"} 2\n"), "{metrics}");
}

#[tokio::test]
async fn a_chain_is_told_before_it_is_formed_and_without_times_before_it_ran() {
    let app = App::new(served_model::config());
    app.set_stage(LoadStage::Loading(Progress { doing: "waiting for machines".to_owned(), done: 0, total: 1 }));
    let waiting = Some("no machine has room for layer 7".to_owned());
    let monitor = Arc::new(Scripted(Mutex::new(ChainSnapshot {
        waiting,
        nodes: vec![node("10.0.0.2:7420", None, NodeUse::Connecting)],
        ..ChainSnapshot::default()
    })));
    app.set_cluster(monitor.clone());
    let client = Client::of(&app);
    let body = cluster(&client).await;
    assert_eq!((&body["kind"], &body["state"], &body["stages"]), (&json!("chain"), &json!("loading"), &json!([])));
    assert_eq!((&body["waiting"], &body["layers"]), (&json!("no machine has room for layer 7"), &Value::Null));
    assert_eq!(body["nodes"][0]["state"], "connecting");
    assert_eq!(client.get("/metrics").await.status, StatusCode::OK);

    *monitor.0.lock().unwrap() = ChainSnapshot { steps: 0, ..two_stages() };
    let body = cluster(&client).await;
    assert_eq!(body["steps"], json!({"count": 0, "seconds": null, "between_s": null}));
    assert_eq!((&body["stages"][1]["compute_s"], &body["stages"][1]["hop"]["seconds"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn what_other_machines_say_is_bounded() {
    let mut snapshot = two_stages();
    let endless = format!("<b>\n\"{}", "n".repeat(1 << 16));
    snapshot.stages[1].name = endless.clone();
    snapshot.nodes[1].name = Some(endless.clone());
    snapshot.nodes[2].usage = NodeUse::Failed { why: endless.clone() };
    snapshot.waiting = Some(endless);
    let client = Client::of(&chained(snapshot).0);
    let answer = client.get("/v1/cluster").await;
    assert!(answer.bytes.len() < 8 << 10, "{}", answer.bytes.len());
    let body = answer.json();
    assert!(
        body["stages"][1]["name"].as_str().unwrap().starts_with("<b>\u{fffd}\"nnn"),
        "it is text, not markup: {body}"
    );
    let metrics = client.get("/metrics").await.text();
    assert!(metrics.lines().all(|line| line.len() < 500), "{metrics}");
}

#[tokio::test]
async fn without_a_key_the_cluster_is_not_told() {
    let keys = ApiKeys::new(["first-key"]).unwrap();
    let app = served_model::ready(Config { keys, ..served_model::config() }, served_model::shared());
    let answer = Client::of(&app).get("/v1/cluster").await;
    assert_eq!(answer.status, StatusCode::UNAUTHORIZED);
    assert_eq!(answer.json()["error"]["code"], "missing_api_key");
    let known = Client::of(&app).with_header("authorization", "Bearer first-key");
    assert_eq!(known.get("/v1/cluster").await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_lost_machine_is_told_as_lost_and_its_layers_as_moved() {
    let (app, monitor) = chained(two_stages());
    let client = Client::of(&app);
    let states = |body: &Value| {
        let of = |list: &str, field: &str| -> Vec<String> {
            body[list].as_array().unwrap().iter().map(|item| item[field].as_str().unwrap().to_owned()).collect()
        };
        (body["state"].as_str().unwrap().to_owned(), of("stages", "state"), of("nodes", "state"))
    };
    let kinds = |body: &Value| -> Vec<Value> {
        body["events"].as_array().unwrap().iter().map(|event| json!([event["kind"], event["machine"]])).collect()
    };
    let (state, stages, nodes) = states(&cluster(&client).await);
    assert_eq!((state.as_str(), stages), ("ready", vec!["running".to_owned(); 2]));
    assert_eq!(nodes, ["used", "spare", "failed"]);

    let mut lost = two_stages();
    lost.nodes[0].usage = NodeUse::Failed { why: "it left".to_owned() };
    lost.rebuilding = Some("attic: it left".to_owned());
    *monitor.0.lock().unwrap() = lost.clone();
    let body = cluster(&client).await;
    let (state, stages, nodes) = states(&body);
    assert_eq!((state.as_str(), &body["reason"]), ("rebuilding", &json!("attic: it left")));
    assert_eq!(stages, ["waiting", "lost"]);
    assert_eq!(nodes[0], "lost");
    // It is tried again, which must not look like a machine that is new.
    lost.nodes[0].usage = NodeUse::Connecting;
    *monitor.0.lock().unwrap() = lost;
    assert_eq!(states(&cluster(&client).await).2[0], "lost");

    let mut moved = two_stages();
    moved.chains = 3;
    moved.nodes[0].usage = NodeUse::Connecting;
    moved.nodes[1].usage = NodeUse::Used;
    moved.stages[1] = stage("cellar", Some("10.0.0.3:7420"), LayerRange::new(1, 4));
    *monitor.0.lock().unwrap() = moved;
    let body = cluster(&client).await;
    assert_eq!(
        states(&body),
        ("ready".to_owned(), vec!["running".to_owned(); 2], ["lost", "used", "failed"].map(str::to_owned).to_vec())
    );
    let last = body["events"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["kind"], &last["machine"], &last["to"]), (&json!("moved"), &json!("attic"), &json!(["cellar"])));
    assert_eq!(last["layers"], json!({"start": 1, "end": 4}));
    assert!(last["seconds"].as_f64().is_some_and(|seconds| seconds >= 0.0), "{last}");
    assert!(kinds(&body).contains(&json!(["lost", "attic"])), "{body}");
}
