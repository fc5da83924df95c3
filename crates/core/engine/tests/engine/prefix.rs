//! The prefix cache in the decode loop, against a fake executor whose answers depend on the contents of its pages.

use engine::{Engine, EngineOptions, FinishReason, Request, RequestId, SamplingParams, TenantId};
use kernels::PAGE_TOKENS;
use proptest::prelude::*;
use testing::answers::{Answer, Answers, run};
use testing::fake_executor::{Fake, answer, prompt, safe};
use types::TokenId;

/// Tokens of the prompt that were found.
fn found(answer: &Answer) -> usize {
    answer.prefilled.as_ref().unwrap().0
}

fn greedy() -> SamplingParams {
    safe(SamplingParams::default())
}

fn request(prompt: &[TokenId], tokens_max: usize) -> Request {
    Request { sampling: greedy(), ..Request::greedy(prompt.to_vec(), tokens_max) }
}

/// `shared` tokens that all prompts have in common, then `own` tokens of this prompt.
fn branch(shared: usize, own: usize, seed: u32) -> Vec<TokenId> {
    let mut tokens = prompt(shared, 1);
    tokens.extend(prompt(own, seed));
    tokens
}

fn rows(engine: &Engine<Fake>) -> usize {
    engine.executor().steps.iter().flatten().sum()
}

/// Runs a request to its end and returns how many of its tokens were cached.
fn cached(engine: &mut Engine<Fake>, request: Request) -> usize {
    let want = answer(&request.prompt, &request.sampling, request.tokens_max);
    let id = engine.add(request).unwrap();
    let answers = run(engine);
    answers.check(id, &want, FinishReason::Length);
    assert_eq!(answers.0[&id].ends[0].timings.cached_tokens, found(&answers.0[&id]));
    found(&answers.0[&id])
}

#[test]
fn a_prefix_that_was_run_before_is_not_run_again() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    assert_eq!(cached(&mut engine, request(&branch(150, 50, 2), 5)), 0);
    assert_eq!(rows(&engine), 204);
    assert_eq!(cached(&mut engine, request(&branch(150, 60, 3), 5)), 128);
    assert_eq!(rows(&engine), 204 + 82 + 4);
    let stats = engine.stats();
    assert_eq!((stats.prefix_hit_tokens, stats.prefix_lookup_tokens), (128, 199 + 209));
    assert_eq!((stats.prefilled_tokens, stats.decoded_tokens), (200 + 82, 10));
    assert!(stats.pages_free == 64 && stats.pages_cached == 8, "{stats:?}");
}

#[test]
fn at_least_one_token_is_always_run() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    for length in [1, 31, 32, 33, 64, 65] {
        let prompt = prompt(length, 7 + length as u32);
        assert_eq!(cached(&mut engine, request(&prompt, 3)), 0);
        assert_eq!(cached(&mut engine, request(&prompt, 3)), (length - 1) / PAGE_TOKENS * PAGE_TOKENS);
    }
}

#[test]
fn tenants_do_not_find_each_others_prefixes() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let of = |tenant| Request { tenant: TenantId(tenant), ..request(&prompt(100, 1), 3) };
    assert_eq!(cached(&mut engine, of(1)), 0);
    assert_eq!(cached(&mut engine, of(2)), 0);
    assert_eq!((cached(&mut engine, of(1)), cached(&mut engine, of(2))), (96, 96));
}

#[test]
fn nothing_is_found_without_the_cache() {
    let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
    let mut engine = Engine::with_options(Fake::new(64, 400), options);
    for _ in 0..2 {
        assert_eq!(cached(&mut engine, request(&prompt(100, 1), 3)), 0);
    }
    assert_eq!((engine.stats().prefix_lookup_tokens, engine.stats().pages_cached), (0, 0));
}

#[test]
fn generated_tokens_are_not_found_as_a_prompts() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let mut prompt = prompt(40, 1);
    let said = answer(&prompt, &greedy(), 60);
    assert_eq!(cached(&mut engine, request(&prompt, 60)), 0);
    prompt.extend(said);
    assert_eq!(cached(&mut engine, request(&prompt, 5)), 32);
}

#[test]
fn requests_that_come_together_compute_their_common_prompt_once() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let prompt = prompt(200, 1);
    let ids: Vec<_> = (0..8).map(|_| engine.add(request(&prompt, 10)).unwrap()).collect();
    let answers = run(&mut engine);
    for id in &ids {
        answers.check(*id, &answer(&prompt, &greedy(), 10), FinishReason::Length);
    }
    assert_eq!(ids.iter().map(|id| found(&answers.0[id])).collect::<Vec<_>>(), [0, 192, 192, 192, 192, 192, 192, 192]);
    assert_eq!(engine.stats().prefilled_tokens, 200 + 7 * 8);
}

/// `n = 4` of an API request: four sampled answers to one prompt, submitted together.
#[test]
fn the_choices_of_one_request_compute_the_whole_pages_of_their_prompt_once() {
    for depth in [1, 2] {
        let mut engine = Engine::new(Fake::new(64, 400).with_depth(depth), 64);
        let prompt = prompt(150, 1);
        let choice = |seed| SamplingParams { temperature: 1.0, seed, ..greedy() };
        let choices: Vec<_> = (0..4)
            .map(|seed| {
                let request = Request { sampling: choice(seed), ..request(&prompt, 20) };
                (engine.add(request).unwrap(), answer(&prompt, &choice(seed), 20))
            })
            .collect();
        let answers = run(&mut engine);
        for (id, want) in &choices {
            answers.check(*id, want, FinishReason::Length);
        }
        let whole = 150 / PAGE_TOKENS * PAGE_TOKENS;
        let stats = engine.stats();
        assert_eq!(stats.prefilled_tokens as usize, whole + 4 * (150 - whole), "depth {depth}");
        assert_eq!(stats.prefix_hit_tokens as usize, 3 * whole, "depth {depth}");
        assert_eq!(stats.pages_free, 64);
    }
}

#[test]
fn pages_are_shared_while_their_first_request_still_runs_its_prompt() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let first = engine.add(request(&branch(150, 150, 2), 5)).unwrap();
    let (mut answers, mut events) = (Answers::default(), Vec::new());
    for _ in 0..2 {
        engine.step(&mut events).unwrap();
    }
    // 128 tokens are computed; the fifth page is not, but is about to be.
    let now = engine.add(request(&branch(130, 30, 3), 5)).unwrap();
    let soon = engine.add(request(&branch(150, 150, 2), 5)).unwrap();
    engine.step(&mut events).unwrap();
    assert_eq!((engine.running(), engine.waiting()), (2, 1));
    while engine.step(&mut events).unwrap() {
        answers.take(&mut events);
    }
    assert_eq!([first, now, soon].map(|id| found(&answers.0[&id])), [0, 128, 288]);
    for (id, prompt) in [(first, branch(150, 150, 2)), (now, branch(130, 30, 3)), (soon, branch(150, 150, 2))] {
        answers.check(id, &answer(&prompt, &greedy(), 5), FinishReason::Length);
    }
}

#[test]
fn the_prefix_used_longest_ago_goes_first_and_from_its_end() {
    let mut engine = Engine::new(Fake::new(8, 200), 64);
    let (old, new) = (prompt(97, 1), prompt(97, 2));
    cached(&mut engine, request(&old, 1));
    cached(&mut engine, request(&new, 1));
    assert_eq!(engine.stats().pages_cached, 6);
    // Takes four pages: the two empty ones and the last two of the old prefix.
    cached(&mut engine, request(&prompt(110, 3), 1));
    assert_eq!(cached(&mut engine, request(&new, 1)), 96);
    assert_eq!(cached(&mut engine, request(&old[..40], 1)), 32);
}

#[derive(Clone, Debug)]
enum Op {
    /// Shared and own tokens, tokens to generate.
    Add(usize, usize, usize),
    Steps(usize),
    Cancel(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0usize..90, 1usize..60, 1usize..40).prop_map(|(a, b, c)| Op::Add(a, b, c)),
        3 => (1usize..12).prop_map(Op::Steps),
        1 => (0usize..20).prop_map(Op::Cancel),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn answers_are_the_same_whatever_is_cached_evicted_preempted_or_cancelled(
        ops in prop::collection::vec(op(), 1..30), pages in 6usize..20, depth in 1usize..3, draft_tokens_max in 0usize..3,
    ) {
        let options = EngineOptions { chunk: 48, draft_tokens_max, ..EngineOptions::default() };
        let mut engine = Engine::with_options(Fake::new(pages, 190).with_depth(depth), options);
        let mut asked: Vec<(RequestId, Vec<TokenId>, usize)> = Vec::new();
        let (mut answers, mut events) = (Answers::default(), Vec::new());
        let mut cancelled = Vec::new();
        for op in ops {
            match op {
                Op::Add(shared, own, tokens) => {
                    let prompt = branch(shared, own, asked.len() as u32 % 3);
                    let id = engine.add(request(&prompt, tokens)).unwrap();
                    asked.push((id, prompt, tokens));
                }
                Op::Steps(count) => {
                    for _ in 0..count {
                        engine.step(&mut events).unwrap();
                        answers.take(&mut events);
                    }
                }
                Op::Cancel(which) if which < asked.len() => {
                    if engine.cancel(asked[which].0).is_some() {
                        cancelled.push(asked[which].0);
                    }
                }
                Op::Cancel(_) => {}
            }
        }
        while engine.step(&mut events).unwrap() {
            answers.take(&mut events);
        }
        answers.take(&mut events);
        prop_assert!(engine.is_idle() && engine.executor().is_clean());
        for (id, prompt, tokens) in asked {
            let want = answer(&prompt, &greedy(), tokens.min(pages * PAGE_TOKENS - prompt.len()));
            let found = answers.0.remove(&id).unwrap_or_default();
            if cancelled.contains(&id) {
                prop_assert!(found.ends.is_empty() && want.starts_with(&found.tokens));
            } else {
                prop_assert_eq!(&found.tokens, &want[..]);
            }
        }
        let stats = engine.stats();
        prop_assert_eq!(stats.finished.cancelled, cancelled.len() as u64);
        prop_assert_eq!((stats.running, stats.waiting, stats.pages_free), (0, 0, pages));
    }
}
