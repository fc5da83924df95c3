//! What a request may ask for besides tokens works over a chain as in one process: constraints, log probabilities of prompts,
//! cached prefixes, cancellation.

use std::collections::BTreeMap;
use std::path::Path;

use engine::{
    Constraint, ConstraintError, Engine, Event, EventKind, Executor, Request, RequestId, SamplingParams, TokenMask,
};
use types::TokenId;

use crate::loopback::{chain, oracle_models, whole};
use testing::cluster_chain::answers::{answers, options};
use testing::cluster_chain::prompt;

/// Allows tokens of the same remainder as the number of tokens so far, and then no more.
struct Remainders {
    accepted: u32,
    max: u32,
}

impl Constraint for Remainders {
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<(), ConstraintError> {
        allowed.clear();
        (0..allowed.vocab() as u32).filter(|id| id % 5 == self.accepted % 5).for_each(|id| allowed.allow(TokenId(id)));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        if token.0 % 5 != self.accepted % 5 {
            return Err(ConstraintError("a token that was not allowed".to_owned()));
        }
        self.accepted += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.accepted == self.max
    }
}

#[test]
fn constrained_answers_are_those_of_one_process() {
    let model = oracle_models().remove(0);
    let requests = || {
        let request = |index: u32| {
            let temperature = if index.is_multiple_of(2) { 0.0 } else { 0.9 };
            let sampling = SamplingParams { temperature, seed: u64::from(index), ..SamplingParams::default() };
            let constraint = Remainders { accepted: 0, max: 9 + index };
            let greedy = Request::greedy(prompt(&model, 30 + 7 * index as usize, index), 100);
            Request { sampling, constraint: Some(Box::new(constraint)), ..greedy }
        };
        (0..6).map(request).collect::<Vec<_>>()
    };
    let (expected, _) = answers(whole(&model), requests(), options(32));
    let lengths: Vec<_> = expected.iter().map(|(tokens, ..)| tokens.len()).collect();
    assert_eq!(lengths, [9, 10, 11, 12, 13, 14]);
    let (found, _) = answers(chain(&model, &[&[1, 2, 1]]), requests(), options(32));
    assert!(found == expected);
}

/// All events of an engine, in the order of each request.
fn events<E: Executor>(engine: &mut Engine<E>) -> BTreeMap<RequestId, Vec<EventKind>> {
    let (mut all, mut events) = (BTreeMap::<_, Vec<_>>::new(), Vec::new());
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        for Event { request, kind } in events.drain(..) {
            all.entry(request).or_default().push(kind);
        }
    }
    all
}

#[test]
fn log_probabilities_of_prompts_are_those_of_one_process() {
    let model = oracle_models().remove(0);
    let run = |executor: Box<dyn Executor>| {
        let mut engine = Engine::with_options(executor, options(16));
        for seed in 0..3 {
            let greedy = Request::greedy(prompt(&model, 50 + 20 * seed, seed as u32), 3);
            engine.add(Request { prompt_logprobs: Some(2), ..greedy }).unwrap();
        }
        let of_prompts = events(&mut engine).into_values().flatten().filter_map(|kind| match kind {
            EventKind::Prefilled { prompt_logprobs, .. } => Some(prompt_logprobs),
            _ => None,
        });
        of_prompts.collect::<Vec<_>>()
    };
    let expected = run(Box::new(whole(&model)));
    assert_eq!(expected.iter().map(Vec::len).collect::<Vec<_>>(), [50, 70, 90]);
    assert_eq!(run(Box::new(chain(&model, &[&[0, 1, 3]]))), expected);
}

#[test]
fn prefixes_are_found_in_every_stage() {
    let model = oracle_models().remove(0);
    // Two of the prompts have a common beginning of several pages.
    let tokens = |seed: u32| {
        let mut tokens = prompt(&model, 100, 1);
        tokens.extend(prompt(&model, 20, seed));
        tokens
    };
    let run = |executor: Box<dyn Executor>| {
        let mut engine = Engine::with_options(executor, options(32));
        let mut answers = Vec::new();
        for seed in [2, 3, 2] {
            let answer = engine.generate(Request::greedy(tokens(seed), 15)).unwrap();
            answers.push(answer.map(|kind| format!("{:?}", token(kind.unwrap()))).collect::<Vec<_>>());
        }
        (answers, engine.stats().prefix_hit_tokens)
    };
    let expected = run(Box::new(whole(&model)));
    assert!(expected.1 > 0);
    assert_eq!(run(Box::new(chain(&model, &[&[1, 1, 2]]))), expected);
}

fn token(kind: EventKind) -> Option<TokenId> {
    match kind {
        EventKind::Token(sampled) => Some(sampled.token),
        _ => None,
    }
}

/// The tokens of the requests that are not cancelled. The others are cancelled after so many steps.
fn uncancelled<E: Executor>(model: &Path, executor: E, steps: usize) -> Vec<Vec<TokenId>> {
    let mut engine = Engine::with_options(executor, options(24));
    let add = |engine: &mut Engine<E>, seed: u32| {
        engine.add(Request::greedy(prompt(model, 40 + 11 * seed as usize, seed), 20)).unwrap()
    };
    let mut ids: Vec<_> = (0..6).map(|seed| add(&mut engine, seed)).collect();
    let (mut early, mut buffer) = (BTreeMap::<_, Vec<_>>::new(), Vec::new());
    for _ in 0..steps {
        engine.step(&mut buffer).unwrap();
    }
    for Event { request, kind } in buffer.drain(..) {
        early.entry(request).or_default().extend(token(kind));
    }
    for id in ids.extract_if(.., |id| id.0 % 2 == 1) {
        engine.cancel(id).expect("it runs");
    }
    // A request that comes later gets the pages of those that were cancelled.
    ids.push(add(&mut engine, 7));
    for (request, kinds) in events(&mut engine) {
        early.entry(request).or_default().extend(kinds.into_iter().filter_map(token));
    }
    assert_eq!(engine.capacity().pages_free, engine.capacity().pages_total, "pages are left behind");
    ids.iter().map(|id| early.remove(id).unwrap()).collect()
}

#[test]
fn cancelled_requests_leave_the_others_as_they_are() {
    let model = oracle_models().remove(0);
    let expected = uncancelled(&model, whole(&model), 1);
    assert!(expected.iter().all(|tokens| tokens.len() == 20));
    for steps in [0, 1, 3, 6, 9] {
        let found = uncancelled(&model, chain(&model, &[&[1, 1, 1, 1]]), steps);
        assert_eq!(found, expected, "after {steps} steps");
    }
}
