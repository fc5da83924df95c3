//! A decode step allocates nothing. This test is alone in its process, because the allocator counts for all threads.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::alloc::System;

use cap::Cap;
use engine::{Engine, EventKind, Request, SamplingParams};
use testing::oracle_model::{LIMITS, model_on, prompt};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

#[test]
fn a_decode_step_allocates_nothing() {
    let mut engine = Engine::new(model_on(2, LIMITS), 64);
    let warm = SamplingParams { temperature: 0.8, top_p: 0.9, seed: 5, ..SamplingParams::default() };
    let samplings = [
        SamplingParams::default(),
        warm.clone(),
        SamplingParams { top_k: 20, min_p: 0.02, ..warm.clone() },
        SamplingParams { repetition_penalty: 1.1, presence_penalty: 0.2, ..warm },
    ];
    for sampling in samplings {
        let request = Request::greedy(prompt("short").tokens, 100);
        engine.add(Request { sampling, ..request }).unwrap();
    }
    let mut events = Vec::new();
    for _ in 0..8 {
        events.clear();
        engine.step(&mut events).unwrap();
    }
    // 32 steps cross a page boundary in every sequence, so that allocating a page is covered too.
    let before = MEMORY.total_allocated();
    for _ in 0..32 {
        events.clear();
        engine.step(&mut events).unwrap();
        assert!(events.len() == 4 && events.iter().all(|event| matches!(event.kind, EventKind::Token(_))));
    }
    assert_eq!(MEMORY.total_allocated() - before, 0, "bytes allocated in 32 steps");
    drop(std::hint::black_box(vec![0u8; 100]));
    assert_eq!(MEMORY.total_allocated() - before, 100, "the allocator counts");
}
