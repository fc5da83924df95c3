//! Tests of what `/v1/cluster` and `/metrics` tell of a swarm.

use serde_json::{Value, json};
use server::{
    ChainPrediction, ChainSnapshot, HopSnapshot, HopWay, NodePeer, NodeSnapshot, NodeUse, PeerBlock, PeerReach,
    PeerRecord, PeerService, StagePeer, StageSnapshot, SwarmSnapshot,
};
use types::LayerRange;

use crate::client::Client;
use crate::cluster::{chained, cluster, node, stage, time};

const RECORD: PeerRecord = PeerRecord { failures: 2, checks: 3, differences: 1 };

fn peer_stage(name: &str, start: u32, end: u32) -> StageSnapshot {
    StageSnapshot {
        name: name.to_owned(),
        address: Some("/ip4/10.0.0.2/tcp/4101".to_owned()),
        layers: LayerRange::new(start, end),
        compute: Some(time(0.002, 0.5)),
        hop: Some(HopSnapshot {
            time: Some(time(0.02, 5.0)),
            round_trip_s: None,
            bytes: 4096,
            way: HopWay::Coordinator,
        }),
        peer: Some(StagePeer {
            id: format!("12D3KooW{name}"),
            reach: PeerReach::Relayed,
            round_trip_s: Some(0.04),
            queue: Some(time(0.001, 0.25)),
            runs: 250,
            sent_bytes: 1000,
            returned_bytes: 2000,
            record: RECORD,
        }),
        ..StageSnapshot::default()
    }
}

fn peer_node(name: &str, usage: NodeUse, service: PeerService, is_avoided: bool) -> NodeSnapshot {
    let block = PeerBlock {
        layers: LayerRange::new(2, 4).unwrap(),
        service,
        tokens_free: 640,
        layer_s: 0.001,
        layer_tokens_per_s: 900.0,
        queue_s: 0.0,
    };
    let id = format!("12D3KooW{name}");
    let peer = NodePeer { id, block: Some(block), reach: PeerReach::Direct, score: 4.5, is_avoided, record: RECORD };
    NodeSnapshot { address: None, peer: Some(peer), ..node("", Some(name), usage) }
}

fn swarm() -> ChainSnapshot {
    let mut own = stage("this machine", None, None);
    (own.memory, own.compute) = (None, None);
    ChainSnapshot {
        stages: vec![own, peer_stage("attic", 0, 2), peer_stage("cellar", 2, 4)],
        nodes: vec![
            peer_node("attic", NodeUse::Used, PeerService::Serving, false),
            peer_node("den", NodeUse::Spare { why: "its layers are loading".to_owned() }, PeerService::Loading, false),
            peer_node("evil", NodeUse::Failed { why: "it lied".to_owned() }, PeerService::Serving, true),
        ],
        chains: 9,
        prediction: Some(ChainPrediction { tokens_per_s: 10.0, batch: None }),
        steps: 700,
        step: time(0.1, 70.0),
        between: time(0.09, 63.0),
        swarm: Some(SwarmSnapshot {
            layers: 4,
            peers: 3000,
            sessions: 5,
            replaced: 2,
            replacing: time(0.5, 1.0),
            checks: 40,
            differences: 1,
            identical: 38,
            reach: PeerReach::Direct,
        }),
        ..ChainSnapshot::default()
    }
}

#[tokio::test]
async fn a_swarm_is_told_peer_by_peer() {
    let body = cluster(&Client::of(&chained(swarm()).0)).await;
    assert_eq!((&body["kind"], &body["layers"], &body["chains"]), (&json!("swarm"), &json!(4), &json!(9)));
    assert_eq!(body["steps"], json!({"count": 700, "seconds": 0.1, "between_s": 0.09}));
    let (speed, none) = (&body["speed"], Value::Null);
    assert_eq!((&speed["predicted_tokens_per_s"], &speed["predicted_batch"]), (&json!(10.0), &none));
    assert_eq!(
        body["swarm"],
        json!({
            "peers": 3000, "sessions": 5, "replaced": 2, "replace_s": 0.5, "checks": 40, "differences": 1,
            "identical": 38, "reach": "direct",
        })
    );
    assert_eq!((&body["stages"][0]["coordinator"], &body["stages"][0]["peer"]), (&json!(true), &none));
    let stage = json!({
        "index": 1, "name": "attic", "address": "/ip4/10.0.0.2/tcp/4101", "coordinator": false,
        "layers": {"start": 0, "end": 2}, "level": null, "threads": null, "ranks": null, "memory": null,
        "state": "running", "compute_s": 0.002,
        "hop": {"seconds": 0.02, "round_trip_s": null, "bytes": 4096, "way": "coordinator"},
        "peer": {
            "id": "12D3KooWattic", "reach": "relayed", "round_trip_s": 0.04, "queue_s": 0.001, "runs": 250,
            "sent_bytes": 1000, "returned_bytes": 2000, "failures": 2, "checks": 3, "differences": 1,
        },
    });
    assert_eq!(body["stages"][1], stage);
    let peer = json!({
        "id": "12D3KooWevil", "reach": "direct", "score": 4.5, "avoided": true, "failures": 2, "checks": 3,
        "differences": 1,
        "block": {
            "layers": {"start": 2, "end": 4}, "state": "serving", "tokens_free": 640, "layer_s": 0.001,
            "layer_tokens_per_s": 900.0, "queue_s": 0.0,
        },
    });
    let node = &body["nodes"][2];
    assert_eq!((&node["address"], &node["state"], &node["reason"]), (&none, &json!("failed"), &json!("it lied")));
    assert_eq!(node["peer"], peer);
    assert_eq!(body["nodes"][1]["peer"]["block"]["state"], "loading");
}

#[tokio::test]
async fn a_swarm_has_metrics_of_the_peers_of_its_chain_only() {
    let client = Client::of(&chained(swarm()).0);
    let metrics = client.get("/metrics").await.text();
    let attic = "stage=\"1\",node=\"attic\"";
    for (name, labels, value) in [
        ("stage_layers", attic, "2"),
        ("stage_steps_total", attic, "250"),
        ("stage_compute_seconds_total", attic, "0.5"),
        ("stage_queue_seconds_total", attic, "0.25"),
        ("stage_round_trip_seconds", attic, "0.04"),
        ("stage_hop_seconds_total", attic, "5.0"),
        ("stage_activations_bytes_total", attic, "4096"),
        ("stage_sent_bytes_total", attic, "1000"),
        ("stage_returned_bytes_total", attic, "2000"),
        ("stage_failures_total", attic, "2"),
        ("stage_checks_total", attic, "3"),
        ("stage_check_differences_total", attic, "1"),
        ("cluster_nodes", "state=\"spare\"", "1"),
    ] {
        let line = format!("consort_{name}{{model=\"tiny-qwen3\",{labels}}} {value}");
        assert!(metrics.lines().any(|own| own == line), "{line} is missing:\n{metrics}");
    }
    for (name, value) in [
        ("swarm_peers", "3000"),
        ("swarm_sessions", "5"),
        ("swarm_replaced_spans_total", "2"),
        ("swarm_replacing_seconds_total", "1.0"),
        ("swarm_checks_total", "40"),
        ("swarm_check_differences_total", "1"),
        ("swarm_identical_checks_total", "38"),
        ("chain_step_seconds_total", "70.0"),
    ] {
        let line = format!("consort_{name}{{model=\"tiny-qwen3\"}} {value}");
        assert!(metrics.lines().any(|own| own == line), "{line} is missing:\n{metrics}");
    }
    assert!(!metrics.contains("evil") && !metrics.contains("den\""), "{metrics}");
    assert!(!metrics.contains("stage_memory_used_bytes{"), "peers do not tell it: {metrics}");
}
