//! consort's own ops: a group on a shared memory segment that the ranks inherit.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use collectives::shared_memory::{GroupLimits, Segment};
use kernels::StepLimits;
use kernels::cpu::CpuOptions;
use model::{Limits, LoadOptions};
use ranks::protocol::VERSION;
use ranks::protocol::shard::ShardSpec;
use ranks::worker::build_id;
use serde_json::{Value, json};
use types::WorldSize;

use crate::rank::{Rank, ask_all, check_all, check_error, model};

pub const ELEMENTS_MAX: usize = 1 << 16;

/// Ranks that inherit a shared memory segment.
pub struct Group {
    pub segment: Segment,
    pub fd: OwnedFd,
    pub ranks: Vec<Rank>,
}

impl Group {
    pub fn start(world: u16) -> Self {
        Self::start_with(world, &[])
    }

    pub fn start_with(world: u16, environment: &[(&str, &str)]) -> Self {
        let limits = GroupLimits { world: WorldSize::new(world).unwrap(), elements_max: ELEMENTS_MAX };
        let (segment, fd) = Segment::create(limits).unwrap();
        // A duplicate without the close-on-exec flag.
        let fd = rustix::io::dup(fd.as_fd()).unwrap();
        let ranks = (0..usize::from(world)).map(|rank| Rank::start_with(rank, world.into(), environment)).collect();
        Self { segment, fd, ranks }
    }

    pub fn attach(&mut self) {
        let world = self.ranks.len();
        let (fd, epoch) = (self.fd.as_raw_fd(), self.segment.epoch().0);
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let attach = json!({"op": "attach", "id": 2, "segment_fd": fd, "world_size": world, "rank": index,
                "elements_max": ELEMENTS_MAX, "epoch": epoch});
            rank.check(&attach, &json!({"op": "attach_ok", "id": 2}));
        }
    }

    /// Loads a model and opens session 1.
    pub fn load(&mut self, architecture: &str) {
        let limits = Limits {
            step: StepLimits { rows: 64, sequences: 4, pages: 64 },
            logit_rows: 64,
            kv_pages: 32,
            positions: 400,
        };
        let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
        let shard =
            ShardSpec::new(model(architecture).to_str().unwrap().to_owned(), &LoadOptions { keep: None, limits }, cpu);
        let load = json!({"op": "load", "id": 3, "model_id": "m", "shard": shard});
        for reply in ask_all(&mut self.ranks, &load) {
            assert_eq!((&reply["op"], &reply["id"]), (&json!("load_ok"), &json!(3)), "{reply}");
            assert!(reply["weight_bytes"].as_u64().unwrap() > 0 && reply["kv_bytes"].as_u64().unwrap() > 0);
            assert_eq!(reply["capacity"]["pages_total"], 32);
        }
    }

    pub fn open(&mut self) -> u64 {
        let open = json!({"op": "open", "id": 4, "tokens_max": 300,
            "prefix": {"tokens": [], "pages": "", "reuse_max": 0}});
        let opened = ask_all(&mut self.ranks, &open);
        assert!(opened.iter().all(|reply| reply == &opened[0] && reply["op"] == "opened"), "{opened:?}");
        opened[0]["session"].as_u64().unwrap()
    }

    pub fn step(&mut self, session: u64, position: usize, tokens: &[u32]) -> Vec<Value> {
        ask_all(&mut self.ranks, &step_line(session, position, tokens))
    }

    /// Greedy tokens after `prompt`.
    pub fn greedy(&mut self, prompt: &[u32], count: usize) -> Vec<u32> {
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

pub fn step_line(session: u64, position: usize, tokens: &[u32]) -> Value {
    let sampling = json!({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0});
    let requested = json!({"sample": {"rows": 1, "prompt_tokens": 0, "sampling": sampling}});
    json!({"op": "step", "id": 5, "plan": {"entries": [
        {"session": session, "phase": "prefill", "position": position, "tokens": tokens, "requested": requested}]}})
}

pub fn oracle(architecture: &str) -> (Vec<u32>, Vec<u32>) {
    let path = model(architecture).parent().unwrap().join("manifest.json");
    let manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let tokens = |ids: &Value| serde_json::from_value::<Vec<u32>>(ids.clone()).unwrap();
    let prompt = &manifest["prompts"][0];
    (tokens(&prompt["ids"]), tokens(&prompt["greedy"]["f32"]["tokens"]))
}

#[test]
fn our_own_ops_give_the_oracles_tokens_and_weights_outlive_a_generation() {
    let mut group = Group::start(2);
    let hello = json!({"op": "hello", "id": 1, "protocol": VERSION, "build": binary_build()});
    for (index, rank) in group.ranks.iter_mut().enumerate() {
        let pid = rank.child.id();
        rank.check(
            &hello,
            &json!({"op": "hello_ok", "id": 1, "protocol": VERSION, "build": binary_build(), "pid": pid}),
        );
        rank.refused(&json!({"op": "hello", "id": 1, "protocol": VERSION - 1, "build": binary_build()}), "bad_request");
        rank.refused(&json!({"op": "hello", "id": 1, "protocol": VERSION, "build": build_id()}), "bad_request");
        rank.refused(&step_line(1, 0, &[1]), "model_not_loaded");
        let attach = |rank: usize, world: u16, fd: i32| {
            json!({"op": "attach", "id": 2, "segment_fd": fd, "world_size": world, "rank": rank,
                "elements_max": ELEMENTS_MAX, "epoch": 1})
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

    // One rank runs a step that the other does not run: only an abort ends it.
    let session = group.open();
    group.ranks[0].send(&step_line(session, 0, &[1, 2, 3]).to_string());
    group.ranks[0].abort(1);
    for reply in group.step(session, 0, &[1, 2, 3]) {
        check_error(&reply, "aborted");
    }
    group.segment.begin_epoch().unwrap();
    check_error(&group.step(session, 0, &[1, 2, 3])[0], "stale");
    group.attach();
    assert_eq!(group.greedy(&prompt, expected.len()), expected, "without another load");

    for reply in ask_all(&mut group.ranks, &json!({"op": "stats", "id": 8})) {
        let stats = &reply["stats"];
        assert_eq!((&stats["epoch"], &stats["sessions"]), (&json!(2), &json!(0)), "{stats}");
        for count in ["steps", "collectives", "step_us", "collective_us", "resident_bytes", "weight_bytes", "kv_bytes"]
        {
            assert!(stats[count].as_u64().unwrap() > 0, "{count}: {stats}");
        }
    }
    check_all(&mut group.ranks, &json!({"op": "unload_model", "model_id": "m"}), &json!({"op": "unloaded"}));
    group.load("llama");
    let (prompt, expected) = oracle("llama");
    assert_eq!(group.greedy(&prompt, 8), expected[..8], "the comm outlives a model");
    group.ranks.into_iter().for_each(Rank::shut_down);
}

/// The build id of the binary, which differs from that of this test.
pub fn binary_build() -> String {
    let mut rank = Rank::start(0, 1);
    let reply = rank.ask(&json!({"op": "hello", "id": 1, "protocol": VERSION, "build": ""}));
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
    // The plan names a session that is not open here: the rank fails and aborts the epoch.
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
    // The step waits for the other rank, and later lines wait for the step.
    rank.send(&step_line(session, 0, &[1, 2, 3]).to_string());
    rank.send(&json!({"op": "stats", "id": 21}).to_string());
    rank.send(&json!({"op": "stats", "id": 22}).to_string());
    rank.check(&json!({"op": "cancel", "id": 30, "target": 21}), &json!({"op": "cancelled", "id": 30, "found": true}));
    rank.check(&json!({"op": "cancel", "id": 31, "target": 99}), &json!({"op": "cancelled", "id": 31, "found": false}));
    group.segment.abort(group.segment.epoch()).stop();
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
    rank.send(&json!({"op": "abort", "id": 41, "epoch": 1}).to_string());
    let replies: Vec<_> = (0..FLOOD + 2).map(|_| rank.reply()).collect();
    let count = |op: &str| replies.iter().filter(|reply| reply["op"] == op).count();
    assert_eq!(count("aborted"), 1);
    assert_eq!(count("stats_ok") + count("error"), FLOOD + 1, "one reply to each");
    assert!(count("stats_ok") > 0 && count("error") > 1, "what did not fit was refused");
    group.ranks.remove(0).shut_down();
}
