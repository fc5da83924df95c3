//! `consort --worker` driven by hand, over pipes, with the lines of the protocol.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use cluster::protocol::share::Share;
use cluster::shared_memory::{GroupLimits, Segment};
use cluster::worker::build_id;
use kernels::StepLimits;
use kernels::cpu::CpuOptions;
use model::{Limits, LoadOptions};
use serde_json::{Value, json};
use types::WorldSize;

/// Far beyond what any of this takes: what needs longer hangs.
const WATCHDOG: Duration = Duration::from_secs(120);

const ELEMENTS_MAX: usize = 1 << 16;

struct Rank {
    child: Child,
    input: Option<ChildStdin>,
    replies: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, world: usize) -> Self {
        Self::start_with(rank, world, &[])
    }

    fn start_with(rank: usize, world: usize, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
        command.args(["--worker", "--rank", &rank.to_string(), "--tp-size", &world.to_string(), "--cuda-device", "3"]);
        command.envs(environment.iter().copied());
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let (sender, replies) = channel();
        thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        Self { child, input, replies }
    }

    fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    fn send(&mut self, line: &str) {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
    }

    /// The next line, as text. `None`: there will be none.
    fn line(&self) -> Option<String> {
        match self.replies.recv_timeout(WATCHDOG) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no reply"),
        }
    }

    fn reply(&self) -> Value {
        serde_json::from_str(&self.line().expect("a rank that answers")).unwrap()
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.send(&request.to_string());
        self.reply()
    }

    /// Asks, and holds the whole reply against `expected`.
    fn check(&mut self, request: &Value, expected: &Value) {
        assert_eq!(self.ask(request), *expected, "{request}");
    }

    fn refused(&mut self, request: &Value, kind: &str) {
        check_error(&self.ask(request), kind);
    }

    /// Ends a generation of the group that this rank waits for: the wait ends with it. Either may be told first.
    fn abort(&mut self, generation: u32) {
        self.send(&json!({"op": "abort", "id": 7, "generation": generation}).to_string());
        let (answers, others): (Vec<_>, _) =
            [self.reply(), self.reply()].into_iter().partition(|reply| reply["id"] == 7);
        assert_eq!(answers, [json!({"op": "aborted", "id": 7, "generation": generation})]);
        others.iter().for_each(|reply: &Value| check_error(reply, "aborted"));
    }

    fn end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < WATCHDOG, "a rank that does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn shut_down(mut self) {
        self.check(&json!({"op": "shutdown"}), &json!({"op": "bye"}));
        assert_eq!(self.end().code(), Some(0));
        assert_eq!(self.line(), None, "nothing follows the last reply");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn check_error(reply: &Value, kind: &str) {
    assert_eq!(reply["op"], "error", "{reply}");
    assert_eq!(reply["kind"], kind, "{reply}");
    assert!(reply["message"].as_str().is_some_and(|message| !message.is_empty()), "{reply}");
}

/// All ranks get the same line before any of them is waited for, as a leader does it.
fn ask_all(ranks: &mut [Rank], request: &Value) -> Vec<Value> {
    ranks.iter_mut().for_each(|rank| rank.send(&request.to_string()));
    ranks.iter().map(Rank::reply).collect()
}

#[track_caller]
fn check_all(ranks: &mut [Rank], request: &Value, expected: &Value) {
    for reply in ask_all(ranks, request) {
        assert_eq!(reply, *expected, "{request}");
    }
}

fn model(architecture: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/oracle").join(architecture);
    folder.join("model-f32").canonicalize().unwrap()
}

fn load_dense(architecture: &str, model_id: &str) -> Value {
    let folder = model(architecture);
    json!({
        "op": "load_dense_shard",
        "model_id": model_id,
        "config_json": fs::read_to_string(folder.join("config.json")).unwrap(),
        "safetensors_paths": [folder.join("model.safetensors")],
    })
}

/// An id that no other test, and no other run, uses.
fn comm_id(test: u8) -> String {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos();
    format!("{test:02x}{:08x}{now:032x}", std::process::id()).repeat(6)
}

#[test]
fn the_lines_of_the_protocol_page_are_answered_as_it_says() {
    let mut rank = Rank::start(1, 4);
    rank.check(&json!({"op": "ping"}), &json!({"op": "pong", "rank": 1, "world_size": 4, "cuda_device": 3}));
    rank.refused(&json!({"op": "explode"}), "unknown_op");
    rank.refused(&json!({"op": "nccl_sanity_check"}), "nccl_not_initialised");
    rank.refused(&json!({"op": "init", "comm_id": "not digits"}), "nccl_init_failed");
    rank.refused(&json!({"op": "clear_kv_cache", "model_id": "none"}), "model_not_loaded");
    rank.refused(&json!({"op": "generate_step", "model_id": "none", "tokens": [1], "offset": 0}), "model_not_loaded");
    rank.refused(&json!({"op": "unload_model", "model_id": "none"}), "model_not_loaded");
    rank.shut_down();

    let mut alone = Rank::start(0, 1);
    alone.check(&json!({"op": "init", "comm_id": "deadbeef"}), &json!({"op": "init_ok"}));
    let sum = json!({"op": "nccl_sanity_result", "observed_sum": 1});
    alone.check(&json!({"op": "nccl_sanity_check"}), &sum);
    alone.shut_down();
}

#[test]
fn bad_lines_are_refused_in_their_turn_and_the_rank_lives_on() {
    let mut rank = Rank::start(0, 1);
    let lines =
        ["nonsense", "", "   ", "[1,2]", "{\"op\":7}", "{\"op\":\"ping\"", "{\"op\":\"step\",\"id\":9}", "null"];
    lines.iter().for_each(|line| rank.send(line));
    rank.input.as_mut().unwrap().write_all(b"\xff\xfe\n").unwrap();
    rank.send("{\"op\":\"ping\"}");
    for _ in 0..lines.len() - 2 + 1 {
        check_error(&rank.reply(), "bad_request");
    }
    assert_eq!(rank.reply()["op"], "pong", "blank lines are passed over");
    rank.check(
        &json!({"op": "ping", "new_field": [1, {}]}),
        &json!({"op":"pong","rank":0,"world_size":1,"cuda_device":3}),
    );
    rank.shut_down();
}

#[test]
fn a_foreign_leader_drives_two_ranks_through_the_life_of_two_models() {
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(rank, 2)).collect();
    // Twice: the second group replaces the first.
    for attempt in 0..2 {
        check_all(&mut ranks, &json!({"op": "init", "comm_id": comm_id(attempt)}), &json!({"op": "init_ok"}));
        let sum = json!({"op": "nccl_sanity_result", "observed_sum": 2});
        check_all(&mut ranks, &json!({"op": "nccl_sanity_check"}), &sum);
    }
    for (architecture, id) in [("llama", "a"), ("qwen3_moe", "b")] {
        check_all(&mut ranks, &load_dense(architecture, id), &json!({"op": "load_dense_shard_ok"}));
        ask_all(&mut ranks, &load_dense(architecture, id))
            .iter()
            .for_each(|reply| check_error(reply, "already_loaded"));
    }
    let step = |id: &str, tokens: &[u32], offset: usize| json!({"op": "generate_step", "model_id": id, "tokens": tokens, "offset": offset});
    let done = json!({"op": "generate_step_ok"});
    for id in ["a", "b"] {
        check_all(&mut ranks, &step(id, &[1, 2, 3, 4, 5], 0), &done);
        check_all(&mut ranks, &step(id, &[6], 5), &done);
        check_all(&mut ranks, &step(id, &[7], 3), &done);
        for bad in [step(id, &[8], 6), step(id, &[u32::MAX], 0), step(id, &[], 0), step(id, &[1], usize::MAX)] {
            ask_all(&mut ranks, &bad).iter().for_each(|reply| check_error(reply, "forward_failed"));
        }
        check_all(&mut ranks, &step(id, &[8], 4), &done);
    }
    let cleared = json!({"op": "kv_cache_cleared"});
    check_all(&mut ranks, &json!({"op": "clear_kv_cache", "model_id": "a"}), &cleared);
    ask_all(&mut ranks, &step("a", &[1], 5)).iter().for_each(|reply| check_error(reply, "forward_failed"));
    check_all(&mut ranks, &step("a", &[1, 2], 0), &done);
    check_all(&mut ranks, &step("b", &[9], 5), &done);
    let images = json!({"op": "generate_step_with_images", "model_id": "a", "tokens": [1], "offset": 0,
        "image_token_id": 1, "image_data_uris": [], "chunk_size": 512});
    ask_all(&mut ranks, &images).iter().for_each(|reply| check_error(reply, "forward_failed"));
    for id in ["a", "b"] {
        check_all(&mut ranks, &json!({"op": "unload_model", "model_id": id}), &json!({"op": "unloaded"}));
        ask_all(&mut ranks, &step(id, &[1], 0)).iter().for_each(|reply| check_error(reply, "model_not_loaded"));
    }
    ranks.into_iter().for_each(Rank::shut_down);
}

#[test]
fn what_can_not_be_loaded_is_refused_by_kind() {
    let mut rank = Rank::start(0, 1);
    let good = load_dense("llama", "m");
    let changed = |key: &str, value: Value| {
        let mut request = good.clone();
        request[key] = value;
        request
    };
    rank.refused(&changed("config_json", json!("{\"model_type\": \"abacus\"}")), "unsupported_arch");
    rank.refused(&changed("config_json", json!("{")), "load_failed");
    rank.refused(&changed("safetensors_paths", json!(["/nowhere/model.safetensors"])), "load_failed");
    rank.refused(&changed("safetensors_paths", json!(["model.safetensors"])), "bad_request");
    rank.refused(&changed("safetensors_paths", json!([])), "load_failed");
    rank.refused(&changed("quant", json!("q8_1")), "load_failed");
    rank.check(&changed("quant", json!("Q8_0")), &json!({"op": "load_dense_shard_ok"}));
    let step = json!({"op": "generate_step", "model_id": "m", "tokens": vec![1; 200], "offset": 0});
    rank.check(&step, &json!({"op": "generate_step_ok"}));
    rank.shut_down();
}

/// A group of our own: a segment that the ranks inherit.
struct Group {
    segment: Segment,
    fd: OwnedFd,
    ranks: Vec<Rank>,
}

impl Group {
    fn start(world: u16) -> Self {
        Self::start_with(world, &[])
    }

    fn start_with(world: u16, environment: &[(&str, &str)]) -> Self {
        let limits = GroupLimits { world: WorldSize::new(world).unwrap(), elements_max: ELEMENTS_MAX };
        let (segment, fd) = Segment::create(limits).unwrap();
        // Without the flag that closes it on exec.
        let fd = rustix::io::dup(fd.as_fd()).unwrap();
        let ranks = (0..usize::from(world)).map(|rank| Rank::start_with(rank, world.into(), environment)).collect();
        Self { segment, fd, ranks }
    }

    fn attach(&mut self) {
        let world = self.ranks.len();
        let (fd, generation) = (self.fd.as_raw_fd(), self.segment.generation().0);
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let attach = json!({"op": "attach", "id": 2, "segment_fd": fd, "world_size": world, "rank": index,
                "elements_max": ELEMENTS_MAX, "generation": generation});
            rank.check(&attach, &json!({"op": "attach_ok", "id": 2}));
        }
    }

    /// Loads a model and opens session 1.
    fn load(&mut self, architecture: &str) {
        let limits =
            Limits { step: StepLimits { rows: 64, sequences: 4, pages: 64 }, wanted: 64, kv_pages: 32, positions: 400 };
        let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
        let share =
            Share::new(model(architecture).to_str().unwrap().to_owned(), &LoadOptions { keep: None, limits }, cpu);
        let load = json!({"op": "load", "id": 3, "model_id": "m", "share": share});
        for reply in ask_all(&mut self.ranks, &load) {
            assert_eq!((&reply["op"], &reply["id"]), (&json!("load_ok"), &json!(3)), "{reply}");
            assert!(reply["weight_bytes"].as_u64().unwrap() > 0 && reply["kv_bytes"].as_u64().unwrap() > 0);
            assert_eq!(reply["capacity"]["pages_total"], 32);
        }
    }

    fn open(&mut self) -> u64 {
        let open = json!({"op": "open", "id": 4, "tokens_max": 300,
            "prefix": {"tokens": [], "pages": "", "reuse_max": 0}});
        let opened = ask_all(&mut self.ranks, &open);
        assert!(opened.iter().all(|reply| reply == &opened[0] && reply["op"] == "opened"), "{opened:?}");
        opened[0]["session"].as_u64().unwrap()
    }

    fn step(&mut self, session: u64, position: usize, tokens: &[u32]) -> Vec<Value> {
        ask_all(&mut self.ranks, &step_line(session, position, tokens))
    }

    /// Greedy tokens after `prompt`.
    fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
        let session = self.open();
        let (mut given, mut next, mut position) = (Vec::new(), prompt.to_vec(), 0);
        for _ in 0..count {
            let replies = self.step(session, position, &next);
            let sampled = replies[0]["output"]["samples"][0]["outcome"]["ok"]["token"].as_u64().expect("a token");
            for other in &replies[1..] {
                assert_eq!(*other, json!({"op": "step_ok", "id": 5, "output": {}}), "the first rank answers for all");
            }
            position += next.len();
            next = vec![sampled as u32];
            given.extend_from_slice(&next);
        }
        let close = json!({"op": "close", "id": 6, "session": session});
        check_all(&mut self.ranks, &close, &json!({"op": "closed", "id": 6}));
        given
    }
}

fn step_line(session: u64, position: usize, tokens: &[u32]) -> Value {
    let sampling = json!({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0});
    let want = json!({"sample": {"rows": 1, "prompt": 0, "sampling": sampling}});
    json!({"op": "step", "id": 5, "plan": {"entries": [
        {"session": session, "role": "prompt", "position": position, "tokens": tokens, "want": want}]}})
}

fn oracle(architecture: &str) -> (Vec<u32>, Vec<u32>) {
    let path = model(architecture).parent().unwrap().join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let tokens = |ids: &Value| serde_json::from_value::<Vec<u32>>(ids.clone()).unwrap();
    let prompt = &manifest["prompts"][0];
    (tokens(&prompt["ids"]), tokens(&prompt["greedy"]["f32"]["tokens"]))
}

#[test]
fn our_own_ops_give_the_oracles_tokens_and_weights_outlive_a_generation() {
    let mut group = Group::start(2);
    let hello = json!({"op": "hello", "id": 1, "protocol": 2, "build": binary_build()});
    for (index, rank) in group.ranks.iter_mut().enumerate() {
        let pid = rank.child.id();
        rank.check(&hello, &json!({"op": "hello_ok", "id": 1, "protocol": 2, "build": binary_build(), "pid": pid}));
        rank.refused(&json!({"op": "hello", "id": 1, "protocol": 1, "build": binary_build()}), "bad_request");
        rank.refused(&json!({"op": "hello", "id": 1, "protocol": 2, "build": build_id()}), "bad_request");
        rank.refused(&step_line(1, 0, &[1]), "model_not_loaded");
        let attach = |rank: usize, world: u16, fd: i32| {
            json!({"op": "attach", "id": 2, "segment_fd": fd, "world_size": world, "rank": rank,
                "elements_max": ELEMENTS_MAX, "generation": 1})
        };
        let fd = group.fd.as_raw_fd();
        rank.refused(&attach(1 - index, 2, fd), "bad_request");
        rank.refused(&attach(index, 3, fd), "bad_request");
        rank.refused(&attach(index, 2, 0), "nccl_init_failed");
        rank.refused(&attach(index, 2, 9999), "nccl_init_failed");
    }
    group.attach();
    group.load("qwen3");
    let (prompt, expected) = oracle("qwen3");
    assert_eq!(group.greedy(&prompt, expected.len()), expected);

    // One rank runs a step that the other does not: only an abort ends it.
    let session = group.open();
    group.ranks[0].send(&step_line(session, 0, &[1, 2, 3]).to_string());
    group.ranks[0].abort(1);
    for reply in group.step(session, 0, &[1, 2, 3]) {
        check_error(&reply, "aborted");
    }
    group.segment.reform().unwrap();
    check_error(&group.step(session, 0, &[1, 2, 3])[0], "stale");
    group.attach();
    assert_eq!(group.greedy(&prompt, expected.len()), expected, "without another load");

    for reply in ask_all(&mut group.ranks, &json!({"op": "stats", "id": 8})) {
        let stats = &reply["stats"];
        assert_eq!((&stats["generation"], &stats["sessions"]), (&json!(2), &json!(0)), "{stats}");
        for count in ["steps", "collectives", "step_us", "collective_us", "resident_bytes", "weight_bytes", "kv_bytes"]
        {
            assert!(stats[count].as_u64().unwrap() > 0, "{count}: {stats}");
        }
    }
    check_all(&mut group.ranks, &json!({"op": "unload_model", "model_id": "m"}), &json!({"op": "unloaded"}));
    group.load("llama");
    let (prompt, expected) = oracle("llama");
    assert_eq!(group.greedy(&prompt, 8), expected[..8], "the seat outlives a model");
    group.ranks.into_iter().for_each(Rank::shut_down);
}

/// What the binary calls itself: this test is another one.
fn binary_build() -> String {
    let mut rank = Rank::start(0, 1);
    let reply = rank.ask(&json!({"op": "hello", "id": 1, "protocol": 2, "build": ""}));
    let message = reply["message"].as_str().unwrap();
    message.rsplit(' ').next().unwrap().to_owned()
}

#[test]
fn a_rank_that_leaves_ends_the_steps_of_the_others() {
    let mut group = Group::start(2);
    group.attach();
    group.load("llama");
    let session = group.open();
    group.ranks[1].send(&step_line(session, 0, &[1, 2, 3]).to_string());
    // Its plan names a session that is not open here: the rank fails, and takes the generation with it.
    check_error(&group.ranks[0].ask(&step_line(session + 99, 0, &[1, 2, 3])), "forward_failed");
    check_error(&group.ranks[1].reply(), "aborted");
}

#[test]
fn requests_that_have_not_begun_can_be_cancelled() {
    let mut group = Group::start(2);
    group.attach();
    group.load("llama");
    let session = group.open();
    let rank = &mut group.ranks[0];
    // It waits for the other rank, and what follows waits for it.
    rank.send(&step_line(session, 0, &[1, 2, 3]).to_string());
    rank.send(&json!({"op": "stats", "id": 21}).to_string());
    rank.send(&json!({"op": "stats", "id": 22}).to_string());
    rank.check(&json!({"op": "cancel", "id": 30, "target": 21}), &json!({"op": "cancelled", "id": 30, "found": true}));
    rank.check(&json!({"op": "cancel", "id": 31, "target": 99}), &json!({"op": "cancelled", "id": 31, "found": false}));
    group.segment.abort(group.segment.generation()).stop();
    check_error(&group.ranks[0].reply(), "aborted");
    assert_eq!(group.ranks[0].reply()["id"], 22, "what was cancelled is not answered");
}

#[test]
fn an_abort_comes_through_a_flood_of_requests() {
    const FLOOD: usize = 3000;
    let mut group = Group::start(2);
    group.attach();
    group.load("llama");
    let session = group.open();
    let rank = &mut group.ranks[0];
    rank.send(&step_line(session, 0, &[1, 2, 3]).to_string());
    (0..FLOOD).for_each(|_| rank.send(&json!({"op": "stats", "id": 40}).to_string()));
    rank.send(&json!({"op": "abort", "id": 41, "generation": 1}).to_string());
    let replies: Vec<_> = (0..FLOOD + 2).map(|_| rank.reply()).collect();
    let count = |op: &str| replies.iter().filter(|reply| reply["op"] == op).count();
    assert_eq!(count("aborted"), 1);
    assert_eq!(count("stats_ok") + count("error"), FLOOD + 1, "one reply to each");
    assert!(count("stats_ok") > 0 && count("error") > 1, "what did not fit was refused");
    group.ranks.remove(0).shut_down();
}

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
    // A shell is the parent. The rank's input stays open for as long as this test lives: only its parent's death can end it.
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

/// A process that has ended may be kept until someone asks for its status.
fn is_running(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

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
    for deed in ["stop", "kill", "exit", "close_stdout"] {
        let mut group = Group::start_with(2, &[("CONSORT_FAULT", &format!("rank=1,at=step,after=1,do={deed}"))]);
        group.attach();
        group.load("llama");
        let session = group.open();
        assert_eq!(group.step(session, 0, &[1, 2, 3])[1]["op"], "step_ok");
        let line = step_line(session, 3, &[4]).to_string();
        group.ranks.iter_mut().for_each(|rank| rank.send(&line));
        if deed == "close_stdout" {
            assert_eq!(group.ranks[1].line(), None);
            assert_eq!(group.ranks[0].reply()["op"], "step_ok", "it still computed");
        } else {
            group.ranks[0].abort(1);
        }
    }
}
