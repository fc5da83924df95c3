//! Which sequence runs when: fairness, budgets, a full queue. Against a fake executor.

use std::time::Duration;

use engine::{Engine, EngineError, EngineOptions, FinishReason, Request, RequestId, SamplingParams, TenantId};
use testing::answers::{Answers, run};
use testing::fake_executor::{Fake, answer, prompt, safe};

fn request(length: usize, seed: u32, tokens_max: usize) -> Request {
    Request { sampling: safe(SamplingParams::default()), ..Request::greedy(prompt(length, seed), tokens_max) }
}

fn of(tenant: u64, request: Request) -> Request {
    Request { tenant: TenantId(tenant), ..request }
}

/// Requests in the order of their first tokens.
fn order(engine: &mut Engine<Fake>) -> Vec<RequestId> {
    let (mut order, mut events) = (Vec::new(), Vec::new());
    while engine.step(&mut events).unwrap() {
        for event in events.drain(..) {
            if !order.contains(&event.request) {
                order.push(event.request);
            }
        }
    }
    order
}

#[test]
fn a_tenant_with_many_requests_does_not_keep_another_waiting() {
    let mut fake = Fake::new(64, 400);
    fake.sequences_max = 1;
    let mut engine = Engine::new(fake, 64);
    let many: Vec<_> = (0..6).map(|seed| engine.add(of(1, request(20, seed, 5))).unwrap()).collect();
    let few: Vec<_> = (0..2).map(|seed| engine.add(of(2, request(20, 10 + seed, 5))).unwrap()).collect();
    let order = order(&mut engine);
    assert_eq!(order[..4], [many[0], few[0], many[1], few[1]]);
    assert_eq!(order[4..], many[2..]);
}

#[test]
fn turns_are_counted_in_tokens() {
    let mut fake = Fake::new(64, 400);
    fake.sequences_max = 1;
    let mut engine = Engine::new(fake, 64);
    let long: Vec<_> = (0..2).map(|seed| engine.add(of(1, request(100, seed, 20))).unwrap()).collect();
    let short: Vec<_> = (0..5).map(|seed| engine.add(of(2, request(20, 10 + seed, 4))).unwrap()).collect();
    // 24 tokens each: five of them are as many as one long request.
    assert_eq!(order(&mut engine), [&long[..1], &short[..], &long[1..]].concat());
}

#[test]
fn a_tenant_that_was_away_has_saved_nothing_up() {
    let mut fake = Fake::new(64, 400);
    fake.sequences_max = 1;
    let mut engine = Engine::new(fake, 64);
    for seed in 0..4 {
        engine.add(of(1, request(50, seed, 20))).unwrap();
    }
    let mut events = Vec::new();
    for _ in 0..50 {
        engine.step(&mut events).unwrap();
    }
    // The new tenant is next, and then the tenants alternate.
    let late: Vec<_> = (0..2).map(|seed| engine.add(of(2, request(50, 10 + seed, 20))).unwrap()).collect();
    events.clear();
    let order = order(&mut engine);
    assert_eq!((order[1], order.iter().position(|&id| id == late[1])), (late[0], Some(3)));
}

#[test]
fn a_short_prompt_is_run_in_the_step_after_it_came_and_the_long_one_goes_on() {
    let fake = Fake::new(64, 1000);
    let (options, clock) = (EngineOptions { chunk: 64, ..EngineOptions::default() }, fake.clock());
    let mut engine = Engine::with_clock(fake, options, clock);
    let long = engine.add(request(600, 1, 3)).unwrap();
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    let short = engine.add(request(10, 2, 3)).unwrap();
    engine.step(&mut events).unwrap();
    assert_eq!(engine.executor().steps, [vec![64], vec![16, 10]], "a shorter step, so that it is over sooner");
    assert!(events.iter().all(|event| event.request == short) && events.len() == 2);
    engine.step(&mut events).unwrap();
    assert_eq!(engine.executor().steps[2], [1, 63], "one row of decode, then prefill again");
    let mut answers = Answers::default();
    answers.take(&mut events);
    while engine.step(&mut events).unwrap() {
        answers.take(&mut events);
    }
    answers.check(long, &answer(&prompt(600, 1), &safe(SamplingParams::default()), 3), FinishReason::Length);
    answers.check(short, &answer(&prompt(10, 2), &safe(SamplingParams::default()), 3), FinishReason::Length);
}

#[test]
fn a_long_prompt_moves_in_every_step_of_a_flood_of_short_ones() {
    let mut engine = Engine::new(Fake::new(64, 1000), 64);
    let long = engine.add(request(400, 1, 1)).unwrap();
    let mut events = Vec::new();
    let mut seed = 10;
    let steps = (1..).find(|_| {
        while engine.running() + engine.waiting() < 8 {
            engine.add(request(20, seed, 1)).unwrap();
            seed += 1;
        }
        events.clear();
        engine.step(&mut events).unwrap();
        events.iter().any(|event| event.request == long)
    });
    // Seven steps alone; a quarter of each otherwise.
    assert!(steps.unwrap() <= 27, "{steps:?}");
}

#[test]
fn several_prompts_share_a_step() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    for seed in 0..5 {
        engine.add(request(15, seed, 2)).unwrap();
    }
    run(&mut engine);
    // Four whole ones and the beginning of the fifth.
    assert_eq!(engine.executor().steps[0], [15, 15, 15, 15, 4]);
}

#[test]
fn a_full_queue_refuses_with_the_time_to_come_again() {
    let mut fake = Fake::new(64, 400);
    fake.sequences_max = 2;
    let options = EngineOptions { waiting_max: 3, ..EngineOptions::default() };
    let mut engine = Engine::with_options(fake, options);
    for left in (0..5).rev() {
        engine.add(request(10, left, 5)).unwrap();
        assert_eq!(engine.headroom(), left as usize);
    }
    let error = engine.add(request(10, 9, 5)).unwrap_err();
    let EngineError::QueueFull { waiting: 5, retry_after } = error else { panic!("{error}") };
    assert!(retry_after >= Duration::from_secs(1));
    engine.step(&mut Vec::new()).unwrap();
    assert_eq!((engine.running(), engine.waiting(), engine.headroom()), (2, 3, 0));
    while engine.step(&mut Vec::new()).unwrap() {}
    assert_eq!((engine.stats().finished.length, engine.headroom()), (5, 5));
    engine.add(request(10, 9, 5)).unwrap();
}

#[test]
fn a_request_that_fits_only_with_its_cached_prefix_runs_beside_the_others() {
    let mut engine = Engine::new(Fake::new(10, 300), 64);
    // Six pages, and one for tokens to come.
    let first = engine.add(request(200, 1, 20)).unwrap();
    let mut events = Vec::new();
    for _ in 0..5 {
        engine.step(&mut events).unwrap();
    }
    let second = engine.add(request(200, 1, 20)).unwrap();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.running(), engine.stats().preemptions), (2, 0));
    let mut answers = Answers::default();
    answers.take(&mut events);
    while engine.step(&mut events).unwrap() {
        answers.take(&mut events);
    }
    for id in [first, second] {
        answers.check(id, &answer(&prompt(200, 1), &safe(SamplingParams::default()), 20), FinishReason::Length);
    }
}

const LONG_PROMPT: usize = 4000;

/// A millisecond, and more at long positions, as attention takes it.
fn fast_row(position: usize) -> Duration {
    Duration::from_micros(1000 + position as u64 / 2)
}

/// Runs one request that generates tokens and then, beside it, a long prompt. Returns the engine and the number of steps
/// before the prompt came.
fn run_long_prompt(
    depth: usize,
    row_time: fn(usize) -> Duration,
    prefill_step: Option<Duration>,
) -> (Engine<Fake>, usize) {
    let mut fake = Fake::new(300, 8000).with_depth(depth);
    (fake.rows_max, fake.row_time) = (512, row_time);
    let (options, clock) = (EngineOptions { chunk: 512, prefill_step, ..EngineOptions::default() }, fake.clock());
    let mut engine = Engine::with_clock(fake, options, clock);
    let sampling = safe(SamplingParams::default());
    engine.add(request(20, 1, 2000)).unwrap();
    let (mut answers, mut events) = (Answers::default(), Vec::new());
    for _ in 0..5 {
        engine.step(&mut events).unwrap();
    }
    let before = engine.executor().steps.len();
    let long = engine.add(request(LONG_PROMPT, 2, 3)).unwrap();
    while answers.0.get(&long).is_none_or(|answer| answer.ends.is_empty()) {
        assert!(engine.step(&mut events).unwrap());
        answers.take(&mut events);
    }
    assert!(engine.running() == 1, "the other request generates tokens all the time");
    answers.check(long, &answer(&prompt(LONG_PROMPT, 2), &sampling, 3), FinishReason::Length);
    (engine, before)
}

/// The prefill rows and the times of the steps that run the long prompt.
fn long_prompt_steps(engine: &Engine<Fake>, before: usize) -> Vec<(usize, Duration)> {
    let fake = engine.executor();
    let steps = fake.steps.iter().zip(&fake.times).skip(before);
    let steps: Vec<_> =
        steps.map(|(rows, time)| (*rows.last().unwrap(), *time)).filter(|(rows, _)| *rows > 1).collect();
    assert_eq!(steps.iter().map(|(rows, _)| rows).sum::<usize>(), LONG_PROMPT);
    steps
}

#[test]
fn a_long_prompt_holds_up_others_for_no_longer_than_the_limit() {
    for depth in [1, 2] {
        let wait = Duration::from_millis(200);
        let (engine, before) = run_long_prompt(depth, fast_row, Some(wait));
        // A token waits for all steps in flight.
        let limit = wait / depth as u32;
        let steps = long_prompt_steps(&engine, before);
        assert!(steps.iter().all(|(_, time)| *time < limit * 11 / 10), "depth {depth}: {steps:?}");
        // The time is used: it takes a few steps to find out how much fits.
        let used = &steps[4..steps.len() - 1];
        assert!(used.iter().all(|(_, time)| *time > limit * 8 / 10), "depth {depth}: {steps:?}");
        assert!(used[0].0 > 2 * used[used.len() - 1].0, "rows at long positions take longer: {steps:?}");
    }
}

#[test]
fn a_slow_model_runs_small_chunks_and_the_prompt_advances_in_each_step() {
    let (engine, before) = run_long_prompt(1, |_| Duration::from_millis(100), Some(Duration::from_millis(200)));
    let steps = long_prompt_steps(&engine, before);
    assert!(steps[1..].iter().all(|&(rows, _)| rows == 16), "{steps:?}");
}

#[test]
fn without_a_limit_and_without_others_a_prompt_has_the_whole_chunk() {
    let (engine, before) = run_long_prompt(1, fast_row, None);
    let steps = long_prompt_steps(&engine, before);
    assert!(steps[..steps.len() - 1].iter().all(|&(rows, _)| rows == 511), "{steps:?}");

    let mut fake = Fake::new(300, 8000);
    (fake.rows_max, fake.row_time) = (512, |_| Duration::from_secs(1));
    let (options, clock) = (EngineOptions { chunk: 512, ..EngineOptions::default() }, fake.clock());
    let mut engine = Engine::with_clock(fake, options, clock);
    for seed in 0..2 {
        engine.add(request(1500, seed, 1)).unwrap();
    }
    run(&mut engine);
    let rows: Vec<usize> = engine.executor().steps.iter().map(|step| step.iter().sum()).collect();
    assert!(rows[..rows.len() - 1].iter().all(|&rows| rows == 512), "{rows:?}");
}
