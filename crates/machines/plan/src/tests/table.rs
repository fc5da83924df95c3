//! What `consort plan` prints.

use kernels::cpu::Level;
use unicode_width::UnicodeWidthStr;

use super::{HEAD_MEMORY, LINK, WORKLOAD, layers_of_memory, model, node};
use crate::*;

fn print(cluster: &Cluster, optimise: Optimise, unusable: &[UnusableNode]) -> String {
    let model = model(28);
    let planner = Planner::new(cluster, &model, WORKLOAD, optimise).unwrap();
    let plan = planner.plan().unwrap();
    let comparison = planner.compare(&plan);
    let table = PlanTable { cluster, model: &model, plan: &plan, comparison: &comparison, unusable }.to_string();
    assert!(table.lines().all(|line| line.width() <= 100 && line.trim_end() == line), "{table}");
    table
}

#[test]
fn a_plan_is_a_table() {
    let slow = NodeFacts { read_bytes_per_s: 0.5e9, level: Level::Scalar, ..node("old-phone", layers_of_memory(2)) };
    let others = vec![slow, node("kitchen", layers_of_memory(20)), node("watch", 64 << 20)];
    let mut links = Links::new(LINK);
    links.set(0, 2, Link { round_trip_seconds: 0.35e-3, bytes_per_s: 110e6 });
    let cluster = Cluster::new(node("laptop", HEAD_MEMORY + layers_of_memory(12)), others, links).unwrap();
    let node = |name: Option<&str>, address: &str, why: &str| UnusableNode {
        name: name.map(str::to_owned),
        address: address.parse().ok(),
        why: why.to_owned(),
    };
    let unusable =
        [node(Some("attic"), "10.0.0.9:7420", "it has another cluster key"), node(None, "10.0.0.8:7420", "timed out")];
    assert_eq!(print(&cluster, Optimise::Latency, &unusable), TABLE);
}

const TABLE: &str = "\
tiny: 28 layers, planned for the time of a token (*: coordinator)

node       layers      memory / free   GB/s  trip ms  ms/token    tok/s  without
laptop *   0..12   1.2 GiB / 1.2 GiB   10.0                120     3.50  no room
kitchen    12..28  1.5 GiB / 1.9 GiB   10.0    0.350       161     3.50  no room
old-phone  -           - / 194.5 MiB  0.500     2.00         -     2.08     3.50
watch      -            - / 64.0 MiB   10.0     2.00         -  no room     3.50

a token takes 285 ms (0 before it): layers 281, embedding, head and sampler 4.00, 2 hops 0.423
predicted: 3.50 tokens/s for one sequence, 12.4 for 4; a prompt of 300 tokens in 3.01 s
bits: as on one machine: the nodes used compute with avx2; others do not, so a plan with
      them can change bits (--exact: one arithmetic on all nodes)
not used: old-phone: no faster: 2.08 tokens/s with it, 3.50 without
not used: watch: no room: a layer needs 96.3 MiB, 62.1 MiB are free
not used: attic (10.0.0.9:7420): it has another cluster key
not used: 10.0.0.8:7420: timed out
";

#[test]
fn names_from_the_network_can_not_disturb_the_table() {
    let names = ["a\u{1b}[31m\nb", "wide 名前名前名前名前名前名前名前名前", &"x".repeat(500)];
    let others = names.map(|name| node(name, layers_of_memory(10))).to_vec();
    let coordinator = node(&"c".repeat(99), u64::MAX);
    let cluster = Cluster::new(coordinator, others, Links::new(LINK)).unwrap();
    let unusable = [UnusableNode { name: Some("a\u{1b}[0m".to_owned()), address: None, why: "b\nc".to_owned() }];
    let table = print(&cluster, Optimise::Throughput, &unusable);
    assert!(table.contains("a?[31m?b") && table.ends_with("not used: a?[0m: b?c\n"), "{table}");
    assert!(!table.contains('\u{1b}'), "{table}");
}
