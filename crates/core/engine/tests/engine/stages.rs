//! A model as a chain of stages in one process: every logit, log probability and embedding is the same, bit for bit, as that
//! of the whole model, for any split, in chunks and in batches, with several steps in flight.

use std::path::PathBuf;

use engine::{
    CoordinatorStage, EmbeddingAndHead, Engine, EngineOptions, EntryWithoutStates, Executor, ExecutorError, Failure,
    FinishReason, LocalExecutor, Logprobs, Phase, Pooling, Prefix, Request, RequestKind, RequestedOutput,
    SamplingParams, StepOutput, StepPlan, inspect,
};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions, ModelPart};
use testing::answers::run;
use testing::local_chain::{Chain, HeadAtEnd, local_stage};
use testing::oracle_model::{LIMITS, oracle_models, oracle_prompts};
use types::{DType, LayerRange, SessionId, TokenId};

type Local = LocalExecutor<CpuBackend>;

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

fn local(checkpoint: &Checkpoint, options: &LoadOptions) -> Local {
    LocalExecutor::load(backend(), checkpoint, options, &mut |_| {}).unwrap()
}

/// Layers of the coordinator and of each stage: one to four parts, even and uneven, with and without layers of the
/// coordinator.
fn splits(layers: u32) -> Vec<Vec<u32>> {
    let starts: [&[u32]; 7] = [&[0], &[1], &[layers - 1], &[0, 1], &[1, 1], &[0, 1, 1, 1], &[1, 1, 1]];
    let whole = |start: &&[u32]| {
        let last = layers.checked_sub(start.iter().sum()).filter(|&last| last > 0)?;
        Some([start, &[last][..]].concat())
    };
    starts.iter().filter_map(whole).collect()
}

fn chains(checkpoint: &Checkpoint, options: &LoadOptions) -> impl Iterator<Item = (Vec<u32>, Chain)> {
    let splits = splits(checkpoint.description().layers.len() as u32).into_iter();
    splits.map(|split| {
        let chain = Chain::load(checkpoint, options, &split);
        (split, chain)
    })
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|value| value.to_bits()).collect()
}

/// The logits of all positions.
fn prefill_logits(executor: &mut impl Executor, tokens: &[TokenId], chunk: usize) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    inspect::logits::<_, ExecutorError>(executor, tokens, chunk, |row| {
        rows.push(bits(row));
        Ok(())
    })
    .unwrap();
    rows
}

/// Prefills the prompts, several in a step and in chunks, and then decodes some tokens of each: the logits of all rows, in
/// the order of prompts and positions.
fn batch_logits(executor: &mut impl Executor, prompts: &[Vec<TokenId>]) -> Vec<Vec<u32>> {
    let (mut plan, mut output, vocab) = (StepPlan::new(), StepOutput::new(), executor.capacity().vocab);
    let sessions: Vec<_> =
        prompts.iter().map(|_| executor.open(LIMITS.positions, Prefix::NONE).unwrap().session).collect();
    let mut found = vec![Vec::new(); prompts.len()];
    let mut computed = vec![0; prompts.len()];
    // Prompts end at different steps, and the last three tokens of each are decoded.
    let next = |index: usize, at: usize| match prompts[index].len() - at {
        0 => None,
        left @ 1..=3 => Some((Phase::Decode, left.min(1))),
        left => Some((Phase::Prefill, (7 + 4 * index).min(left - 3))),
    };
    while computed.iter().zip(prompts).any(|(&computed, prompt)| computed < prompt.len()) {
        plan.clear();
        let mut entries: Vec<_> =
            (0..prompts.len()).filter_map(|index| Some((next(index, computed[index])?, index))).collect();
        entries.sort();
        for ((phase, rows), index) in entries {
            let tokens = &prompts[index][computed[index]..computed[index] + rows];
            plan.push(sessions[index], phase, computed[index], tokens, RequestedOutput::Logits { rows });
            computed[index] += rows;
        }
        executor.submit(&plan).unwrap();
        executor.collect(&mut output).unwrap();
        for rows in &output.logits {
            let index = sessions.iter().position(|&session| session == rows.session).unwrap();
            found[index].extend(output.values(rows).chunks_exact(vocab).map(bits));
        }
    }
    sessions.iter().for_each(|&session| executor.close(session));
    found.concat()
}

fn check(path: &std::path::Path, keep: Option<DType>) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let options = LoadOptions { keep, limits: LIMITS };
    let prompts = oracle_prompts(path);
    let long = prompts.iter().max_by_key(|prompt| prompt.len()).unwrap();
    let batch: Vec<_> = prompts
        .iter()
        .filter(|prompt| prompt.len() >= 8)
        .map(|prompt| prompt[..prompt.len().min(40)].to_vec())
        .collect();
    let mut whole = local(&checkpoint, &options);
    let (alone, together) = (prefill_logits(&mut whole, long, 320), batch_logits(&mut whole, &batch));
    for (split, mut chain) in chains(&checkpoint, &options) {
        for chunk in [320, 33] {
            assert!(prefill_logits(&mut chain, long, chunk) == alone, "{path:?} as {split:?} in chunks of {chunk}");
        }
        assert!(batch_logits(&mut chain, &batch) == together, "{path:?} as {split:?}, batched");
        assert_eq!(chain.capacity().pages_free, LIMITS.kv_pages);
    }
}

#[test]
fn the_logits_of_every_oracle_model_are_those_of_one_process_for_any_split() {
    oracle_models().iter().for_each(|path| check(path, None));
}

/// The logits of all positions, by an embedding, a stage with all layers, and a head.
fn logits_by_parts(checkpoint: &Checkpoint, options: &LoadOptions, tokens: &[TokenId], chunk: usize) -> Vec<Vec<u32>> {
    let mut parts = EmbeddingAndHead::load(backend(), checkpoint, options).unwrap();
    let layers = checkpoint.description().layers.len() as u32;
    let mut stage = local_stage(checkpoint, options, LayerRange::new(0, layers).unwrap());
    let session = stage.open(LIMITS.positions, Prefix::NONE).unwrap().session;
    // More at once than a step has.
    let activations = parts.embed(tokens).unwrap();
    let (mut plan, mut output, mut found) = (StepPlan::new(), StepOutput::new(), Vec::new());
    for (index, rows) in activations.chunks(chunk * parts.width()).enumerate() {
        let count = rows.len() / parts.width();
        plan.clear();
        plan.push_rows(session, Phase::Prefill, index * chunk, count, RequestedOutput::States { rows: count });
        plan.activations_mut().extend_from_slice(rows);
        stage.submit(&plan).unwrap();
        stage.collect(&mut output).unwrap();
        found.extend(parts.logits(&output.states).unwrap().chunks_exact(parts.vocab()).map(bits));
    }
    found
}

#[test]
fn embedding_stage_and_head_apart_give_the_logits_of_one_process() {
    for path in oracle_models() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let long = oracle_prompts(&path).into_iter().max_by_key(Vec::len).unwrap();
        let limits = Limits { step: StepLimits { rows: 33, ..LIMITS.step }, logit_rows: 33, ..LIMITS };
        let options = LoadOptions { keep: None, limits };
        let whole = prefill_logits(&mut local(&checkpoint, &options), &long, 33);
        assert!(logits_by_parts(&checkpoint, &options, &long, 33) == whole, "{path:?}");
    }
}

#[test]
fn embedding_and_head_refuse_what_they_cannot_take() {
    let checkpoint = Checkpoint::open(&oracle_models()[0]).unwrap();
    let options = LoadOptions { keep: None, limits: Limits { logit_rows: 2, ..LIMITS } };
    let mut parts = EmbeddingAndHead::load(backend(), &checkpoint, &options).unwrap();
    let (vocab, width) = (parts.vocab(), parts.width());
    let outside = parts.embed(&[TokenId(0), TokenId(vocab as u32)]);
    assert!(matches!(outside, Err(ExecutorError::TokenOutOfRange { .. })));
    assert!(matches!(parts.logits(&vec![0.0; width + 1]), Err(ExecutorError::ActivationShape { .. })));
    assert!(matches!(parts.logits(&vec![0.0; 3 * width]), Err(ExecutorError::StepTooLarge { .. })));
    assert!(parts.embed(&[]).unwrap().is_empty() && parts.logits(&[]).unwrap().is_empty());
}

#[test]
fn quantised_weights_give_the_same_bits_for_any_split() {
    check(&qwen3(), Some(DType::Q8_0));
}

/// Greedy and sampled requests, with penalties, log probabilities and shared prefixes; log probabilities of a prompt, and
/// embeddings.
fn requests(prompts: &[Vec<TokenId>]) -> Vec<Request> {
    let sampled = |index: usize| SamplingParams {
        temperature: if index.is_multiple_of(2) { 0.0 } else { 0.8 },
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        seed: index as u64,
        logprobs: Some(2),
        ..SamplingParams::default()
    };
    let mut requests: Vec<_> = (0..2 * prompts.len())
        .map(|index| {
            let tokens = prompts[index % prompts.len()].clone();
            Request { sampling: sampled(index), ..Request::greedy(tokens, 8 + index * 5 % 20) }
        })
        .collect();
    let long = prompts.iter().max_by_key(|prompt| prompt.len()).unwrap();
    for pooling in [Pooling::Mean, Pooling::Last] {
        requests.push(Request { kind: RequestKind::Embed(pooling), ..Request::greedy(long.clone(), 0) });
    }
    for tokens_max in [0, 4] {
        requests.push(Request { prompt_logprobs: Some(2), ..Request::greedy(long.clone(), tokens_max) });
    }
    requests
}

type Given = (Vec<TokenId>, Vec<Option<Logprobs>>, Vec<Option<Logprobs>>, Option<Vec<u32>>);

/// What all requests give, when they run together.
fn answers<E: Executor>(executor: E, requests: Vec<Request>, draft_tokens_max: usize) -> Vec<Given> {
    let options = EngineOptions { chunk: 96, draft_tokens_max, prefill_step: None, ..EngineOptions::default() };
    let mut engine = Engine::with_options(executor, options);
    let ids: Vec<_> = requests.into_iter().map(|request| engine.add(request).unwrap()).collect();
    let mut answers = run(&mut engine);
    let given = |id| {
        let answer = answers.0.remove(id).unwrap();
        let prompt_logprobs = answer.prefilled.map(|(_, logprobs)| logprobs).unwrap_or_default();
        (answer.tokens, answer.logprobs, prompt_logprobs, answer.embedding.as_deref().map(bits))
    };
    ids.iter().map(given).collect()
}

#[test]
fn answers_are_the_same_with_several_steps_in_flight() {
    for path in oracle_models().iter().filter(|path| path.ends_with("model-f32")) {
        let checkpoint = Checkpoint::open(path).unwrap();
        let options = |kv_pages| LoadOptions { keep: None, limits: Limits { kv_pages, ..LIMITS } };
        let prompts = oracle_prompts(path);
        let want = answers(local(&checkpoint, &options(LIMITS.kv_pages)), requests(&prompts), 0);
        // With few pages, sequences with rows in flight are preempted.
        for (kv_pages, draft_tokens_max) in [(LIMITS.kv_pages, 0), (14, 3)] {
            for (split, chain) in chains(&checkpoint, &options(kv_pages)).filter(|(split, _)| split.len() > 2) {
                assert!(chain.depth() > 1);
                let found = answers(chain, requests(&prompts), draft_tokens_max);
                assert!(found == want, "{path:?} as {split:?}, {kv_pages} pages, {draft_tokens_max} draft tokens");
            }
        }
    }
}

fn qwen3() -> PathBuf {
    oracle_models().into_iter().find(|path| path.ends_with("qwen3/model-f32")).unwrap()
}

const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };

#[test]
fn with_a_head_at_the_end_of_a_chain_only_requests_that_need_states_fail() {
    let checkpoint = Checkpoint::open(&qwen3()).unwrap();
    let prompts = oracle_prompts(&qwen3());
    let mut whole = Engine::new(local(&checkpoint, &OPTIONS), 96);
    let is_for: [fn(_) -> bool; 2] = [|_| true, |session: SessionId| session.0.is_multiple_of(2)];
    for (is_for, all) in is_for.into_iter().zip([true, false]) {
        let head = HeadAtEnd { head: EmbeddingAndHead::load(backend(), &checkpoint, &OPTIONS).unwrap(), is_for };
        let chain = Chain::load(&checkpoint, &OPTIONS, &[0, 2, 2]).with_head_at_end(head);
        let options = EngineOptions { chunk: 96, prefill_step: None, ..EngineOptions::default() };
        let mut chain = Engine::with_options(chain, options);
        // Twice, so that sessions are opened where others have failed.
        let requests = || requests(&prompts).into_iter().chain(requests(&prompts));
        let ids: Vec<_> = requests().map(|request| chain.add(request).unwrap()).collect();
        let expected: Vec<_> = requests().map(|request| whole.add(request).unwrap()).collect();
        let (found, expected_answers) = (run(&mut chain), run(&mut whole));
        let mut failed = 0;
        for ((id, expected), request) in ids.iter().zip(&expected).zip(requests()) {
            let (found, expected) = (&found.0[id], &expected_answers.0[expected]);
            let needs_states = request.prompt_logprobs.is_some() || request.kind != RequestKind::Generate;
            if matches!(found.ends[0].reason, FinishReason::Failed(Failure::NoStates)) {
                assert!(needs_states && found.tokens.is_empty() && found.embedding.is_none());
                failed += 1;
                continue;
            }
            assert!(!(needs_states && all));
            assert_eq!((&found.tokens, &found.logprobs), (&expected.tokens, &expected.logprobs));
            assert_eq!((found.reason(), &found.embedding), (expected.reason(), &expected.embedding));
        }
        assert!(failed == 8 || (!all && failed > 0), "{failed}");
    }
}

#[test]
fn logits_that_an_entry_does_not_take_are_refused() {
    let checkpoint = Checkpoint::open(&qwen3()).unwrap();
    let mut ends =
        CoordinatorStage::load(backend(), &checkpoint, &OPTIONS, ModelPart::coordinator(0), &mut |_| {}).unwrap();
    let (vocab, width) = (ends.capacity().vocab, ends.stage().width());
    let session = ends.open(8, Prefix::NONE).unwrap().session;
    let (mut plan, mut output, mut activations) = (StepPlan::new(), StepOutput::new(), Vec::new());
    plan.push(session, Phase::Prefill, 0, &[TokenId(1), TokenId(2)], RequestedOutput::Logits { rows: 1 });
    ends.start(&plan, &mut activations).unwrap();
    let mut finish = |plan: &StepPlan, entry, logits: Option<Vec<f32>>| {
        let states = vec![0.0; plan.state_rows() * width];
        ends.finish_without(plan, &states, &[EntryWithoutStates { entry, logits }], &mut output)?;
        let rows = output.logits.iter().flat_map(|rows| output.values(rows).to_vec()).collect::<Vec<_>>();
        Ok((rows, output.unserved.clone()))
    };
    let row: Vec<_> = (0..vocab).map(|value| value as f32).collect();
    assert_eq!(finish(&plan, 0, Some(row.clone())).unwrap(), (row.clone(), Vec::new()));
    assert_eq!(finish(&plan, 0, None).unwrap(), (Vec::new(), vec![session]));
    let short = finish(&plan, 0, Some(row[1..].to_vec()));
    assert!(matches!(short, Err(ExecutorError::ActivationShape { rows: 1, .. })), "{short:?}");
    assert!(matches!(finish(&plan, 1, Some(row.clone())), Err(ExecutorError::Input { .. })));
    plan.clear();
    plan.push(session, Phase::Prefill, 0, &[TokenId(1), TokenId(2)], RequestedOutput::Logits { rows: 2 });
    assert!(matches!(finish(&plan, 0, Some(row)), Err(ExecutorError::ActivationShape { rows: 2, .. })));
}
