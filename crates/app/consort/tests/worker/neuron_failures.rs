//! Failures of a group with a foreign leader: a rank is killed, stalls, fails alone or never gets its line. The leader knows
//! only the ops of the neuron protocol. No test waits for a deadline unless it tests that deadline; other deadlines are set
//! to a day.

use std::fs;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::rank::{Rank, ask_all, check_all, check_error, comm_id, load_dense, model};

const TIMEOUT: &str = "CONSORT_COLLECTIVE_TIMEOUT";
/// Longer than any test, so this deadline never passes.
const DAY: &str = "86400";
/// For tests that wait until the deadline passes. What is to happen before it does so on a busy machine too.
const SHORT: &str = "5";

const DONE: &str = "generate_step_ok";

struct Leader {
    ranks: Vec<Rank>,
    environment: Vec<(&'static str, String)>,
    inits: u8,
}

impl Leader {
    /// A group of `world` ranks that have all loaded the model of `load`.
    fn start(world: usize, timeout: &str, fault: Option<&str>, load: &Value) -> Self {
        let mut leader = Self::without_model(world, timeout, fault);
        check_all(&mut leader.ranks, load, &json!({"op": "load_dense_shard_ok"}));
        leader
    }

    fn without_model(world: usize, timeout: &str, fault: Option<&str>) -> Self {
        let mut environment = vec![(TIMEOUT, timeout.to_owned())];
        environment.extend(fault.map(|fault| ("CONSORT_FAULT", fault.to_owned())));
        let mut leader = Self { ranks: Vec::new(), environment, inits: 0 };
        leader.ranks = (0..world).map(|rank| leader.spawn(rank, world)).collect();
        leader.init();
        leader
    }

    fn spawn(&self, rank: usize, world: usize) -> Rank {
        let environment: Vec<_> = self.environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Rank::start_with(rank, world, &environment)
    }

    #[track_caller]
    fn init(&mut self) {
        self.inits += 1;
        let init = json!({"op": "init", "comm_id": comm_id(self.inits)});
        check_all(&mut self.ranks, &init, &json!({"op": "init_ok"}));
        let sum = json!({"op": "nccl_sanity_result", "observed_sum": self.ranks.len()});
        check_all(&mut self.ranks, &json!({"op": "nccl_sanity_check"}), &sum);
    }

    #[track_caller]
    fn clear(&mut self) {
        let clear = json!({"op": "clear_kv_cache", "model_id": "m"});
        // One after the other: this op waits for no other rank.
        for rank in &mut self.ranks {
            rank.check(&clear, &json!({"op": "kv_cache_cleared"}));
        }
    }

    #[track_caller]
    fn steps_run(&mut self, offset: usize) {
        check_all(&mut self.ranks, &step(&[1, 2, 3, 4], offset), &json!({"op": DONE}));
        check_all(&mut self.ranks, &step(&[5], offset + 4), &json!({"op": DONE}));
    }

    #[track_caller]
    fn is_usable_after_clear(&mut self) {
        for reply in ask_all(&mut self.ranks, &step(&[1], 0)) {
            assert_eq!(reply["op"], "error", "not before the caches are cleared: {reply}");
        }
        self.clear();
        self.steps_run(0);
    }

    fn replace(&mut self, index: usize) {
        self.ranks[index] = self.spawn(index, self.ranks.len());
        self.init();
        self.ranks[index].check(&load_dense("llama", "m"), &json!({"op": "load_dense_shard_ok"}));
        self.steps_run(0);
    }

    fn shut_down(self) {
        self.ranks.into_iter().for_each(Rank::shut_down);
    }
}

fn step(tokens: &[u32], offset: usize) -> Value {
    json!({"op": "generate_step", "model_id": "m", "tokens": tokens, "offset": offset})
}

/// A `load` op for a model with this context.
fn load_with_context(context: usize) -> Value {
    let text = fs::read_to_string(model("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["max_position_embeddings"] = json!(context);
    let mut load = load_dense("llama", "m");
    load["config_json"] = json!(config.to_string());
    load
}

#[track_caller]
fn check_message(reply: &Value, kind: &str, parts: &[&str]) {
    check_error(reply, kind);
    let message = reply["message"].as_str().unwrap();
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn a_rank_that_is_killed_between_steps_is_noticed_and_can_be_replaced() {
    let mut leader = Leader::start(3, DAY, None, &load_dense("llama", "m"));
    leader.steps_run(0);
    for killed in [2, 0] {
        leader.ranks[killed].child.kill().unwrap();
        leader.ranks[killed].end();
        for other in (0..3).filter(|&rank| rank != killed) {
            let gone = format!("rank {killed}");
            check_message(&leader.ranks[other].ask(&step(&[6], 5)), "aborted", &[&gone, "init"]);
            check_error(&leader.ranks[other].ask(&json!({"op": "nccl_sanity_check"})), "aborted");
            let clear = json!({"op": "clear_kv_cache", "model_id": "m"});
            leader.ranks[other].check(&clear, &json!({"op": "kv_cache_cleared"}));
            check_message(&leader.ranks[other].ask(&step(&[6], 0)), "aborted", &[&gone, "init"]);
        }
        leader.replace(killed);
    }
    leader.shut_down();
}

#[test]
fn a_rank_that_is_killed_in_the_middle_of_a_step_is_noticed_and_can_be_replaced() {
    let load = load_with_context(1 << 16);
    for killed in [1, 0] {
        let mut leader = Leader::start(2, DAY, None, &load);
        // Seconds of work.
        let long = step(&vec![7; 1 << 15], 0);
        leader.ranks.iter_mut().for_each(|rank| rank.send(&long.to_string()));
        let other = 1 - killed;
        assert_eq!(leader.ranks[other].ask(&json!({"op": "ping"}))["op"], "pong", "while the step runs");
        leader.ranks[killed].child.kill().unwrap();
        check_error(&leader.ranks[other].reply(), "aborted");
        leader.replace(killed);
        leader.shut_down();
    }
}

#[test]
fn a_rank_that_dies_or_hangs_up_when_a_step_comes_is_noticed() {
    for action in ["kill", "exit"] {
        let fault = format!("rank=1,at=step,after=1,do={action}");
        let mut leader = Leader::start(2, DAY, Some(&fault), &load_dense("llama", "m"));
        check_all(&mut leader.ranks, &step(&[1, 2], 0), &json!({"op": DONE}));
        let line = step(&[3], 2).to_string();
        leader.ranks.iter_mut().for_each(|rank| rank.send(&line));
        check_message(&leader.ranks[0].reply(), "aborted", &["rank 1"]);
        leader.environment.pop();
        leader.replace(1);
        leader.shut_down();
    }
}

#[test]
fn a_rank_that_stalls_is_waited_for_until_the_timeout() {
    let mut leader = Leader::start(2, SHORT, None, &load_with_context(1 << 16));
    for stalled in [1, 0] {
        // Before the step, and in the middle of a long one.
        for prompt in [4, 1 << 15] {
            if prompt == 4 {
                kill_process(leader.ranks[stalled].pid(), Signal::STOP).unwrap();
            }
            let line = step(&vec![7; prompt], 0).to_string();
            leader.ranks.iter_mut().for_each(|rank| rank.send(&line));
            let other = &mut leader.ranks[1 - stalled];
            assert_eq!(other.ask(&json!({"op": "ping"}))["op"], "pong");
            kill_process(leader.ranks[stalled].pid(), Signal::STOP).unwrap();
            check_error(&leader.ranks[1 - stalled].reply(), "aborted");
            kill_process(leader.ranks[stalled].pid(), Signal::CONT).unwrap();
            check_error(&leader.ranks[stalled].reply(), "aborted");
            leader.is_usable_after_clear();
            leader.clear();
        }
    }
    leader.shut_down();
}

#[test]
fn a_rank_that_never_gets_its_line_is_waited_for_until_the_timeout() {
    let mut leader = Leader::start(3, SHORT, None, &load_dense("llama", "m"));
    for starved in 0..3 {
        leader.steps_run(0);
        let line = step(&[6], 5).to_string();
        let others: Vec<_> = (0..3).filter(|&rank| rank != starved).collect();
        others.iter().for_each(|&rank| leader.ranks[rank].send(&line));
        for &rank in &others {
            assert_eq!(leader.ranks[rank].ask(&json!({"op": "ping"}))["op"], "pong", "while it waits");
        }
        for &rank in &others {
            check_message(&leader.ranks[rank].reply(), "aborted", &["clear_kv_cache"]);
        }
        check_error(&leader.ranks[starved].ask(&step(&[6], 5)), "aborted");
        leader.is_usable_after_clear();
    }
    leader.shut_down();
}

#[test]
fn a_token_that_one_rank_refuses_is_refused_by_all_and_nothing_has_changed() {
    let mut leader = Leader::start(3, DAY, None, &load_dense("llama", "m"));
    leader.steps_run(0);
    for (refusing, bad) in
        [step(&[1 << 20], 5), step(&[], 5), step(&[1], 9), step(&vec![1; 2000], 5)].iter().enumerate()
    {
        let refusing = refusing % 3;
        for (index, rank) in leader.ranks.iter_mut().enumerate() {
            rank.send(&if index == refusing { bad.to_string() } else { step(&[6], 5).to_string() });
        }
        for (index, rank) in leader.ranks.iter().enumerate() {
            let reply = rank.reply();
            check_error(&reply, "forward_failed");
            let names_it = reply["message"].as_str().unwrap().contains(&format!("rank {refusing}"));
            assert_eq!(names_it, index != refusing, "{reply}");
        }
    }
    check_all(&mut leader.ranks, &step(&[6], 5), &json!({"op": DONE}));
    leader.shut_down();
}

#[test]
fn ranks_that_are_given_different_steps_run_none() {
    let mut leader = Leader::start(2, DAY, None, &load_dense("llama", "m"));
    leader.steps_run(0);
    for (index, rank) in leader.ranks.iter_mut().enumerate() {
        rank.send(&step(&[index as u32], 5).to_string());
    }
    leader.ranks.iter().for_each(|rank| check_message(&rank.reply(), "aborted", &["another request"]));
    leader.is_usable_after_clear();
    leader.shut_down();
}

#[test]
fn a_file_that_one_rank_has_not_got_is_its_own_trouble_until_it_has_it() {
    let mut leader = Leader::without_model(2, DAY, None);
    let good = load_dense("llama", "m");
    let mut bad = good.clone();
    bad["safetensors_paths"] = json!(["/nowhere/model.safetensors"]);
    for missing in [1, 0] {
        leader.ranks[1 - missing].check(&good, &json!({"op": "load_dense_shard_ok"}));
        leader.ranks[missing].refused(&bad, "load_failed");
        let replies = ask_all(&mut leader.ranks, &step(&[1, 2], 0));
        check_error(&replies[missing], "model_not_loaded");
        check_message(&replies[1 - missing], "forward_failed", &[&format!("rank {missing}")]);
        leader.ranks[missing].check(&good, &json!({"op": "load_dense_shard_ok"}));
        leader.steps_run(0);
        check_all(&mut leader.ranks, &json!({"op": "unload_model", "model_id": "m"}), &json!({"op": "unloaded"}));
    }
    leader.shut_down();
}

#[test]
fn a_step_that_fails_on_the_way_needs_only_cleared_caches() {
    for (action, kind) in [("oom", "insufficient_memory"), ("panic", "forward_failed")] {
        for failing in [0, 1] {
            let fault = format!("rank={failing},at=step,after=2,do={action}");
            let mut leader = Leader::start(2, DAY, Some(&fault), &load_dense("llama", "m"));
            leader.steps_run(0);
            let replies = ask_all(&mut leader.ranks, &step(&[6], 5));
            check_error(&replies[failing], kind);
            check_message(&replies[1 - failing], "aborted", &[&format!("rank {failing}")]);
            leader.is_usable_after_clear();
            leader.shut_down();
        }
    }
}

#[test]
fn the_cache_of_another_model_outlives_a_failed_step() {
    let mut leader = Leader::start(2, SHORT, None, &load_dense("llama", "m"));
    check_all(&mut leader.ranks, &load_dense("qwen3", "other"), &json!({"op": "load_dense_shard_ok"}));
    let other = |tokens: &[u32], offset: usize| json!({"op": "generate_step", "model_id": "other", "tokens": tokens, "offset": offset});
    check_all(&mut leader.ranks, &other(&[1, 2, 3], 0), &json!({"op": DONE}));
    check_error(&leader.ranks[0].ask(&step(&[1], 0)), "aborted");
    leader.clear();
    check_all(&mut leader.ranks, &other(&[4], 3), &json!({"op": DONE}));
    leader.steps_run(0);
    leader.shut_down();
}

#[test]
fn init_forms_a_group_again_on_the_same_processes() {
    let mut leader = Leader::start(2, SHORT, None, &load_dense("llama", "m"));
    for starved in [1, 0] {
        leader.steps_run(0);
        check_error(&leader.ranks[1 - starved].ask(&step(&[6], 5)), "aborted");
        leader.init();
        // The models stay loaded; their sequences are gone.
        for reply in ask_all(&mut leader.ranks, &step(&[6], 5)) {
            check_error(&reply, "forward_failed");
        }
    }
    leader.steps_run(0);
    // `init` also works in a healthy group, and with an id that was used before.
    let init = json!({"op": "init", "comm_id": comm_id(77)});
    for _ in 0..2 {
        check_all(&mut leader.ranks, &init, &json!({"op": "init_ok"}));
        leader.steps_run(0);
    }
    leader.shut_down();
}

#[test]
fn a_leader_that_is_rank_zero_itself_is_told_so() {
    // A world size that no other test uses, so no rank 0 of it exists.
    let environment = [("CONSORT_INIT_TIMEOUT", DAY)];
    let mut workers: Vec<_> = (1..7).map(|rank| Rank::start_with(rank, 7, &environment)).collect();
    for reply in ask_all(&mut workers, &json!({"op": "init", "comm_id": comm_id(50)})) {
        check_message(&reply, "nccl_init_failed", &["leader that is rank 0 itself", "--worker --rank 0"]);
    }
    workers.into_iter().for_each(Rank::shut_down);
}

#[test]
fn a_rank_that_never_gets_its_init_is_waited_for_until_the_timeout() {
    let environment = [("CONSORT_INIT_TIMEOUT", SHORT)];
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start_with(rank, 2, &environment)).collect();
    // Each id is another one.
    ranks.iter_mut().for_each(|rank| rank.send(&json!({"op": "init", "comm_id": comm_id(51)}).to_string()));
    ranks.iter().for_each(|rank| check_error(&rank.reply(), "nccl_init_failed"));
    check_all(&mut ranks, &json!({"op": "init", "comm_id": comm_id(52)}), &json!({"op": "init_ok"}));
    ranks.into_iter().for_each(Rank::shut_down);
}

#[test]
fn prompts_are_as_long_as_the_context_of_the_model() {
    let context = 10_000;
    let mut leader = Leader::start(2, DAY, None, &load_with_context(context));
    check_all(&mut leader.ranks, &step(&vec![7; 9000], 0), &json!({"op": DONE}));
    check_all(&mut leader.ranks, &step(&vec![8; 1000], 9000), &json!({"op": DONE}));
    for (tokens, offset) in [(1, context), (9000, 9000), (context + 1, 0)] {
        let needed = (tokens + offset).to_string();
        for reply in ask_all(&mut leader.ranks, &step(&vec![7; tokens], offset)) {
            check_message(&reply, "forward_failed", &[&needed, "10000"]);
        }
    }
    check_all(&mut leader.ranks, &step(&[8], context - 1), &json!({"op": DONE}));
    leader.shut_down();
}
