//! The executor of this process, with a real model on the CPU.

use engine::{
    Engine, EventKind, Executor, ExecutorError, LocalExecutor, Phase, Prefix, Request, RequestedOutput, SamplingParams,
    StepOutput, StepPlan, TenantId, inspect, measure, page_hashes,
};
use kernels::cpu::CpuBackend;
use model::Limits;
use testing::oracle_model::{LIMITS, model, prompt, prompts};
use types::{SessionId, TokenId};

type Cpu = LocalExecutor<CpuBackend>;

/// Logits of all `tokens`, position by position.
fn all_logits(local: &mut Cpu, tokens: &[TokenId], chunk: usize) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    inspect::logits::<_, ExecutorError>(local, tokens, chunk, |row| {
        rows.push(row.to_vec());
        Ok(())
    })
    .unwrap();
    rows
}

/// Runs one entry and returns the logits of its last row.
fn last_logits(local: &mut Cpu, session: SessionId, position: usize, tokens: &[TokenId]) -> Vec<f32> {
    local.submit(&plan(session, position, tokens, RequestedOutput::Logits { rows: 1 })).unwrap();
    let mut output = StepOutput::new();
    local.collect(&mut output).unwrap();
    assert_eq!(output.logits[0].position, position + tokens.len() - 1);
    output.values(&output.logits[0]).to_vec()
}

fn plan(session: SessionId, position: usize, tokens: &[TokenId], requested: RequestedOutput) -> StepPlan {
    let mut plan = StepPlan::new();
    plan.push(session, Phase::Prefill, position, tokens, requested);
    plan
}

fn sample() -> RequestedOutput {
    RequestedOutput::sample(0, SamplingParams::default())
}

fn open(local: &mut Cpu, tokens_max: usize) -> SessionId {
    local.open(tokens_max, Prefix::NONE).unwrap().session
}

#[test]
fn greedy_answers_equal_the_oracles_for_any_chunk() {
    let mut local = model(LIMITS);
    for chunk in [1, 7, 64, 512] {
        let mut engine = Engine::new(local, chunk);
        for prompt in prompts() {
            let found = inspect::greedy(&mut engine, &prompt.tokens, 32).unwrap();
            assert_eq!(found, prompt.greedy, "{} in chunks of {chunk}", prompt.name);
        }
        assert_eq!(engine.capacity().pages_free, LIMITS.kv_pages);
        local = engine.into_executor();
    }
}

#[test]
fn greedy_answers_are_the_same_side_by_side_even_when_the_cache_is_short() {
    for kv_pages in [LIMITS.kv_pages, 12] {
        let mut engine = Engine::new(model(Limits { kv_pages, ..LIMITS }), 40);
        let wanted = prompts();
        let mut found = vec![Vec::new(); wanted.len()];
        for prompt in &wanted {
            engine.add(Request::greedy(prompt.tokens.clone(), 32)).unwrap();
        }
        let mut events = Vec::new();
        while engine.step(&mut events).unwrap() {
            for event in events.drain(..) {
                if let EventKind::Token(sampled) = event.kind {
                    found[event.request.0 as usize].push(sampled.token);
                }
            }
        }
        for (prompt, found) in wanted.iter().zip(found) {
            assert_eq!(found, prompt.greedy, "{} with {kv_pages} pages", prompt.name);
        }
        assert_eq!(engine.capacity().pages_free, kv_pages);
    }
}

#[test]
fn sampled_answers_depend_on_their_own_seed_only() {
    let mut engine = Engine::new(model(LIMITS), 64);
    let request = |seed| {
        let sampling = SamplingParams { temperature: 1.0, top_p: 0.95, seed, ..SamplingParams::default() };
        Request { sampling, ..Request::greedy(prompt("short").tokens, 24) }
    };
    let mut alone = Vec::new();
    for seed in 0..6 {
        let events = engine.generate(request(seed)).unwrap();
        let tokens: Vec<_> = events
            .filter_map(|event| match event.unwrap() {
                EventKind::Token(sampled) => Some(sampled.token),
                _ => None,
            })
            .collect();
        alone.push(tokens);
    }
    assert_ne!(alone[0], alone[1]);
    let ids: Vec<_> = (0..6).map(|seed| engine.add(request(seed)).unwrap()).collect();
    let (mut together, mut events) = (vec![Vec::new(); 6], Vec::new());
    while engine.step(&mut events).unwrap() {
        for event in events.drain(..) {
            if let EventKind::Token(sampled) = event.kind {
                together[ids.iter().position(|id| *id == event.request).unwrap()].push(sampled.token);
            }
        }
    }
    assert_eq!(together, alone);
}

#[test]
fn logits_do_not_depend_on_the_chunk() {
    let mut local = model(LIMITS);
    let tokens = prompt("mid").tokens;
    let whole = all_logits(&mut local, &tokens, 512);
    assert_eq!(whole.len(), tokens.len());
    for chunk in [1, 7, 64] {
        for (position, (a, b)) in all_logits(&mut local, &tokens, chunk).iter().zip(&whole).enumerate() {
            let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-4, "position {position}, chunks of {chunk}: {worst}");
        }
    }
}

#[test]
fn a_session_with_a_cached_prefix_continues_from_the_shared_pages() {
    let mut local = model(LIMITS);
    let (long, short) = (prompt("long").tokens, prompt("short").tokens);
    let pages = page_hashes(TenantId::default(), &long, local.capacity().page_tokens);
    let prefix = Prefix { tokens: &long, pages: &pages, reuse_max: 90 };
    let first = local.open(400, prefix).unwrap().session;
    let end = last_logits(&mut local, first, 0, &long[..100]);
    let free = local.capacity().pages_free;
    let second = local.open(400, prefix).unwrap();
    assert_eq!(second.computed, 64);
    assert_eq!(local.capacity().pages_free, free, "shared pages cost nothing");

    // The second session diverges; the first is not affected.
    let mut other = long[..64].to_vec();
    other.extend_from_slice(&short);
    let diverged = last_logits(&mut local, second.session, 64, &short);
    assert_eq!(diverged, *all_logits(&mut local, &other, 512).last().unwrap());
    assert_eq!(local.truncate(first, 99).unwrap(), 99);
    assert_eq!(last_logits(&mut local, first, 99, &long[99..100]), end);

    // The pages outlive the session that computed them.
    local.close(first);
    assert_eq!(local.truncate(second.session, 64).unwrap(), 64);
    assert_eq!(last_logits(&mut local, second.session, 64, &short), diverged);
    local.close(second.session);
    assert_eq!(local.capacity().pages_free, LIMITS.kv_pages);
}

#[test]
fn a_step_that_needs_too_many_pages_is_refused_before_anything_changes() {
    let mut local = model(Limits { kv_pages: 3, ..LIMITS });
    let tokens = prompt("long").tokens;
    let (first, second) = (open(&mut local, 100), open(&mut local, 100));
    let mut both = plan(first, 0, &tokens[..40], sample());
    both.push(second, Phase::Prefill, 0, &tokens[..40], sample());
    let error = local.submit(&both).unwrap_err();
    assert!(matches!(error, ExecutorError::OutOfPages { needed: 4, free: 3 }) && error.is_retryable(), "{error}");
    assert_eq!(local.capacity().pages_free, 3);
    let alone = last_logits(&mut local, first, 0, &tokens[..40]);
    assert_eq!(local.capacity().pages_free, 1);
    local.close(first);
    assert_eq!(local.capacity().pages_free, 3);
    assert_eq!(last_logits(&mut local, second, 0, &tokens[..40]), alone);
}

#[test]
fn a_plan_that_does_not_fit_is_refused_with_the_reason() {
    let limits = kernels::StepLimits { rows: 8, sequences: 2, pages: 4 };
    let mut local = model(Limits { step: limits, logit_rows: 2, ..LIMITS });
    let tokens = prompt("mid").tokens;
    let refuse = |local: &mut Cpu, plan: &StepPlan| {
        let error = local.submit(plan).unwrap_err();
        assert_eq!(local.capacity().pages_free, LIMITS.kv_pages);
        error
    };
    let session = open(&mut local, 50);

    let closed = open(&mut local, 50);
    local.close(closed);
    let error = refuse(&mut local, &plan(closed, 0, &tokens[..1], sample()));
    assert!(matches!(error, ExecutorError::UnknownSession(id) if id == closed));
    let error = refuse(&mut local, &plan(session, 5, &tokens[..1], sample()));
    assert!(matches!(error, ExecutorError::PositionMismatch { computed: 0, position: 5, .. }));
    let mut twice = plan(session, 0, &tokens[..1], sample());
    twice.push(session, Phase::Prefill, 0, &tokens[..1], sample());
    assert!(matches!(refuse(&mut local, &twice), ExecutorError::DuplicateSession(id) if id == session));
    let error = refuse(&mut local, &plan(session, 0, &tokens[..9], sample()));
    assert!(matches!(error, ExecutorError::StepTooLarge { what: "rows", found: 9, max: 8 }));
    let error = refuse(&mut local, &plan(session, 0, &tokens[..3], RequestedOutput::Logits { rows: 3 }));
    assert!(matches!(error, ExecutorError::StepTooLarge { what: "rows with logits", found: 3, max: 2 }));
    let error = refuse(&mut local, &plan(session, 0, &tokens[..51], RequestedOutput::Nothing));
    assert!(matches!(error, ExecutorError::TooLong { tokens: 51, max: 50 }));
    let error = refuse(&mut local, &plan(session, 0, &[TokenId(320)], sample()));
    assert!(matches!(error, ExecutorError::TokenOutOfRange { token: 320, vocab: 320 }));
    assert!(matches!(local.open(401, Prefix::NONE), Err(ExecutorError::TooLong { .. })));
    assert!(matches!(local.collect(&mut StepOutput::new()), Err(ExecutorError::NoStepInFlight)));

    let first = plan(session, 0, &tokens[..4], sample());
    local.submit(&first).unwrap();
    assert!(matches!(
        local.submit(&plan(session, 4, &tokens[..1], sample())),
        Err(ExecutorError::PipelineFull { depth: 1 })
    ));
    local.collect(&mut StepOutput::new()).unwrap();
}

#[test]
fn a_session_closed_in_flight_gives_nothing_and_the_others_all() {
    let mut local = model(LIMITS);
    let [a, b] = ["short", "mid"].map(prompt);
    let (first, second) = (open(&mut local, 100), open(&mut local, 100));
    let mut both = plan(first, 0, &a.tokens, sample());
    both.push(second, Phase::Prefill, 0, &b.tokens, sample());
    local.submit(&both).unwrap();
    local.close(first);
    let mut output = StepOutput::new();
    local.collect(&mut output).unwrap();
    assert_eq!(output.samples.len(), 1);
    assert_eq!(output.samples[0].session, second);
    assert_eq!(output.samples[0].outcome.as_ref().unwrap().token, b.greedy[0]);
}

#[test]
fn draft_tokens_are_verified_in_one_step_and_truncated_where_one_is_wrong() {
    let mut local = model(LIMITS);
    let prompt = prompt("chat");
    let session = open(&mut local, 200);
    // Three draft tokens that are right, then a wrong one.
    let mut tokens = prompt.tokens.clone();
    tokens.extend_from_slice(&prompt.greedy[..3]);
    tokens.push(TokenId((prompt.greedy[3].0 + 1) % 300));
    let sampling = SamplingParams::default();
    let requested = RequestedOutput::Sample { rows: 5, prompt_tokens: prompt.tokens.len(), sampling, suppressed: None };
    local.submit(&plan(session, 0, &tokens, requested)).unwrap();
    let mut output = StepOutput::new();
    local.collect(&mut output).unwrap();
    let found: Vec<_> = output.samples.iter().map(|sample| sample.outcome.as_ref().unwrap().token).collect();
    assert_eq!(found.len(), 5);
    assert_eq!(found[..4], prompt.greedy[..4]);
    assert_eq!(output.samples[0].position, prompt.tokens.len());
    let kept = prompt.tokens.len() + 3;
    assert_eq!(local.truncate(session, kept).unwrap(), kept);
    local.submit(&plan(session, kept, &prompt.greedy[3..4], sample())).unwrap();
    local.collect(&mut output).unwrap();
    assert_eq!(output.samples[0].outcome.as_ref().unwrap().token, prompt.greedy[4]);
}

#[test]
fn measuring_leaves_no_session_behind() {
    let mut local = model(LIMITS);
    let tokens = prompt("mid").tokens;
    assert_eq!(measure::prefill(&mut local, &tokens, 32).unwrap().tokens, 70);
    assert_eq!(measure::decode(&mut local, &tokens[..5], &tokens[5..15], 3).unwrap().tokens, 30);
    assert_eq!(local.capacity().pages_free, LIMITS.kv_pages);
}
