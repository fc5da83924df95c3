//! When a rank process ends.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ranks::worker::command;
use serde_json::json;
use types::WorldSize;

use crate::own_ops::{Group, step_line};
use crate::rank::{Rank, WATCHDOG, check_error, comm_id};

#[test]
fn ctrl_c_is_left_to_the_leader() {
    let mut rank = Rank::start(0, 1);
    let pong = rank.ask(&json!({"op": "ping"}));
    for _ in 0..3 {
        rustix::process::kill_process(rank.pid(), rustix::process::Signal::INT).unwrap();
        assert_eq!(rank.ask(&json!({"op": "ping"})), pong);
    }
    rank.shut_down();
}

#[test]
fn the_end_of_its_input_ends_a_rank_even_in_a_collective() {
    let mut idle = Rank::start(0, 2);
    idle.input = None;
    assert!(idle.end().success());

    let mut waiting = Rank::start(0, 2);
    waiting.send(&json!({"op": "init", "comm_id": comm_id(9)}).to_string());
    waiting.input = None;
    check_error(&waiting.reply(), "nccl_init_failed");
    waiting.end();

    let mut group = Group::start(2);
    group.attach();
    group.load("llama");
    let session = group.open();
    group.ranks[0].send(&step_line(session, 0, &[1, 2, 3]).to_string());
    group.ranks[0].input = None;
    check_error(&group.ranks[0].reply(), "aborted");
    group.ranks[0].end();
}

#[test]
fn a_rank_does_not_outlive_a_parent_that_is_killed() {
    // A shell is the parent. The rank's input stays open while the test runs, so only the parent's death can end the rank.
    let mut command = Command::new("sh");
    let script = r#"exec 3<&0; "$0" --worker --rank 0 --tp-size 1 <&3 3<&- & echo $!; wait"#;
    command.args(["-c", script, env!("CARGO_BIN_EXE_consort")]);
    let mut parent = Rank::spawn(command);
    let rank = parent.line().unwrap();
    parent.send("{\"op\":\"ping\"}");
    assert_eq!(parent.reply()["op"], "pong");
    assert!(is_running(&rank));
    parent.child.kill().unwrap();
    parent.end();
    let begun = Instant::now();
    while is_running(&rank) {
        assert!(begun.elapsed() < WATCHDOG, "an orphan");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_rank_outlives_the_thread_that_started_it() {
    let (mut rank, thread) = thread::spawn(|| (Rank::start(0, 1), rustix::thread::gettid())).join().unwrap();
    let begun = Instant::now();
    while fs::exists(format!("/proc/self/task/{}", thread.as_raw_nonzero())).unwrap() {
        assert!(begun.elapsed() < WATCHDOG, "a thread that does not end");
        thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..3 {
        assert_eq!(rank.ask(&json!({"op": "ping"}))["op"], "pong");
    }
    rank.shut_down();
}

#[test]
fn a_stopped_rank_of_our_own_ends_with_the_thread_that_started_it() {
    let started = || {
        let rank = WorldSize::new(1).unwrap().rank(0).unwrap();
        let mut rank = Rank::spawn(command(env!("CARGO_BIN_EXE_consort").as_ref(), rank, 0));
        assert_eq!(rank.ask(&json!({"op": "ping"}))["op"], "pong");
        rustix::process::kill_process(rank.pid(), rustix::process::Signal::STOP).unwrap();
        rank
    };
    assert!(!thread::spawn(started).join().unwrap().end().success());
}

/// A zombie, which has ended but was not waited for, is not running.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}
