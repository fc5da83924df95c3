//! Answers and log probabilities of chains equal those of one process.

use engine::{Engine, EngineOptions, EventKind, Executor, Logprobs, Pooling, Request, RequestKind, SamplingParams};
use model::Checkpoint;
use std::collections::BTreeMap;
use std::path::Path;
use types::TokenId;

use crate::loopback::{chain, oracle_models, prompt, whole};

type Answer = (Vec<TokenId>, Vec<Option<Logprobs>>, Vec<f32>);

/// Requests of mixed lengths, greedy and sampled, some with a common beginning, and one embedding.
pub fn requests(model: &Path) -> Vec<Request> {
    let request = |index: usize| {
        let sampled = SamplingParams { temperature: 0.8, top_p: 0.9, seed: index as u64, ..SamplingParams::default() };
        let sampling = if index.is_multiple_of(2) { SamplingParams::default() } else { sampled };
        let sampling = SamplingParams { logprobs: Some(3), ..sampling };
        let tokens = prompt(model, 20 + index * 37 % 120, (index / 2) as u32);
        Request { sampling, ..Request::greedy(tokens, 12 + index) }
    };
    let mut requests: Vec<_> = (0..8).map(request).collect();
    requests.push(Request { kind: RequestKind::Embed(Pooling::Mean), ..Request::greedy(prompt(model, 70, 9), 0) });
    requests
}

/// Runs all requests at once.
pub fn answers<E: Executor>(executor: E, requests: Vec<Request>, options: EngineOptions) -> (Vec<Answer>, E) {
    let mut engine = Engine::with_options(executor, options);
    let ids: Vec<_> = requests.into_iter().map(|request| engine.add(request).unwrap()).collect();
    let mut answers: BTreeMap<_, Answer> = BTreeMap::new();
    let mut events = Vec::new();
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        for event in events.drain(..) {
            let answer = answers.entry(event.request).or_default();
            match event.kind {
                EventKind::Token(sampled) => {
                    answer.0.push(sampled.token);
                    answer.1.push(sampled.logprobs);
                }
                EventKind::Embedding(values) => answer.2 = values,
                _ => {}
            }
        }
    }
    assert_eq!(engine.capacity().pages_free, engine.capacity().pages_total, "pages are left behind");
    (ids.iter().map(|id| answers.remove(id).unwrap()).collect(), engine.into_executor())
}

pub fn options(chunk: usize) -> EngineOptions {
    EngineOptions { chunk, ..EngineOptions::default() }
}

#[test]
fn chains_of_one_to_four_stages_answer_as_one_process() {
    let mut longest = 0;
    for model in oracle_models() {
        let layers = Checkpoint::open(&model).unwrap().description().layers.len();
        let (expected, _) = answers(whole(&model), requests(&model), options(128));
        assert!(expected.iter().any(|answer| !answer.2.is_empty()), "an embedding is compared");
        for (split, chunk) in [(&[4][..], 32), (&[0, 4], 128), (&[1, 3], 16), (&[1, 1, 2], 128), (&[1, 1, 1, 1], 24)] {
            if split.len() > layers {
                continue;
            }
            let (found, _) = answers(chain(&model, &[split]), requests(&model), options(chunk));
            assert!(found == expected, "{} as {split:?}, chunks of {chunk}", model.display());
            longest = longest.max(split.len());
        }
    }
    assert_eq!(longest, 4);
}

#[test]
fn drafts_are_verified_across_the_chain() {
    let model = oracle_models().remove(0);
    // What repeats itself is drafted.
    let repetitive = |seed| prompt(&model, 8, seed).repeat(8);
    let requests = || (0..4).map(|seed| Request::greedy(repetitive(seed), 40)).collect::<Vec<_>>();
    let (expected, _) = answers(whole(&model), requests(), options(128));
    let drafting = EngineOptions { draft_tokens_max: 4, ..options(128) };
    let (found, _) = answers(chain(&model, &[&[1, 2, 1]]), requests(), drafting);
    assert!(found == expected);
}
