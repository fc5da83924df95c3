//! Injected faults.

use serde_json::{Value, json};

use crate::own_ops::{Group, oracle, step_line};
use crate::rank::{Rank, load_dense};

#[test]
fn faults_happen_where_they_are_asked_for() {
    let fault = |fault: &str| Rank::start_with(0, 1, &[("CONSORT_FAULT", fault)]);
    let load = load_dense("llama", "m");
    let step = json!({"op": "generate_step", "model_id": "m", "tokens": [1, 2], "offset": 0});

    let mut rank = fault("rank=0,at=step,after=1,do=exit");
    assert_eq!(rank.ask(&load)["op"], "load_dense_shard_ok");
    assert_eq!(rank.ask(&step)["op"], "generate_step_ok");
    rank.send(&step.to_string());
    assert_eq!(rank.line(), None);
    assert!(!rank.end().success());

    let mut rank = fault("rank=0,at=load,do=oom");
    rank.refused(&load, "insufficient_memory");
    assert_eq!(rank.ask(&load)["op"], "load_dense_shard_ok");

    let mut rank = fault("rank=0,at=spawn,do=garbage");
    assert!(serde_json::from_str::<Value>(&rank.line().unwrap()).is_err());
    assert_eq!(rank.ask(&json!({"op": "ping"}))["op"], "pong");

    let mut rank = fault("rank=0,at=unload,do=close_stdout");
    rank.send(&json!({"op": "shutdown"}).to_string());
    assert_eq!(rank.line(), None);

    let mut rank = fault("rank=0,at=step,after=1,do=panic");
    assert_eq!(rank.ask(&load)["op"], "load_dense_shard_ok");
    assert_eq!(rank.ask(&step)["op"], "generate_step_ok");
    rank.refused(&step, "forward_failed");
    assert_eq!(rank.ask(&step)["op"], "generate_step_ok", "it lives on");

    fault("rank=1,at=spawn,do=exit").shut_down();

    let mut group = Group::start_with(1, &[("CONSORT_FAULT", "rank=0,at=idle,do=kill")]);
    group.load("llama");
    let (prompt, expected) = oracle("llama");
    assert_eq!(group.greedy(&prompt, 4), expected[..4]);
    assert!(!group.ranks[0].end().success());
}

#[test]
fn a_rank_that_stops_or_dies_is_taken_from_the_others_by_an_abort() {
    for action in ["stop", "kill", "exit", "close_stdout"] {
        let mut group = Group::start_with(2, &[("CONSORT_FAULT", &format!("rank=1,at=step,after=1,do={action}"))]);
        group.attach();
        group.load("llama");
        let session = group.open();
        assert_eq!(group.step(session, 0, &[1, 2, 3])[1]["op"], "step_ok");
        let line = step_line(session, 3, &[4]).to_string();
        group.ranks.iter_mut().for_each(|rank| rank.send(&line));
        if action == "close_stdout" {
            assert_eq!(group.ranks[1].line(), None);
            assert_eq!(group.ranks[0].reply()["op"], "step_ok", "it still computed");
        } else {
            group.ranks[0].abort(1);
        }
    }
}
