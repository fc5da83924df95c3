//! Saved plans and cake's topologies: what is read, and what is said about mistakes.

use proptest::prelude::*;

use super::{HEAD_MEMORY, LINK, layers_of_memory, node};
use crate::assignment::range;
use crate::*;

/// A coordinator and three nodes, two of which have the same name.
fn cluster() -> Cluster {
    let at = |name, address: &str| NodeFacts { address: address.parse().ok(), ..node(name, layers_of_memory(20)) };
    let others = vec![at("kitchen", "10.0.0.2:7000"), at("den", "10.0.0.3:7000"), at("den", "10.0.0.4:7000")];
    Cluster::new(node("laptop", HEAD_MEMORY + layers_of_memory(20)), others, Links::new(LINK)).unwrap()
}

const PLAN: &str = r#"# Which node runs which layers of a model. The stages follow one another from the first layer to the
# last; FIRST..END does not contain END. The coordinator may have the first layers, or none.
version = 1
model = 'Qwen/Qwen3 "small"'
layers = 28

[coordinator]
layers = "0..8"

[[stage]]
node = "den"
address = "10.0.0.4:7000"
layers = "8..20"

[[stage]]
node = "kitchen"
address = "10.0.0.2:7000"
layers = "20..28"
"#;

#[test]
fn a_plan_is_written_and_read_back() {
    let cluster = cluster();
    let stage = |node, start, end| (node, range(start, end).unwrap());
    let assignment = Assignment::new(&cluster, 28, vec![stage(0, 0, 8), stage(3, 8, 20), stage(1, 20, 28)]).unwrap();
    let saved = SavedPlan::new("Qwen/Qwen3 \"small\"", &cluster, &assignment);
    assert_eq!(saved.to_string(), PLAN);
    let read = SavedPlan::parse(PLAN).unwrap();
    assert_eq!(read.assignment(&cluster, 28).unwrap(), assignment);
    assert_eq!(read.stages[2].line, 18);
}

#[test]
fn a_coordinator_without_layers_is_not_in_the_file() {
    let cluster = cluster();
    let assignment = Assignment::new(&cluster, 4, vec![(1, range(0, 4).unwrap())]).unwrap();
    let text = SavedPlan::new("m", &cluster, &assignment).to_string();
    assert!(!text.contains("[coordinator]"), "{text}");
    assert_eq!(SavedPlan::parse(&text).unwrap().assignment(&cluster, 4).unwrap(), assignment);
}

#[track_caller]
fn check_plan(old: &str, new: &str, expected: &str) {
    assert!(PLAN.contains(old), "{old:?}");
    let read = SavedPlan::parse(&PLAN.replace(old, new)).and_then(|plan| plan.assignment(&cluster(), 28));
    let error = read.expect_err(expected).to_string();
    assert!(error.contains(expected), "{error:?}, not {expected:?}");
}

#[test]
fn a_mistake_is_named_with_its_line() {
    check_plan("version = 1", "version = 2", "line 3: version 2, but this build reads version 1");
    check_plan("version = 1\n", "", "missing field `version`");
    check_plan("layers = 28", "layers = \"28\"", "line 5: invalid type: string");
    check_plan("[coordinator]", "[coordinator", "line 7: ");
    check_plan("[[stage]]\nnode = \"den\"", "[[stage]]\nknot = \"den\"", "line 11: unknown field `knot`");
    check_plan("8..20", "8-20", "line 13: layers \"8-20\": write FIRST..END");
    check_plan("8..20", "20..8", "line 13: layers \"20..8\": write FIRST..END");
    check_plan("8..20", "9..20", "line 13: layers 9..20 of node \"den\" do not follow: layer 8 is next");
    check_plan("8..20", "7..20", "line 13: layers 7..20 of node \"den\" do not follow: layer 8 is next");
    check_plan("20..28", "20..27", "layers 27..28 have no node");
    check_plan("20..28", "20..29", "line 18: layers 20..29 of node \"kitchen\" go beyond the model, which has 28");
    check_plan("layers = 28", "layers = 30", "layers 28..30 have no node");
    check_plan(
        "layers = 28",
        "layers = 20",
        "line 18: layers 20..28 of node \"kitchen\" go beyond the model, which has 20",
    );
    check_plan("10.0.0.4:7000", "10.0.0.4", "line 12: \"10.0.0.4\" is not an address: write HOST:PORT");
    check_plan("10.0.0.4:7000", "10.0.0.9:7000", "line 13: several nodes are named \"den\"");
    let kitchen = "node = \"kitchen\"\naddress = \"10.0.0.2:7000\"";
    check_plan(
        kitchen,
        "node = \"attic\"",
        "line 17: node \"attic\" is not in the cluster; its nodes are: \"kitchen\", \"den\"",
    );
    check_plan(
        kitchen,
        "node = \"den\"\naddress = \"10.0.0.4:7000\"",
        "line 18: node \"den\" has two stages: layers 8..20 and 20..28",
    );
    let stages = "\n[[stage]]\nnode = \"x\"\nlayers = \"0..1\"\n".repeat(NODES_MAX);
    check_plan("\n[coordinator]\nlayers = \"0..8\"\n", &stages, "but a cluster has at most 64 nodes");
    assert_eq!(SavedPlan::parse(&" ".repeat(PLAN_BYTES_MAX + 1)), Err(SavedPlanError::TooLarge));
}

#[test]
fn a_plan_is_wrong_without_any_cluster_if_its_layers_are() {
    let error = SavedPlan::parse(PLAN).unwrap().check_model(30).unwrap_err();
    assert_eq!(error.to_string(), "line 5: the plan is for 28 layers, the model has 30");
    let check = |old: &str, new: &str, expected: &str| {
        assert_eq!(SavedPlan::parse(&PLAN.replace(old, new)).unwrap_err().to_string(), expected);
    };
    let gap = "line 18: layers 21..28 of node \"kitchen\" do not follow: layer 20 is next";
    check("20..28", "21..28", gap);
    let kitchen = "node = \"kitchen\"\naddress = \"10.0.0.2:7000\"";
    let twice =
        |name: &str| format!("line 18: node {name:?} has two stages: layers 8..20 and 20..28; a node holds one range");
    check(kitchen, "node = \"other\"\naddress = \"10.0.0.4:7000\"", &twice("den"));
    check("node = \"kitchen\"\naddress = \"10.0.0.2:7000\"\nlayers", "node = \"den\"\n\nlayers", &twice("den"));
}

const TOPOLOGY: &str = "\
# as in cake's manual
den_1:
  host: '10.0.0.4:7000'
  description: 'NVIDIA Titan X Pascal (12GB)'
  vram_bytes: 12884901888
  tflops: 11.0
  layers:
    - 'model.layers.4-9'
    - 'model.layers.10'
kitchen:
  host: 10.0.0.2:7000
  layers: [model.layers.11-27]
idle:
  host: attic.local:10128
";

#[test]
fn a_topology_of_cake_is_a_plan() {
    let topology = CakeTopology::parse(TOPOLOGY).unwrap();
    let names: Vec<_> = topology.nodes.iter().map(|node| (node.name.as_str(), node.host.as_str())).collect();
    assert_eq!(names, [("den_1", "10.0.0.4:7000"), ("idle", "attic.local:10128"), ("kitchen", "10.0.0.2:7000")]);
    let plan = topology.plan("m", 28).unwrap().unwrap();
    let assignment = plan.assignment(&cluster(), 28).unwrap();
    let stage = |node, start, end| (node, range(start, end).unwrap());
    assert_eq!(assignment.stages(), [stage(0, 0, 4), stage(3, 4, 11), stage(1, 11, 28)]);
}

#[test]
fn a_topology_without_layers_names_only_addresses() {
    let text = "a: {host: 'a:1', layers: []}\nb: {host: 'b:1'}\n";
    let topology = CakeTopology::parse(text).unwrap();
    assert_eq!(topology.nodes.len(), 2);
    assert_eq!(topology.plan("m", 28), Ok(None));
}

#[track_caller]
fn check_topology(old: &str, new: &str, expected: &str) {
    assert!(TOPOLOGY.contains(old), "{old:?}");
    let plan = CakeTopology::parse(&TOPOLOGY.replace(old, new)).and_then(|topology| topology.plan("m", 28));
    let error = plan.expect_err(expected).to_string();
    assert!(error.contains(expected), "{error:?}, not {expected:?}");
}

#[test]
fn a_mistake_in_a_topology_is_named_with_its_line() {
    check_topology("attic.local:10128", "attic.local", "line 14: worker \"idle\": \"attic.local\" is not an address");
    check_topology(
        "    - 'model.layers.10'",
        "    - 'model.layers.12'",
        "line 9: worker \"den_1\": layer 12 does not follow layer 9",
    );
    check_topology("model.layers.10", "model.layers.9", "line 9: worker \"den_1\": layer 9 does not follow layer 9");
    check_topology("model.layers.10", "other.layers.10", "are of different models");
    check_topology("model.layers.10", "vae", "line 9: worker \"den_1\": \"vae\" is not a layer");
    check_topology("model.layers.10", "model.layers.", "is not a layer");
    check_topology("model.layers.10", "model.layers.7-3", "\"model.layers.7-3\" ends before it begins");
    check_topology("model.layers.10", "model.layers.99999999999999999999", "is not a layer");
    check_topology("model.layers.10", "model.layers.1024", "goes beyond 1024 layers");
    check_topology("11-27", "10-27", "line 12: layer 10 of worker \"kitchen\" belongs to worker \"den_1\" too");
    check_topology("11-27", "12-27", "layers 11..12 have no worker");
    check_topology("11-27", "11-26", "layers 27..28 have no worker. Here the coordinator runs the first layers");
    check_topology("11-27", "11-28", "line 12: worker \"kitchen\": layers 11..29 go beyond the model, which has 28");
    let same = "line 12: worker \"kitchen\": its address 10.0.0.4:7000 is that of worker \"den_1\" too";
    check_topology("10.0.0.2:7000", "10.0.0.4:7000", same);
    check_topology("idle:\n", "kitchen:\n", "duplicate");
    check_topology("  host: 10.0.0.2:7000\n", "", "host");
    check_topology("idle:", "idle: [", "line 1");
}

#[test]
fn a_topology_that_grows_when_it_is_read_is_refused() {
    let bomb = "a: &a {host: 'h:1', layers: [x, x, x]}\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n";
    assert!(matches!(CakeTopology::parse(bomb), Err(CakeTopologyError::Syntax(_))));
    let deep = format!("a: {}", "[".repeat(10_000));
    assert!(matches!(CakeTopology::parse(&deep), Err(CakeTopologyError::Syntax(_))));
    let many: String = (0..NODES_MAX).map(|index| format!("n{index}: {{host: 'h:1'}}\n")).collect();
    assert_eq!(CakeTopology::parse(&many), Err(CakeTopologyError::TooManyNodes { nodes: NODES_MAX }));
    assert_eq!(CakeTopology::parse(&" ".repeat(TOPOLOGY_BYTES_MAX + 1)), Err(CakeTopologyError::TooLarge));
}

proptest! {
    #[test]
    fn any_text_is_a_plan_or_an_error(text in "(?s).{0,200}", cut in 0..PLAN.len(), insert in "[\\PC\\n]{0,8}") {
        let _ = SavedPlan::parse(&text);
        let mut changed = PLAN.to_owned();
        changed.insert_str(cut, &insert);
        if let Ok(plan) = SavedPlan::parse(&changed) {
            let again = SavedPlan::parse(&plan.to_string()).unwrap();
            prop_assert_eq!(again.to_string(), plan.to_string());
            let _ = plan.assignment(&cluster(), 28);
        }
    }

    #[test]
    fn any_text_is_a_topology_or_an_error(text in "(?s).{0,200}", cut in 0..TOPOLOGY.len(), insert in "[\\PC\\n]{0,8}") {
        let _ = CakeTopology::parse(&text);
        let mut changed = TOPOLOGY.to_owned();
        changed.insert_str(cut, &insert);
        if let Ok(Ok(Some(plan))) = CakeTopology::parse(&changed).map(|topology| topology.plan("m", 28)) {
            prop_assert_eq!(plan.stages.last().map(|stage| stage.layers.end()), Some(28));
        }
    }
}
