//! A decode step of a group allocates nothing, neither in the supervisor nor in a rank. Alone in its process: the allocator
//! counts for all threads of it.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::alloc::System;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cap::Cap;
use engine::{Engine, EventKind, Phase, Prefix, Request, RequestedOutput, SamplingParams, StepPlan};
use kernels::StepLimits;
use kernels::cpu::CpuOptions;
use model::{Checkpoint, Limits, LoadOptions};
use ranks::group::{Deadlines, Group, GroupConfig};
use ranks::protocol::plan::WirePlan;
use ranks::protocol::session::WirePrefix;
use ranks::protocol::shard::ShardSpec;
use ranks::protocol::{self, Lines, RankReply};
use ranks::worker::{self, COLLECTIVE_TIMEOUT, INIT_TIMEOUT};
use types::{SessionId, TokenId, WorldSize};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Held by the test that counts.
static COUNTING: Mutex<()> = Mutex::new(());

const LIMITS: Limits =
    Limits { step: StepLimits { rows: 64, sequences: 4, pages: 64 }, logit_rows: 8, kv_pages: 32, positions: 128 };

/// Steps before anything is counted: buffers grow to the size that they need, also for positions of two digits.
const WARM_UP: usize = 12;
/// Enough to cross the end of a page in every sequence.
const STEPS: usize = 32;

/// How often a supervisor checks by the clock whether its ranks were stopped. That may allocate.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

fn samplings() -> [SamplingParams; 3] {
    let warm = SamplingParams { temperature: 0.8, top_p: 0.9, seed: 5, ..SamplingParams::default() };
    let penalised = SamplingParams { top_k: 20, min_p: 0.02, repetition_penalty: 1.1, ..warm.clone() };
    [SamplingParams::default(), warm, penalised]
}

#[test]
fn a_decode_step_allocates_nothing_in_the_supervisor() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let checkpoint = Checkpoint::open(&model_path()).unwrap();
    let config = GroupConfig {
        world: WorldSize::new(2).unwrap(),
        program: env!("CARGO_BIN_EXE_consort").into(),
        model_id: "model".to_owned(),
        shard: shard(),
        limits: LIMITS,
        vocab: checkpoint.description().vocab,
        hidden: checkpoint.description().hidden,
        digest: checkpoint.digest(),
        deadlines: Deadlines::default(),
        hosts: None,
        environment: vec![("CONSORT_LOG".to_owned(), "off".to_owned())],
    };
    let group = Group::start(config, &mut |_| {}).unwrap();
    let mut engine = Engine::new(group, 64);
    for sampling in samplings() {
        let request = Request::greedy((1..20).map(TokenId).collect(), 100);
        engine.add(Request { sampling, ..request }).unwrap();
    }
    let mut events = Vec::new();
    for _ in 0..WARM_UP {
        events.clear();
        engine.step(&mut events).unwrap();
    }
    let (begun, mut allocating) = (Instant::now(), 0);
    for _ in 0..STEPS {
        let before = MEMORY.total_allocated();
        events.clear();
        engine.step(&mut events).unwrap();
        assert!(events.len() == 3 && events.iter().all(|event| matches!(event.kind, EventKind::Token(_))));
        allocating += u32::from(MEMORY.total_allocated() != before);
    }
    let by_the_clock = 1 + begun.elapsed().div_duration_f32(CHECK_INTERVAL) as u32;
    assert!(allocating <= by_the_clock, "{allocating} of {STEPS} steps allocated, {by_the_clock} looks at the ranks");
}

#[test]
fn a_decode_step_allocates_nothing_in_a_rank() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let (input, mut requests) = io::pipe().unwrap();
    let (replies, output) = io::pipe().unwrap();
    let options = worker::Options {
        rank: WorldSize::ONE.rank(0).unwrap(),
        cuda_device: 0,
        build: worker::build_id(),
        init_timeout: INIT_TIMEOUT,
        collective_timeout: COLLECTIVE_TIMEOUT,
        threads_max: None,
        #[cfg(debug_assertions)]
        fault: None,
    };
    let rank = thread::spawn(move || worker::run(options, input, output, || ()));
    let mut replies = BufReader::new(replies);

    // What is sent and what it is answered by is all made before the counting begins.
    let sessions = samplings().len() as u64;
    let prefix = || WirePrefix::from(Prefix { tokens: &[], pages: &[], reuse_max: 0 });
    let load = protocol::RankRequest::Load { id: 0, model_id: "model".to_owned(), shard: shard() };
    let open = (1..=sessions).map(|id| protocol::RankRequest::Open { id, tokens_max: 100, prefix: prefix() });
    for request in [load].into_iter().chain(open) {
        requests.write_all(&encode(&request)).unwrap();
    }
    let mut opened = Vec::new();
    while opened.len() < sessions as usize {
        match Lines::new(&mut replies).read::<RankReply>().unwrap().unwrap() {
            RankReply::Opened { session, .. } => opened.push(SessionId(session)),
            RankReply::Loading { .. } | RankReply::LoadOk { .. } => {}
            reply => panic!("{reply:?}"),
        }
    }
    let steps: Vec<_> = (0..WARM_UP + STEPS).map(|position| encode(&step(&opened, position))).collect();
    let (mut reply, mut allocated) = (String::with_capacity(1 << 16), 0);
    for (index, step) in steps.iter().enumerate() {
        let before = MEMORY.total_allocated();
        requests.write_all(step).unwrap();
        reply.clear();
        replies.read_line(&mut reply).unwrap();
        assert!(reply.contains(r#""op":"step_ok""#) && reply.matches(r#""token":"#).count() == opened.len(), "{reply}");
        if index >= WARM_UP {
            allocated += MEMORY.total_allocated() - before;
        }
    }
    assert_eq!(allocated, 0, "bytes allocated in {STEPS} steps");
    drop(requests);
    rank.join().unwrap().unwrap();
}

/// One token for each session, as a leader sends it.
fn step(sessions: &[SessionId], position: usize) -> protocol::RankRequest {
    let mut plan = StepPlan::new();
    for (&session, sampling) in sessions.iter().zip(samplings()) {
        let token = [TokenId(position as u32 + 1)];
        plan.push(session, Phase::Decode, position, &token, RequestedOutput::sample(1, sampling));
    }
    protocol::RankRequest::Step { id: 100 + position as u64, plan: WirePlan::from(&plan) }
}

fn encode(request: &protocol::RankRequest) -> Vec<u8> {
    let mut line = Vec::new();
    protocol::encode(request, &mut line).unwrap();
    line
}

fn shard() -> ShardSpec {
    let options = LoadOptions { keep: None, limits: LIMITS };
    let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
    ShardSpec::new(model_path().to_str().unwrap().to_owned(), &options, cpu)
}

fn model_path() -> PathBuf {
    testing::oracle("qwen3/model-f32")
}
