//! The decode loop against a fake executor.

use engine::{
    Engine, EngineError, Event, EventKind, Executor, ExecutorError, Failure, FinishReason, Finished, Phase, Prefix,
    Request, RequestedOutput, SampleError, Sampled, SamplingParams, SamplingParamsError, StepOutput, StepPlan,
    TenantId, inspect, measure, page_hashes,
};
use kernels::PAGE_TOKENS;
use testing::answers::{Answers, run};
use testing::fake_executor::{Fake, POISON, VOCAB, answer, logits, prompt, safe};
use types::{SessionId, TokenId};

fn greedy() -> SamplingParams {
    safe(SamplingParams::default())
}

fn seeded(seed: u64) -> SamplingParams {
    safe(SamplingParams { temperature: 0.9, top_k: 40, top_p: 0.95, seed, ..SamplingParams::default() })
}

fn request(prompt: Vec<TokenId>, sampling: SamplingParams, tokens_max: usize) -> Request {
    Request { sampling, ..Request::greedy(prompt, tokens_max) }
}

/// Runs one request alone. Returns its answer and why it ended.
fn alone(request: Request, pages: usize, positions_max: usize) -> (Vec<TokenId>, String) {
    let mut engine = Engine::new(Fake::new(pages, positions_max), 64);
    let id = engine.add(request).unwrap();
    let answers = run(&mut engine);
    let answer = &answers.0[&id];
    (answer.tokens.clone(), answer.reason())
}

#[test]
fn the_answer_does_not_depend_on_the_chunk_or_the_depth() {
    for length in [1, 2, 63, 64, 65, 200] {
        let prompt = prompt(length, 3);
        let want = answer(&prompt, &greedy(), 20);
        for (chunk, depth) in [(1, 1), (7, 1), (64, 1), (1000, 1), (7, 2), (64, 4)] {
            let mut engine = Engine::new(Fake::new(16, 400).with_depth(depth), chunk);
            let id = engine.add(request(prompt.clone(), greedy(), 20)).unwrap();
            run(&mut engine).check(id, &want, FinishReason::Length);
            let rows: usize = engine.executor().steps.iter().flatten().sum();
            assert_eq!(rows, length + 19, "every token but the last is run once");
            assert!(engine.executor().steps.iter().flatten().all(|&rows| rows <= chunk));
        }
    }
}

#[test]
fn every_request_of_a_batch_gets_what_it_gets_alone() {
    for (depth, pages) in [(1, 100), (3, 100), (1, 12), (2, 12)] {
        let mut engine = Engine::new(Fake::new(pages, 300).with_depth(depth), 48);
        let mut wanted = Vec::new();
        for index in 0..24u64 {
            let prompt = prompt(1 + (index as usize * 37) % 150, index as u32);
            let sampling = if index % 3 == 0 { greedy() } else { seeded(index) };
            let tokens = 5 + (index as usize * 13) % 60;
            let want = answer(&prompt, &sampling, tokens);
            wanted.push((engine.add(request(prompt, sampling, tokens)).unwrap(), want));
        }
        let answers = run(&mut engine);
        for (id, want) in wanted {
            answers.check(id, &want, FinishReason::Length);
        }
    }
}

#[test]
fn a_full_cache_preempts_the_youngest_and_loses_no_token() {
    let mut engine = Engine::new(Fake::new(6, 190), 64);
    let requests: Vec<_> = (0..3).map(|seed| (prompt(30, seed), seeded(seed.into()))).collect();
    let ids: Vec<_> = requests
        .iter()
        .map(|(prompt, sampling)| engine.add(request(prompt.clone(), sampling.clone(), 100)).unwrap())
        .collect();
    let answers = run(&mut engine);
    for (id, (prompt, sampling)) in ids.iter().zip(&requests) {
        answers.check(*id, &answer(prompt, sampling, 100), FinishReason::Length);
    }
    let rows: usize = engine.executor().steps.iter().flatten().sum();
    assert!(rows > 3 * 129, "the cache was never full: the test shows nothing");
}

#[test]
fn decoding_goes_on_in_every_step_of_a_long_prefill() {
    let mut engine = Engine::new(Fake::new(64, 1000), 32);
    engine.add(request(prompt(4, 1), greedy(), 40)).unwrap();
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    engine.add(request(prompt(600, 2), greedy(), 1)).unwrap();
    for _ in 0..19 {
        events.clear();
        engine.step(&mut events).unwrap();
        assert_eq!(events.len(), 1, "the first request gets a token in each step");
        assert_eq!(engine.executor().steps.last().unwrap(), &[1, 31]);
    }
}

#[test]
fn a_prompt_moves_on_even_when_decoding_fills_the_chunk() {
    let mut engine = Engine::new(Fake::new(64, 500), 2);
    for seed in 0..4 {
        engine.add(request(prompt(1, seed), greedy(), 200)).unwrap();
    }
    let id = engine.add(request(prompt(50, 9), greedy(), 3)).unwrap();
    run(&mut engine).check(id, &answer(&prompt(50, 9), &greedy(), 3), FinishReason::Length);
    assert!(engine.executor().steps.iter().any(|step| step == &[1, 1, 1, 1, 1]));
}

#[test]
fn more_requests_than_can_run_wait_in_the_queue() {
    let mut fake = Fake::new(64, 200);
    fake.sequences_max = 2;
    let mut engine = Engine::new(fake, 64);
    let ids: Vec<_> = (0..5).map(|seed| engine.add(request(prompt(9, seed), greedy(), 6)).unwrap()).collect();
    let mut events = Vec::new();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.running(), engine.waiting()), (2, 3));
    let mut answers = Answers::default();
    answers.take(&mut events);
    while engine.step(&mut events).unwrap() {
        answers.take(&mut events);
    }
    for (seed, id) in ids.into_iter().enumerate() {
        answers.check(id, &answer(&prompt(9, seed as u32), &greedy(), 6), FinishReason::Length);
    }
}

#[test]
fn each_end_of_sequence_id_ends_the_answer_and_is_left_out() {
    let full = answer(&prompt(10, 1), &greedy(), 30);
    for index in [0, 1, 17] {
        let eos = full[index];
        let first = full.iter().position(|&token| token == eos).unwrap();
        let mut request = request(prompt(10, 1), greedy(), 30);
        request.eos = [TokenId(VOCAB as u32 + 5), eos].into();
        assert_eq!(
            alone(request, 16, 400),
            (full[..first].to_vec(), format!("{:?}", FinishReason::Eos(Sampled { token: eos, logprobs: None })))
        );
    }
}

#[test]
fn an_answer_ends_when_the_context_or_the_cache_is_full() {
    let full = answer(&prompt(10, 1), &greedy(), 300);
    let endless = || request(prompt(10, 1), greedy(), usize::MAX);
    assert_eq!(alone(endless(), 16, 50), (full[..40].to_vec(), "Context".to_owned()));
    assert_eq!(alone(endless(), 2, 400), (full[..54].to_vec(), "Context".to_owned()));
}

#[test]
fn pages_held_by_others_end_a_lone_answer_instead_of_blocking_it() {
    let mut engine = Engine::new(Fake::new(3, 400), 64);
    let held = engine.executor_mut().open(64, Prefix::NONE).unwrap().session;
    let mut plan = StepPlan::new();
    plan.push(held, Phase::Prefill, 0, &prompt(64, 0), RequestedOutput::Nothing);
    engine.executor_mut().submit(&plan).unwrap();
    engine.executor_mut().collect(&mut StepOutput::new()).unwrap();
    let id = engine.add(request(prompt(20, 1), greedy(), 60)).unwrap();
    let (mut answers, mut events) = (Answers::default(), Vec::new());
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        answers.take(&mut events);
    }
    answers.check(id, &answer(&prompt(20, 1), &greedy(), 13), FinishReason::Context);
    engine.executor_mut().close(held);
    assert!(engine.executor().is_clean());
}

#[test]
fn nothing_is_generated_when_nothing_is_asked_for() {
    assert_eq!(alone(request(prompt(10, 1), greedy(), 0), 16, 50), (vec![], "Length".to_owned()));
}

#[test]
fn cancelling_frees_pages_at_once_wherever_the_request_is() {
    for (steps, depth) in [(0, 1), (1, 1), (3, 1), (9, 1), (2, 3), (9, 3)] {
        let mut engine = Engine::new(Fake::new(64, 400).with_depth(depth), 16);
        let cancelled = engine.add(request(prompt(60, 1), greedy(), 50)).unwrap();
        let other = engine.add(request(prompt(20, 2), greedy(), 50)).unwrap();
        let (mut answers, mut events) = (Answers::default(), Vec::new());
        for _ in 0..steps {
            engine.step(&mut events).unwrap();
            answers.take(&mut events);
        }
        let finished = engine.cancel(cancelled).unwrap();
        assert!(matches!(finished.reason, FinishReason::Cancelled));
        assert!(engine.cancel(cancelled).is_none());
        assert!(engine.executor().page_tables.count() <= 1);
        while engine.step(&mut events).unwrap() {
            answers.take(&mut events);
        }
        answers.check(other, &answer(&prompt(20, 2), &greedy(), 50), FinishReason::Length);
        assert!(answers.0.get(&cancelled).is_none_or(|answer| answer.ends.is_empty()));
        assert!(engine.executor().is_clean());
    }
}

#[test]
fn dropping_the_stream_frees_its_pages() {
    let mut engine = Engine::new(Fake::new(64, 400), 16);
    let want = answer(&prompt(60, 1), &greedy(), 5);
    let mut stream = engine.generate(request(prompt(60, 1), greedy(), 50)).unwrap();
    assert!(matches!(stream.next(), Some(Ok(EventKind::Prefilled { cached_tokens: 0, .. }))));
    for token in want {
        let Some(Ok(EventKind::Token(sampled))) = stream.next() else { panic!("a token is missing") };
        assert_eq!(sampled.token, token);
    }
    drop(stream);
    assert!(engine.is_idle() && engine.executor().is_clean());
    let mut stream = engine.generate(request(prompt(60, 1), greedy(), 50)).unwrap();
    assert!(matches!(stream.cancel().unwrap().reason, FinishReason::Cancelled));
    assert!(stream.next().is_none());
}

#[test]
fn a_stream_ends_with_its_timings_and_then_gives_nothing() {
    let mut engine = Engine::new(Fake::new(64, 400), 16);
    let events: Vec<_> = engine.generate(request(prompt(60, 1), greedy(), 5)).unwrap().map(Result::unwrap).collect();
    assert_eq!(events.len(), 7);
    let EventKind::Finished(finished) = &events[6] else { panic!("{events:?}") };
    assert!(matches!(finished.reason, FinishReason::Length));
    assert_eq!((finished.timings.prompt_tokens, finished.timings.generated_tokens), (60, 5));
    assert!(!finished.timings.prefill.is_zero() && !finished.timings.decode.is_zero());
}

#[test]
fn what_can_never_run_is_refused_with_the_reason() {
    let mut engine = Engine::new(Fake::new(2, 400), 16);
    let mut refuse = |request| engine.add(request).unwrap_err();
    assert!(matches!(refuse(request(vec![], greedy(), 5)), EngineError::EmptyPrompt));
    let too_long = refuse(request(prompt(64, 1), greedy(), 5));
    assert!(matches!(too_long, EngineError::PromptTooLong { tokens: 64, max: 64 }), "{too_long}");
    let token = refuse(request(vec![TokenId(VOCAB as u32)], greedy(), 5));
    assert!(matches!(token, EngineError::TokenOutOfRange { token: 53, vocab: 53 }));
    let hot = SamplingParams { temperature: f32::NAN, ..greedy() };
    let hot = refuse(request(prompt(5, 1), hot, 5));
    assert!(matches!(hot, EngineError::Sampling(SamplingParamsError::OutOfRange { name: "temperature", .. })));
    engine.add(request(prompt(63, 1), greedy(), 5)).unwrap();
    assert!(matches!(engine.generate(Request::greedy(prompt(3, 1), 1)).err(), Some(EngineError::Busy)));
}

#[test]
fn bad_logits_end_their_own_request_only() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let mut poisoned = prompt(12, 1);
    poisoned.push(POISON);
    let bad = engine.add(request(poisoned, greedy(), 8)).unwrap();
    let good = engine.add(request(prompt(12, 2), greedy(), 8)).unwrap();
    let answers = run(&mut engine);
    answers.check(bad, &[], FinishReason::Failed(Failure::Sample(SampleError::NotFinite)));
    answers.check(good, &answer(&prompt(12, 2), &greedy(), 8), FinishReason::Length);
}

#[test]
fn an_error_of_the_executor_ends_all_and_leaks_nothing() {
    for depth in [1, 3] {
        let mut fake = Fake::new(64, 400).with_depth(depth);
        fake.fail_after = 4;
        let mut engine = Engine::new(fake, 16);
        for seed in 0..3 {
            engine.add(request(prompt(40, seed), greedy(), 8)).unwrap();
        }
        let mut events = Vec::new();
        let error = (0..1000).find_map(|_| engine.step(&mut events).err()).expect("the fifth step fails");
        let EngineError::Executor(cause) = &error else { panic!("{error}") };
        assert!(matches!(**cause, ExecutorError::Backend(_)), "{error}");
        let failed = |event: &&Event| {
            matches!(&event.kind, EventKind::Finished(Finished { reason: FinishReason::Failed(_), .. }))
        };
        assert_eq!(events.iter().filter(failed).count(), 3, "each request is told");
        assert!(engine.is_idle() && engine.executor().is_clean());
    }
}

#[test]
fn the_loop_runs_behind_a_boxed_executor() {
    let executor: Box<dyn Executor> = Box::new(Fake::new(64, 400));
    let mut engine = Engine::new(executor, 16);
    let answered = |seed| {
        let prompt = prompt(60, seed);
        let want: Vec<TokenId> = answer(&prompt, &SamplingParams::default(), 5);
        (!want.contains(&POISON)).then_some((prompt, want))
    };
    let (prompt, want) = (1..).find_map(answered).unwrap();
    assert_eq!(inspect::greedy(&mut engine, &prompt, 5).unwrap(), want);
}

#[test]
fn logits_of_every_position_come_in_order_for_any_chunk() {
    let tokens = prompt(70, 4);
    for chunk in [1, 7, 64, 1000] {
        let (mut fake, mut position) = (Fake::new(8, 100), 0);
        inspect::logits::<_, ExecutorError>(&mut fake, &tokens, chunk, |row| {
            position += 1;
            assert_eq!(row, logits(&tokens[..position]));
            Ok(())
        })
        .unwrap();
        assert_eq!(position, 70);
        assert!(fake.is_clean());
        assert_eq!(fake.steps.len(), 70usize.div_ceil(chunk.min(128)));
    }
}

#[test]
fn an_error_while_logits_are_written_still_closes_the_session() {
    enum ExitGuard {
        Asked,
        Executor,
    }
    impl From<ExecutorError> for ExitGuard {
        fn from(_: ExecutorError) -> Self {
            Self::Executor
        }
    }
    let mut fake = Fake::new(8, 100);
    assert!(matches!(inspect::logits(&mut fake, &prompt(9, 4), 2, |_| Err(ExitGuard::Asked)), Err(ExitGuard::Asked)));
    assert!(fake.is_clean());
    assert!(matches!(
        inspect::logits(&mut fake, &prompt(101, 4), 2, |_| Err(ExitGuard::Asked)),
        Err(ExitGuard::Executor)
    ));
}

#[test]
fn measuring_runs_exactly_the_tokens_given() {
    let mut fake = Fake::new(64, 400);
    assert_eq!(measure::prefill(&mut fake, &prompt(100, 1), 64).unwrap().tokens, 100);
    assert_eq!(fake.steps, [vec![64], vec![36]]);
    fake.steps.clear();
    assert_eq!(measure::decode(&mut fake, &prompt(10, 1), &prompt(3, 2), 4).unwrap().tokens, 12);
    assert_eq!(fake.steps[..4], [vec![10], vec![10], vec![10], vec![10]]);
    assert_eq!(fake.steps[4..], [vec![1; 4], vec![1; 4], vec![1; 4]]);
    assert!(fake.is_clean());
    assert!(matches!(measure::prefill(&mut fake, &prompt(401, 1), 64), Err(ExecutorError::TooLong { .. })));
}

/// Runs `tokens` from position `from` on, and returns the logits of the last one.
fn last_logits(fake: &mut Fake, session: SessionId, from: usize, tokens: &[TokenId]) -> Vec<f32> {
    let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
    plan.push(session, Phase::Prefill, from, &tokens[from..], RequestedOutput::Logits { rows: 1 });
    fake.submit(&plan).unwrap();
    fake.collect(&mut output).unwrap();
    output.values(&output.logits[0]).to_vec()
}

#[test]
fn a_session_that_shares_pages_can_be_truncated_between_steps() {
    let mut fake = Fake::new(8, 200);
    let tokens = prompt(90, 5);
    let pages = page_hashes(TenantId::default(), &tokens, PAGE_TOKENS);
    let prefix = Prefix { tokens: &tokens, pages: &pages, reuse_max: 70 };
    let first = fake.open(200, prefix).unwrap().session;
    assert_eq!(last_logits(&mut fake, first, 0, &tokens), logits(&tokens));
    let second = fake.open(200, prefix).unwrap();
    assert_eq!(second.computed, 64);
    let mut other = tokens[..64].to_vec();
    other.extend(prompt(5, 6));
    assert_eq!(last_logits(&mut fake, second.session, 64, &other), logits(&other));
    assert_eq!(fake.truncate(first, 80).unwrap(), 80);
    assert_eq!(last_logits(&mut fake, first, 80, &tokens), logits(&tokens));
    assert_eq!(fake.truncate(first, 40).unwrap(), 32, "the second page is shared");
    fake.close(first);
    fake.close(second.session);
    assert!(fake.is_clean());
}
