//! Requests, and the answers of an engine to them.

use std::collections::BTreeMap;
use std::path::Path;

use engine::{Engine, EngineOptions, EventKind, Executor, Logprobs, Pooling, Request, RequestKind, SamplingParams};
use types::TokenId;

use super::prompt;

/// Tokens, their log probabilities, and an embedding.
pub type Answer = (Vec<TokenId>, Vec<Option<Logprobs>>, Vec<f32>);

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
