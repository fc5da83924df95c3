//! Options of requests: constraints, minimum lengths, log probabilities of the prompt, embeddings, draft tokens.
//! Against a fake executor.

use engine::{
    Constraint, ConstraintError, Engine, EngineError, EngineOptions, FinishReason, Pooling, Request, RequestKind,
    Sampled, Sampler, SamplingParams, SamplingParamsError, TokenMask,
};
use testing::answers::run;
use testing::fake_executor::{Fake, POISON, VOCAB, answer, logits, prompt, safe};
use types::TokenId;

fn greedy() -> SamplingParams {
    safe(SamplingParams::default())
}

fn seeded(seed: u64) -> SamplingParams {
    safe(SamplingParams { temperature: 0.9, top_p: 0.95, seed, ..SamplingParams::default() })
}

fn request(length: usize, seed: u32, tokens_max: usize) -> Request {
    Request { sampling: greedy(), ..Request::greedy(prompt(length, seed), tokens_max) }
}

/// Allows `left` tokens from 20 to 29, then nothing; `end` is allowed at any time.
struct Digits {
    left: usize,
    end: Option<TokenId>,
    fails_at: usize,
}

impl Digits {
    fn new(left: usize) -> Self {
        Self { left, end: None, fails_at: usize::MAX }
    }
}

impl Constraint for Digits {
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<(), ConstraintError> {
        if self.left == self.fails_at {
            return Err(ConstraintError("no way on".into()));
        }
        allowed.clear();
        (20..30).map(TokenId).chain(self.end).for_each(|token| allowed.allow(token));
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        assert!((20..30).contains(&token.0));
        self.left -= 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.left == 0
    }
}

#[test]
fn a_constraint_that_permits_digits_only_gives_digits_only() {
    for (depth, draft_tokens_max, pages) in [(1, 0, 64), (3, 0, 64), (1, 4, 64), (1, 0, 8)] {
        let options = EngineOptions { chunk: 32, draft_tokens_max, ..EngineOptions::default() };
        let mut engine = Engine::with_options(Fake::new(pages, 250).with_depth(depth), options);
        let mut bound = Vec::new();
        for seed in 0..4 {
            let constraint: Option<Box<dyn Constraint>> = Some(Box::new(Digits::new(60)));
            let sampling = if seed == 0 { greedy() } else { seeded(seed.into()) };
            bound.push(engine.add(Request { constraint, sampling, ..request(50, seed, 100) }).unwrap());
        }
        let free = engine.add(request(50, 9, 60)).unwrap();
        let answers = run(&mut engine);
        answers.check(free, &answer(&prompt(50, 9), &greedy(), 60), FinishReason::Length);
        for id in &bound {
            let answer = &answers.0[id];
            assert!(answer.tokens.len() == 60 && answer.tokens.iter().all(|token| (20..30).contains(&token.0)));
            assert_eq!(answer.reason(), "Complete");
        }
        assert_ne!(answers.0[&bound[1]].tokens, answers.0[&bound[2]].tokens);
        assert_eq!(engine.stats().finished.complete, 4);
    }
}

#[test]
fn the_end_of_a_constrained_answer_waits_for_the_least_length() {
    let end = TokenId(3);
    for tokens_min in [0, 12] {
        let mut engine = Engine::new(Fake::new(64, 400), 64);
        let constraint: Box<dyn Constraint> = Box::new(Digits { end: Some(end), ..Digits::new(1000) });
        // The end token is sampled wherever it is allowed.
        let sampling = SamplingParams { logit_bias: Some([(end, 1e3)].into()), ..SamplingParams::default() };
        let request =
            Request { constraint: Some(constraint), sampling, tokens_min, eos: [end].into(), ..request(10, 1, 100) };
        let id = engine.add(request).unwrap();
        let answers = run(&mut engine);
        assert_eq!(answers.0[&id].tokens.len(), tokens_min);
        assert_eq!(answers.0[&id].reason(), format!("{:?}", FinishReason::Eos(Sampled { token: end, logprobs: None })));
    }
}

#[test]
fn a_constraint_that_fails_ends_its_own_request_only() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let constraint: Box<dyn Constraint> = Box::new(Digits { fails_at: 5, ..Digits::new(8) });
    let bad = engine.add(Request { constraint: Some(constraint), ..request(10, 1, 100) }).unwrap();
    let good = engine.add(request(10, 2, 30)).unwrap();
    let answers = run(&mut engine);
    assert_eq!(answers.0[&bad].tokens.len(), 3);
    assert!(answers.0[&bad].reason().contains("no way on"), "{}", answers.0[&bad].reason());
    answers.check(good, &answer(&prompt(10, 2), &greedy(), 30), FinishReason::Length);
}

/// Panics when it accepts its third token.
struct Fragile(usize);

impl Constraint for Fragile {
    fn mask(&mut self, allowed: &mut TokenMask) -> Result<(), ConstraintError> {
        allowed.words_mut().fill(u32::MAX);
        allowed.forbid(POISON);
        Ok(())
    }

    fn accept(&mut self, _: TokenId) -> Result<(), ConstraintError> {
        self.0 += 1;
        assert!(self.0 < 3, "a mistake in a grammar");
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }
}

#[test]
fn a_constraint_that_panics_ends_its_own_request_only() {
    let mut engine = Engine::new(Fake::new(64, 400), 64);
    let bad = engine.add(Request { constraint: Some(Box::new(Fragile(0))), ..request(10, 1, 100) }).unwrap();
    let good = engine.add(request(10, 2, 30)).unwrap();
    let answers = run(&mut engine);
    assert_eq!(answers.0[&bad].tokens, answer(&prompt(10, 1), &greedy(), 2));
    assert!(answers.0[&bad].reason().contains("panicked"), "{}", answers.0[&bad].reason());
    answers.check(good, &answer(&prompt(10, 2), &greedy(), 30), FinishReason::Length);
}

#[test]
fn no_end_of_sequence_comes_before_the_least_length() {
    let prompt = prompt(10, 1);
    let eos = answer(&prompt, &greedy(), 1)[0];
    for draft_tokens_max in [0, 3] {
        let options = EngineOptions { draft_tokens_max, ..EngineOptions::default() };
        let mut engine = Engine::with_options(Fake::new(64, 400), options);
        let id = engine.add(Request { eos: [eos].into(), tokens_min: 20, ..request(10, 1, 20) }).unwrap();
        let bias = [(POISON, f32::NEG_INFINITY), (eos, f32::NEG_INFINITY)].into();
        let want = answer(&prompt, &SamplingParams { logit_bias: Some(bias), ..SamplingParams::default() }, 20);
        run(&mut engine).check(id, &want, FinishReason::Length);
        let id = engine.add(Request { eos: [eos].into(), tokens_min: 0, ..request(10, 1, 20) }).unwrap();
        run(&mut engine).check(id, &[], FinishReason::Eos(Sampled { token: eos, logprobs: None }));
    }
}

#[test]
fn the_log_probabilities_of_a_prompt_are_those_of_its_tokens() {
    let prompt = prompt(90, 1);
    let logprob =
        |position: usize| Sampler::new().logprobs_of(&logits(&prompt[..position]), prompt[position], 2).unwrap();
    for (chunk, logit_rows_max, depth) in [(64, 128, 1), (64, 7, 1), (13, 128, 3), (64, 1, 1)] {
        let mut fake = Fake::new(16, 400).with_depth(depth);
        fake.logit_rows_max = logit_rows_max;
        fake.sequences_max = fake.sequences_max.min(logit_rows_max);
        let mut engine = Engine::new(fake, chunk);
        for tokens in [0, 1, 8] {
            let id = engine.add(Request { prompt_logprobs: Some(2), ..request(90, 1, tokens) }).unwrap();
            let before: usize = engine.executor().steps.iter().flatten().sum();
            let answers = run(&mut engine);
            answers.check(id, &answer(&prompt, &greedy(), tokens), FinishReason::Length);
            let (cached, logprobs) = answers.0[&id].prefilled.as_ref().unwrap();
            assert_eq!((*cached, logprobs.len(), &logprobs[0]), (0, 90, &None), "rows whose logits are needed are run");
            for (position, found) in logprobs.iter().enumerate().skip(1) {
                assert_eq!(found, &Some(logprob(position)));
            }
            let rows: usize = engine.executor().steps.iter().flatten().sum();
            assert_eq!(rows - before, 89 + tokens, "the last token of the prompt is run for an answer only");
        }
    }
}

#[test]
fn prompt_logprobs_survive_preemption() {
    let mut engine = Engine::new(Fake::new(7, 250), 64);
    let prompts: Vec<_> = (0..3).map(|seed| prompt(60, seed)).collect();
    let ids: Vec<_> =
        (0..3).map(|seed| engine.add(Request { prompt_logprobs: Some(0), ..request(60, seed, 50) }).unwrap()).collect();
    let answers = run(&mut engine);
    assert!(engine.stats().preemptions > 0, "the cache was never full: the test shows nothing");
    for (id, prompt) in ids.iter().zip(&prompts) {
        answers.check(*id, &answer(prompt, &greedy(), 50), FinishReason::Length);
        let logprobs = &answers.0[id].prefilled.as_ref().unwrap().1;
        assert_eq!(logprobs.len(), 60);
        assert_eq!(
            logprobs[59].as_ref().unwrap(),
            &Sampler::new().logprobs_of(&logits(&prompt[..59]), prompt[59], 0).unwrap()
        );
    }
}

#[test]
fn prompt_logprobs_of_the_shortest_prompts() {
    let mut engine = Engine::new(Fake::new(16, 400), 64);
    for (length, tokens) in [(1, 0), (1, 3), (2, 0), (2, 3)] {
        let id = engine.add(Request { prompt_logprobs: Some(0), ..request(length, 1, tokens) }).unwrap();
        let answers = run(&mut engine);
        answers.check(id, &answer(&prompt(length, 1), &greedy(), tokens), FinishReason::Length);
        let logprobs = answers.0[&id].prefilled.as_ref().map_or(0, |prefilled| prefilled.1.len());
        assert_eq!(logprobs, length);
    }
    let error = engine.add(Request { prompt_logprobs: Some(21), ..request(5, 1, 1) }).unwrap_err();
    assert!(matches!(error, EngineError::Sampling(SamplingParamsError::TooManyLogprobs { asked: 21 })));
}

#[test]
fn an_embedding_does_not_depend_on_chunks_company_or_the_cache() {
    let tokens = prompt(100, 1);
    let mut mean = vec![0f64; VOCAB];
    for end in 1..=100 {
        mean.iter_mut().zip(logits(&tokens[..end])).for_each(|(sum, value)| *sum += f64::from(value));
    }
    let mean: Vec<f32> = mean.iter().map(|sum| (sum / 100.0) as f32).collect();
    for (chunk, depth, pages) in [(7, 1, 16), (64, 1, 16), (64, 3, 16), (48, 1, 7)] {
        let mut engine = Engine::new(Fake::new(pages, 200).with_depth(depth), chunk);
        for round in 0..2 {
            let company = engine.add(request(40, 2, 60)).unwrap();
            let ask = |pooling| Request { kind: RequestKind::Embed(pooling), ..request(100, 1, 9) };
            let first = engine.add(ask(Pooling::Mean)).unwrap();
            let last = engine.add(ask(Pooling::Last)).unwrap();
            let answers = run(&mut engine);
            answers.check(company, &answer(&prompt(40, 2), &greedy(), 60), FinishReason::Length);
            for (id, want) in [(first, &mean), (last, &logits(&tokens))] {
                assert_eq!(answers.0[&id].embedding.as_ref(), Some(want), "chunks of {chunk}, round {round}");
                assert_eq!(answers.0[&id].reason(), "Complete");
                assert!(answers.0[&id].tokens.is_empty());
            }
            assert_eq!(answers.0[&first].prefilled.as_ref().unwrap().0, 0, "every row counts");
            assert!(pages < 16 || answers.0[&last].prefilled.as_ref().unwrap().0 == 96, "only the last row counts");
        }
    }
}

/// Sampling from a few tokens, so that answers are repetitive.
fn repetitive(tokens: u32, sampling: SamplingParams) -> SamplingParams {
    let bias = (30..30 + tokens).map(|id| (TokenId(id), 100.0)).collect();
    SamplingParams { logit_bias: Some(bias), ..sampling }
}

#[test]
fn draft_tokens_change_no_answer_and_save_steps_where_answers_repeat() {
    let samplings = [
        repetitive(1, SamplingParams::default()),
        repetitive(2, SamplingParams::default()),
        repetitive(3, seeded(5)),
        repetitive(2, SamplingParams { repetition_penalty: 1.2, presence_penalty: 0.5, ..seeded(6) }),
        seeded(7),
        greedy(),
    ];
    for (pages, depth) in [(64, 1), (64, 2), (10, 1)] {
        let mut steps = Vec::new();
        for draft_tokens_max in [0, 1, 5] {
            let options = EngineOptions { draft_tokens_max, chunk: 40, ..EngineOptions::default() };
            let mut engine = Engine::with_options(Fake::new(pages, 250).with_depth(depth), options);
            let mut wanted = Vec::new();
            for (seed, sampling) in samplings.iter().enumerate() {
                let request = Request { sampling: sampling.clone(), ..request(30, seed as u32, 100) };
                let want = answer(&request.prompt, sampling, 100);
                wanted.push((engine.add(request).unwrap(), want));
            }
            let answers = run(&mut engine);
            for (id, want) in wanted {
                answers.check(id, &want, FinishReason::Length);
            }
            let stats = engine.stats();
            assert!(stats.draft_tokens_accepted <= stats.draft_tokens);
            assert_eq!(
                (draft_tokens_max > 0, draft_tokens_max > 0),
                (stats.draft_tokens > 0, stats.draft_tokens_accepted > 0)
            );
            steps.push(stats.steps);
        }
        assert!(steps[2] <= steps[0], "{steps:?}");
    }
}

#[test]
fn an_answer_that_only_repeats_takes_a_fraction_of_the_steps() {
    let mut steps = Vec::new();
    for draft_tokens_max in [0, 4] {
        let options = EngineOptions { draft_tokens_max, ..EngineOptions::default() };
        let mut engine = Engine::with_options(Fake::new(64, 400), options);
        let sampling = repetitive(1, SamplingParams::default());
        let id = engine.add(Request { sampling, ..request(30, 1, 101) }).unwrap();
        run(&mut engine).check(id, &[TokenId(30); 101], FinishReason::Length);
        steps.push(engine.stats().steps);
    }
    assert_eq!(steps[0], 101);
    assert!(steps[1] < 30, "{steps:?}");
}
