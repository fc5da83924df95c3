//! With a real model: an answer does not depend on what else runs, on what is cached, on whether the request was
//! requeued, or on draft tokens. It is the same bit for bit, in tokens and in log probabilities.

use engine::{
    Engine, EngineOptions, ExecutorError, FinishReason, Logprobs, Pooling, Request, RequestKind, Sampler,
    SamplingParams, inspect,
};
use model::Limits;
use testing::answers::run;
use testing::oracle_model::{LIMITS, model, model_kept, prompt, prompts};
use types::{DType, TokenId};

/// 16 requests of mixed lengths, greedy and sampled; several begin alike.
fn requests() -> Vec<Request> {
    let prompts = prompts();
    let request = |index: usize| {
        let tokens = &prompts[index % prompts.len()].tokens;
        let length = if index < prompts.len() { tokens.len() } else { tokens.len() - tokens.len() / 4 };
        let seeded = SamplingParams { temperature: 0.8, top_p: 0.9, seed: index as u64, ..SamplingParams::default() };
        let sampling = if index.is_multiple_of(2) { SamplingParams::default() } else { seeded };
        let sampling = SamplingParams { logprobs: Some(2), ..sampling };
        Request { sampling, ..Request::greedy(tokens[..length].to_vec(), 30 + index * 13 % 70) }
    };
    (0..16).map(request).collect()
}

type Said = (Vec<TokenId>, Vec<Option<Logprobs>>);

fn options(chunk: usize, prefix_cache: bool, draft_tokens_max: usize) -> EngineOptions {
    EngineOptions { chunk, prefix_cache, draft_tokens_max, ..EngineOptions::default() }
}

fn check(keep: Option<DType>) {
    let mut engine = Engine::with_options(model_kept(keep, 1, LIMITS), options(320, false, 0));
    let mut alone: Vec<Said> = Vec::new();
    for request in requests() {
        let id = engine.add(request).unwrap();
        let answer = run(&mut engine).0.remove(&id).unwrap();
        alone.push((answer.tokens, answer.logprobs));
    }
    assert_eq!(engine.stats().prefix_hit_tokens, 0);
    for (kv_pages, chunk, draft_tokens_max) in
        [(LIMITS.kv_pages, 40, 0), (LIMITS.kv_pages, 320, 4), (14, 40, 0), (14, 64, 3)]
    {
        let limits = Limits { kv_pages, ..LIMITS };
        let mut engine = Engine::with_options(model_kept(keep, 1, limits), options(chunk, true, draft_tokens_max));
        for round in 0..2 {
            let ids: Vec<_> = requests().into_iter().map(|request| engine.add(request).unwrap()).collect();
            let mut answers = run(&mut engine);
            for (index, (id, want)) in ids.iter().zip(&alone).enumerate() {
                let answer = answers.0.remove(id).unwrap();
                let found = (answer.tokens, answer.logprobs);
                assert!(found == *want, "request {index}, round {round}, {kv_pages} pages, chunks of {chunk}");
            }
        }
        let stats = engine.stats();
        assert!(stats.prefix_hit_tokens > 0, "nothing was cached: the test shows less");
        assert_eq!(stats.preemptions > 0, kv_pages == 14, "{stats:?}");
        assert_eq!(stats.draft_tokens > 0, draft_tokens_max > 0, "{stats:?}");
    }
}

#[test]
fn sixteen_requests_at_once_get_what_each_gets_alone() {
    check(None);
}

#[test]
fn sixteen_requests_at_once_get_what_each_gets_alone_with_quantised_weights() {
    check(Some(DType::Q8_0));
}

#[test]
fn the_log_probabilities_of_a_prompt_agree_with_its_logits() {
    let mut local = model(LIMITS);
    let tokens = prompt("mid").tokens;
    let (mut want, mut position) = (Vec::new(), 0);
    inspect::logits::<_, ExecutorError>(&mut local, &tokens, 64, |row| {
        position += 1;
        want.extend(tokens.get(position).map(|&next| Sampler::new().logprobs_of(row, next, 3).unwrap()));
        Ok(())
    })
    .unwrap();
    let mut engine = Engine::new(local, 64);
    for tokens_max in [0, 4] {
        let request = Request { prompt_logprobs: Some(3), ..Request::greedy(tokens.clone(), tokens_max) };
        let id = engine.add(request).unwrap();
        let answers = run(&mut engine);
        let (cached, found) = answers.0[&id].prefilled.as_ref().unwrap();
        assert_eq!((*cached, found.len(), &found[0]), (0, tokens.len(), &None));
        for (position, (found, want)) in found[1..].iter().zip(&want).enumerate() {
            assert!((found.as_ref().unwrap().chosen - want.chosen).abs() < 1e-4, "position {position}");
        }
        answers.check(id, &prompt("mid").greedy[..tokens_max], FinishReason::Length);
    }
}

#[test]
fn embeddings_do_not_depend_on_chunks_company_or_the_cache() {
    let (long, mid) = (prompt("long").tokens, prompt("mid").tokens);
    let embed = |tokens: &[TokenId], pooling| Request {
        kind: RequestKind::Embed(pooling),
        ..Request::greedy(tokens.to_vec(), 0)
    };
    let mut found = Vec::new();
    let mut local = model(LIMITS);
    for chunk in [320, 33] {
        let mut engine = Engine::new(local, chunk);
        for _ in 0..2 {
            let first = engine.add(embed(&long, Pooling::Mean)).unwrap();
            engine.add(Request::greedy(mid.clone(), 20)).unwrap();
            let last = engine.add(embed(&long, Pooling::Last)).unwrap();
            let one = [Pooling::Mean, Pooling::Last].map(|pooling| engine.add(embed(&mid[..1], pooling)).unwrap());
            let mut answers = run(&mut engine);
            let mut take = |id| answers.0.remove(&id).unwrap().embedding.unwrap();
            assert_eq!(take(one[0]), take(one[1]), "the mean of one is that one");
            found.push((take(first), take(last)));
        }
        local = engine.into_executor();
    }
    let close = |a: &[f32], b: &[f32]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
    let (mean, last) = &found[0];
    assert!(!close(mean, last) && mean.iter().any(|value| value.abs() > 1e-3));
    assert!(found[1..].iter().all(|(a, b)| close(a, mean) && close(b, last)));
    assert_eq!(found[0], found[1], "chunks alike, the second time from the cache");
}
