//! Plans and outputs: encoded and decoded without the loss of a bit, and rejected where they break what the engine
//! relies on.

use std::sync::Arc;

use engine::{
    Logprobs, Phase, PooledEmbedding, Pooling, PromptLogprobs, RequestedOutput, Sample, SampleError, Sampled,
    SamplingParams, StepOutput, StepPlan, SuppressedTokens, TOP_LOGPROBS_MAX,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ranks::protocol::limits::{ENTRIES_MAX, LimitError, POSITIONS_MAX, ROWS_MAX, VOCAB_MAX};
use ranks::protocol::output::{WireOutcome, WireOutput};
use ranks::protocol::plan::{self, WirePlan};
use ranks::protocol::{
    ATTACHED_BYTES_MAX, LineMessage, Lines, Number, Packed, RankReply, RankRequest, ReadError, encode,
};
use types::{SessionId, TokenId};

const VOCAB: usize = 50;
/// Columns of activations.
const STATE_WIDTH: usize = 3;

fn through_a_line<M: LineMessage>(message: &M) -> M {
    let mut line = Vec::new();
    encode(message, &mut line).unwrap();
    Lines::new(&line[..]).read().unwrap().unwrap()
}

fn plan_through_a_line(plan: &StepPlan) -> StepPlan {
    let RankRequest::Step { plan, .. } = through_a_line(&RankRequest::Step { id: 1, plan: plan.into() }) else {
        panic!("a step stays a step")
    };
    let mut again = StepPlan::new();
    plan.fill(VOCAB, &mut again).unwrap();
    again
}

fn output_through_a_line(plan: &StepPlan, output: &StepOutput) -> Result<StepOutput, LimitError> {
    let reply = through_a_line(&RankReply::StepOk { id: 1, output: output.into() });
    let RankReply::StepOk { output, .. } = reply else { panic!("a step stays a step") };
    let mut again = StepOutput::new();
    output.fill(plan, VOCAB, &mut again).map(|()| again)
}

/// Shows all bits of a number: `Debug` writes the shortest digits that parse to it, and distinguishes the two zeros.
fn bits(value: &impl std::fmt::Debug) -> String {
    format!("{value:?}")
}

fn token() -> impl Strategy<Value = TokenId> {
    (0..VOCAB as u32).prop_map(TokenId)
}

/// All finite numbers, uniform in their bits.
fn finite() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(f32::from_bits).prop_filter("finite", |value| value.is_finite())
}

fn logprob() -> impl Strategy<Value = f32> {
    prop_oneof![8 => finite(), 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::INFINITY), 1 => Just(f32::NAN)]
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let bias = (token(), prop_oneof![finite(), Just(f32::NEG_INFINITY)]);
    let biases = option::of(vec(bias, 0..4).prop_map(Arc::from));
    let above_zero = || f32::MIN_POSITIVE..=1000.0;
    let penalty = || -1000f32..=1000.0;
    let parts = (above_zero(), any::<usize>(), 1e-30f32..=1.0, 0f32..=1.0, any::<u64>());
    let penalties = (above_zero(), penalty(), penalty());
    let logprobs = option::of(0..=TOP_LOGPROBS_MAX);
    (parts, penalties, biases, logprobs).prop_map(
        |((temperature, top_k, top_p, min_p, seed), (repetition, presence, frequency), logit_bias, logprobs)| {
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                repetition_penalty: repetition,
                presence_penalty: presence,
                frequency_penalty: frequency,
                logit_bias,
                logprobs,
            }
        },
    )
}

fn requested(rows: usize) -> impl Strategy<Value = RequestedOutput> {
    let position = 0..=POSITIONS_MAX;
    let suppressed = (position.clone(), vec(any::<u32>().prop_map(TokenId), 0..3))
        .prop_map(|(until, tokens)| SuppressedTokens { until, tokens: tokens.into() });
    prop_oneof![
        Just(RequestedOutput::Nothing),
        (0..=rows, position, sampling(), option::of(suppressed)).prop_map(
            |(rows, prompt_tokens, sampling, suppressed)| RequestedOutput::Sample {
                rows,
                prompt_tokens,
                sampling,
                suppressed
            }
        ),
        (0..=TOP_LOGPROBS_MAX, token()).prop_map(|(top, next)| RequestedOutput::PromptLogprobs { top, next }),
        (any::<bool>(), any::<bool>()).prop_map(|(mean, last)| {
            RequestedOutput::Embed { pooling: if mean { Pooling::Mean } else { Pooling::Last }, last }
        }),
        (0..=rows).prop_map(|rows| RequestedOutput::Logits { rows }),
    ]
}

prop_compose! {
    fn entry()(tokens in vec(token(), 1..5))(
        session in any::<u64>(),
        is_prompt in any::<bool>(),
        position in 0..POSITIONS_MAX - 4,
        requested in requested(tokens.len()),
        mask in option::of(vec(any::<u32>(), 0..3)),
        tokens in Just(tokens),
    ) -> (SessionId, Phase, usize, Vec<TokenId>, RequestedOutput, Option<Vec<u32>>) {
        let phase = if is_prompt { Phase::Prefill } else { Phase::Decode };
        (SessionId(session), phase, position, tokens, requested, mask)
    }
}

prop_compose! {
    fn step_plan()(mut entries in vec(entry(), 0..6), is_stage in any::<bool>()) -> StepPlan {
        entries.sort_by_key(|(_, phase, _, _, requested, _)| (*phase, matches!(requested, RequestedOutput::Embed { .. })));
        if is_stage {
            return stage_plan(entries.iter().map(|(session, phase, position, tokens, ..)| (*session, *phase, *position, tokens.len())));
        }
        let mut plan = StepPlan::new();
        for (session, phase, position, tokens, requested, mask) in entries {
            plan.push(session, phase, position, &tokens, requested);
            if let Some(mask) = mask {
                plan.mask_last(&mask);
            }
        }
        plan
    }
}

/// A plan with activations instead of tokens.
fn stage_plan(entries: impl Iterator<Item = (SessionId, Phase, usize, usize)>) -> StepPlan {
    let mut plan = StepPlan::new();
    for (session, phase, position, rows) in entries {
        plan.push_rows(session, phase, position, rows, RequestedOutput::States { rows: position % (rows + 1) });
    }
    let values = 0..STATE_WIDTH * plan.rows();
    plan.activations_mut().extend(values.map(|value| 1.0 / (1 + value) as f32));
    plan
}

fn logprobs() -> impl Strategy<Value = Logprobs> {
    (logprob(), vec((token(), logprob()), 0..=3)).prop_map(|(chosen, top)| Logprobs { chosen, top })
}

fn outcome<T: std::fmt::Debug>(value: impl Strategy<Value = T>) -> impl Strategy<Value = Result<T, SampleError>> {
    (value, 0..8).prop_map(|(value, fate)| match fate {
        0 => Err(SampleError::NotFinite),
        1 => Err(SampleError::NothingAllowed),
        _ => Ok(value),
    })
}

fn sampled() -> impl Strategy<Value = Sampled> {
    (token(), option::of(logprobs())).prop_map(|(token, logprobs)| Sampled { token, logprobs })
}

/// The output of a plan: what each entry requests, from the given values.
fn answer(
    plan: &StepPlan,
    sampled: &[Result<Sampled, SampleError>],
    logprobs_of_prompt: &[Logprobs],
    values: &[f32],
) -> StepOutput {
    let mut output = StepOutput::new();
    let mut sampled = sampled.iter().cycle().cloned();
    for entry in plan.entries() {
        let (session, rows) = (entry.session, entry.logit_rows());
        match entry.requested {
            RequestedOutput::Nothing | RequestedOutput::Embed { last: false, .. } => {}
            RequestedOutput::Sample { .. } => output.samples.extend((0..rows).map(|row| Sample {
                session,
                position: entry.end() - rows + row + 1,
                outcome: sampled.next().unwrap(),
            })),
            RequestedOutput::PromptLogprobs { .. } => {
                let outcome = Ok(logprobs_of_prompt.iter().cycle().take(rows).cloned().collect());
                output.prompt_logprobs.push(PromptLogprobs { session, position: entry.position + 1, outcome });
            }
            RequestedOutput::Embed { .. } => {
                output.embeddings.push(PooledEmbedding { session, values: values.to_vec() })
            }
            RequestedOutput::Logits { .. } => {
                let values: Vec<f32> = values.iter().cycle().take(rows * VOCAB).copied().collect();
                output.push_logits(session, entry.end() - rows, rows, &values);
            }
            RequestedOutput::States { rows } => {
                output.states.extend(values.iter().cycle().take(rows * STATE_WIDTH).copied());
            }
        }
    }
    output
}

fn all_values(output: &StepOutput) -> Vec<u32> {
    let logits = output.logits.iter().flat_map(|rows| output.values(rows));
    logits
        .chain(output.embeddings.iter().flat_map(|embedding| &embedding.values))
        .chain(&output.states)
        .map(|value| value.to_bits())
        .collect()
}

proptest! {
    #[test]
    fn a_plan_comes_back_with_every_bit(plan in step_plan()) {
        prop_assert_eq!(bits(&plan_through_a_line(&plan)), bits(&plan));
    }

    #[test]
    fn an_output_comes_back_with_every_bit(
        plan in step_plan(),
        sampled in vec(outcome(sampled()), 1..5),
        logprobs_of_prompt in vec(logprobs(), 1..4),
        values in vec(any::<u32>().prop_map(f32::from_bits), 1..9),
    ) {
        let output = answer(&plan, &sampled, &logprobs_of_prompt, &values);
        let again = output_through_a_line(&plan, &output).unwrap();
        prop_assert_eq!(bits(&again), bits(&output));
        prop_assert_eq!(all_values(&again), all_values(&output), "of values in bulk, NaNs keep their bits too");
    }

    #[test]
    fn a_line_of_a_step_with_changed_bytes_never_panics(
        plan in step_plan(),
        changes in vec((any::<usize>(), any::<u8>()), 1..4),
    ) {
        let mut line = Vec::new();
        encode(&RankRequest::Step { id: 1, plan: (&plan).into() }, &mut line).unwrap();
        for (place, byte) in changes {
            let place = place % line.len();
            line[place] = byte;
        }
        let mut lines = Lines::new(&line[..]);
        while let Some(read) = lines.read::<RankRequest>() {
            if let Ok(RankRequest::Step { plan, .. }) = read {
                let mut filled = StepPlan::new();
                prop_assert!(plan.fill(VOCAB, &mut filled).is_ok() || filled.is_empty());
            }
        }
    }
}

#[test]
fn a_plan_on_the_wire_has_this_form() {
    let mut plan = StepPlan::new();
    let bias: Arc<[_]> = Arc::new([(TokenId(3), f32::NEG_INFINITY)]);
    let sampling = SamplingParams {
        temperature: 0.5,
        top_k: 40,
        top_p: 0.75,
        min_p: 0.25,
        seed: 6,
        repetition_penalty: 1.5,
        presence_penalty: 2.0,
        frequency_penalty: -1.0,
        logit_bias: Some(bias),
        logprobs: Some(2),
    };
    plan.push(SessionId(9), Phase::Decode, 40, &[TokenId(1)], RequestedOutput::sample(30, sampling));
    plan.mask_last(&[1, u32::MAX]);
    plan.push(SessionId(6), Phase::Decode, 2, &[TokenId(1)], RequestedOutput::sample(1, SamplingParams::default()));
    plan.push(
        SessionId(8),
        Phase::Prefill,
        0,
        &[TokenId(1), TokenId(2)],
        RequestedOutput::PromptLogprobs { top: 1, next: TokenId(3) },
    );
    plan.push(
        SessionId(7),
        Phase::Prefill,
        0,
        &[TokenId(4)],
        RequestedOutput::Embed { pooling: Pooling::Mean, last: true },
    );
    let expected = concat!(
        r#"{"entries":[{"session":9,"phase":"decode","position":40,"tokens":[1],"requested":{"sample":{"rows":1,"#,
        r#""prompt_tokens":30,"sampling":{"temperature":0.5,"top_k":40,"top_p":0.75,"min_p":0.25,"seed":6,"#,
        r#""repetition_penalty":1.5,"presence_penalty":2.0,"frequency_penalty":-1.0,"logit_bias":[[3,"-inf"]],"#,
        r#""logprobs":2}}},"mask":"AQAAAP////8="},"#,
        r#"{"session":6,"phase":"decode","position":2,"tokens":[1],"#,
        r#""requested":{"sample":{"rows":1,"prompt_tokens":1,"sampling":{}}}},"#,
        r#"{"session":8,"phase":"prefill","position":0,"tokens":[1,2],"requested":{"prompt_logprobs":{"top":1,"next":3}}},"#,
        r#"{"session":7,"phase":"prefill","position":0,"tokens":[4],"requested":{"embed":{"pooling":"mean","last":true}}}]}"#,
    );
    assert_eq!(serde_json::to_string(&WirePlan::from(&plan)).unwrap(), expected);
}

/// The error of a plan with one entry of two tokens, after `change`.
fn refusal(change: impl FnOnce(&mut plan::WireEntry)) -> LimitError {
    let mut inner = StepPlan::new();
    let requested = RequestedOutput::sample(3, SamplingParams::default());
    inner.push(SessionId(1), Phase::Decode, 4, &[TokenId(1), TokenId(2)], requested);
    let mut plan = WirePlan::from(&inner);
    plan.fill(VOCAB, &mut inner).unwrap();
    change(&mut plan.entries[0]);
    let error = plan.fill(VOCAB, &mut inner).unwrap_err();
    assert!(inner.is_empty(), "nothing is left of a plan that was refused");
    error
}

fn sampling_refusal(change: impl FnOnce(&mut plan::WireSampling)) -> LimitError {
    refusal(|entry| match &mut entry.requested {
        plan::WireRequestedOutput::Sample { sampling, .. } => change(sampling),
        _ => panic!("the entry is sampled"),
    })
}

#[test]
fn a_plan_that_the_engine_could_not_trust_is_refused() {
    let too_large = |error: LimitError, name: &str| {
        assert!(matches!(error, LimitError::TooLarge { what, .. } if what == name), "{error}")
    };
    assert_eq!(refusal(|entry| entry.tokens.clear()), LimitError::Zero { what: "tokens of an entry" });
    assert_eq!(refusal(|entry| entry.tokens[1] = 50), LimitError::TokenOutOfRange { token: 50, vocab: VOCAB });
    too_large(refusal(|entry| entry.position = POSITIONS_MAX as u64 - 1), "position");
    too_large(refusal(|entry| entry.position = u64::MAX), "position");
    too_large(refusal(|entry| entry.tokens = vec![0; ROWS_MAX + 1].into()), "rows of a step");
    too_large(refusal(|entry| entry.mask = Some(Packed::of_u32(&[0; VOCAB_MAX / 32 + 1]))), "words of a mask");
    let ragged = refusal(|entry| entry.mask = Some(Packed::of_arrays([[0u8; 5]])));
    assert_eq!(ragged, LimitError::IncompleteValue { what: "mask", bytes: 5 });
    let missing = LimitError::RowsMissing { session: 1, logit_rows: 3, rows: 2 };
    assert_eq!(refusal(|entry| entry.requested = plan::WireRequestedOutput::Logits { rows: 3 }), missing);
    too_large(
        refusal(|entry| entry.requested = plan::WireRequestedOutput::Logits { rows: u64::MAX }),
        "rows of logits",
    );
    let prompt_logprobs =
        |top, next| refusal(|entry| entry.requested = plan::WireRequestedOutput::PromptLogprobs { top, next });
    too_large(prompt_logprobs(TOP_LOGPROBS_MAX as u64 + 1, 1), "top log probabilities");
    assert_eq!(prompt_logprobs(1, 50), LimitError::TokenOutOfRange { token: 50, vocab: VOCAB });

    too_large(sampling_refusal(|sampling| sampling.logprobs = Some(21)), "top log probabilities");
    too_large(
        sampling_refusal(|sampling| sampling.logit_bias = Some(vec![(0, Number(0.0)); VOCAB_MAX + 1])),
        "logit biases",
    );
    for error in [
        sampling_refusal(|sampling| sampling.temperature = Number(f32::NAN)),
        sampling_refusal(|sampling| sampling.temperature = Number(-1.0)),
        sampling_refusal(|sampling| sampling.top_p = Number(0.0)),
        sampling_refusal(|sampling| sampling.min_p = Number(f32::INFINITY)),
        sampling_refusal(|sampling| sampling.repetition_penalty = Number(0.0)),
        sampling_refusal(|sampling| sampling.logit_bias = Some(vec![(50, Number(0.0))])),
        sampling_refusal(|sampling| sampling.logit_bias = Some(vec![(5, Number(f32::NAN))])),
    ] {
        assert!(matches!(error, LimitError::Sampling(_)), "{error}");
    }
}

#[test]
fn entries_out_of_order_and_too_many_entries_are_refused() {
    let entry = |session, phase, requested| plan::WireEntry {
        session,
        phase,
        position: 0,
        tokens: vec![1].into(),
        rows: 0,
        requested,
        mask: None,
    };
    let embed = plan::WireRequestedOutput::Embed { pooling: plan::WirePooling::Last, last: true };
    let first = entry(1, plan::WirePhase::Decode, plan::WireRequestedOutput::Nothing);
    let second = entry(2, plan::WirePhase::Prefill, plan::WireRequestedOutput::Nothing);
    let third = entry(3, plan::WirePhase::Prefill, embed);
    let fill = |entries: &[&plan::WireEntry]| {
        let entries = entries.iter().map(|&entry| entry.clone()).collect();
        WirePlan { entries, activations: None }.fill(VOCAB, &mut StepPlan::new())
    };
    assert_eq!(fill(&[&first, &second, &third]), Ok(()));
    assert_eq!(fill(&[&second, &first]), Err(LimitError::OutOfOrder { session: 1 }));
    assert_eq!(fill(&[&first, &third, &second]), Err(LimitError::OutOfOrder { session: 2 }));
    assert_eq!(fill(&vec![&first; ENTRIES_MAX]), Ok(()));
    assert!(matches!(fill(&vec![&first; ENTRIES_MAX + 1]), Err(LimitError::TooLarge { .. })));
    let large = plan::WireEntry { tokens: vec![1; ROWS_MAX / 2].into(), ..first.clone() };
    assert_eq!(fill(&[&large, &large]), Ok(()));
    assert!(matches!(fill(&[&large, &large, &first]), Err(LimitError::TooLarge { what: "rows of a step", .. })));
    let bare = plan::WireEntry { tokens: Vec::new().into(), rows: 2, ..first.clone() };
    assert_eq!(fill(&[&bare, &bare]), Ok(()));
    assert_eq!(fill(&[&bare, &first]), Err(LimitError::MixedRows { session: 1 }));
    assert_eq!(fill(&[&first, &bare]), Err(LimitError::MixedRows { session: 1 }));
    assert_eq!(fill(&[&plan::WireEntry { rows: 1, ..first.clone() }]), Err(LimitError::MixedRows { session: 1 }));
    let states = plan::WireRequestedOutput::States { rows: 3 };
    let missing = LimitError::RowsMissing { session: 1, logit_rows: 3, rows: 2 };
    assert_eq!(fill(&[&plan::WireEntry { requested: states, ..bare }]), Err(missing));
}

#[test]
fn states_of_another_shape_are_refused() {
    let plan = stage_plan([(SessionId(1), Phase::Decode, 1, 1), (SessionId(2), Phase::Prefill, 2, 2)].into_iter());
    let mut output = StepOutput::new();
    output.states = vec![1.0; 3 * STATE_WIDTH];
    assert_eq!(output_through_a_line(&plan, &output).unwrap().states, output.states);
    output.states.pop();
    let shape = LimitError::Shape { what: "the states of a step", found: 8, expected: 9 };
    assert_eq!(output_through_a_line(&plan, &output).unwrap_err(), shape);
}

#[test]
fn activations_follow_their_line_as_bytes() {
    let plan = stage_plan([(SessionId(1), Phase::Prefill, 0, 5)].into_iter());
    let values = plan.activations().len();
    let mut sent = Vec::new();
    for id in [1, 2] {
        encode(&RankRequest::Step { id, plan: (&plan).into() }, &mut sent).unwrap();
    }
    let line = sent.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    assert_eq!(sent.len(), 2 * (line + 4 * values), "four bytes for each value, and nothing between");
    let mut lines = Lines::new(&sent[..]);
    let first: RankRequest = lines.read().unwrap().unwrap();
    assert_eq!(lines.bytes(), line + 4 * values);
    // The memory of the first is reused, not its values.
    let second = lines.read_reusing(|| Some(first)).unwrap().unwrap();
    let RankRequest::Step { id: 2, plan: wire } = second else { panic!("{second:?}") };
    let mut again = StepPlan::new();
    wire.fill(VOCAB, &mut again).unwrap();
    assert_eq!(again.activations(), plan.activations());
    assert!(lines.read::<RankRequest>().is_none());
    // What ends early is an error, and so is what announces too much.
    for cut in line..line + 4 * values {
        let mut lines = Lines::new(&sent[..cut]);
        assert!(matches!(lines.read::<RankRequest>(), Some(Err(ReadError::Io(_)))), "{cut}");
        assert!(lines.read::<RankRequest>().is_none());
    }
    let announced = format!("\"activations\":{}", 4 * values);
    let text = str::from_utf8(&sent[..line]).unwrap();
    assert!(text.contains(&announced), "{text}");
    let greedy = text.replace(&announced, &format!("\"activations\":{}", ATTACHED_BYTES_MAX + 1));
    let error = Lines::new(greedy.as_bytes()).read::<RankRequest>().unwrap().unwrap_err();
    assert!(matches!(&error, ReadError::Malformed { id: Some(1), .. }), "{error}");
    let ragged = text.replace(&announced, "\"activations\":5");
    let ragged = [ragged.as_bytes(), b"12345"].concat();
    let RankRequest::Step { plan: wire, .. } = Lines::new(&ragged[..]).read().unwrap().unwrap() else { panic!() };
    let incomplete = LimitError::IncompleteValue { what: "activations", bytes: 5 };
    assert_eq!(wire.fill(VOCAB, &mut again), Err(incomplete));
}

/// A plan that requests each kind of output once, and its output.
fn step_with_everything() -> (StepPlan, WireOutput) {
    let mut plan = StepPlan::new();
    let tokens = [TokenId(1), TokenId(2), TokenId(3)];
    let sampled =
        RequestedOutput::Sample { rows: 2, prompt_tokens: 0, sampling: SamplingParams::default(), suppressed: None };
    plan.push(SessionId(1), Phase::Decode, 10, &tokens, sampled);
    plan.push(SessionId(2), Phase::Decode, 20, &tokens, RequestedOutput::PromptLogprobs { top: 0, next: TokenId(0) });
    plan.push(SessionId(3), Phase::Prefill, 30, &tokens, RequestedOutput::Logits { rows: 2 });
    plan.push(SessionId(4), Phase::Prefill, 40, &tokens, RequestedOutput::Nothing);
    plan.push(SessionId(5), Phase::Prefill, 50, &tokens, RequestedOutput::Embed { pooling: Pooling::Mean, last: true });
    plan.push(
        SessionId(6),
        Phase::Prefill,
        60,
        &tokens,
        RequestedOutput::Embed { pooling: Pooling::Mean, last: false },
    );
    let top = (0..3).map(|token| (TokenId(token), -1.0)).collect();
    let logprobs = Logprobs { chosen: -0.5, top };
    let sampled = Ok(Sampled { token: TokenId(7), logprobs: Some(logprobs.clone()) });
    let output = answer(&plan, &[sampled], &[logprobs], &[0.25, f32::NAN]);
    let wire = WireOutput::from(&output);
    assert_eq!(
        (wire.samples.len(), wire.prompt_logprobs.len(), wire.embeddings.len(), wire.logits.len()),
        (2, 1, 1, 1)
    );
    assert_eq!((wire.samples[0].position, wire.samples[1].position), (12, 13));
    (plan, wire)
}

fn output_refusal(change: impl FnOnce(&mut WireOutput)) -> LimitError {
    let (plan, mut wire) = step_with_everything();
    let mut output = StepOutput::new();
    wire.fill(&plan, VOCAB, &mut output).unwrap();
    change(&mut wire);
    let error = wire.fill(&plan, VOCAB, &mut output).unwrap_err();
    assert!(output.samples.is_empty() && output.prompt_logprobs.is_empty(), "nothing is left of what was refused");
    assert!(output.embeddings.is_empty() && output.logits.is_empty());
    error
}

#[test]
fn an_output_may_lack_what_belongs_to_closed_sessions() {
    let (plan, wire) = step_with_everything();
    let mut output = StepOutput::new();
    let losses: [fn(&mut WireOutput); 3] =
        [|wire| wire.samples.clear(), |wire| drop(wire.samples.remove(0)), |wire| wire.logits.clear()];
    for lose in losses {
        let mut less = wire.clone();
        lose(&mut less);
        less.fill(&plan, VOCAB, &mut output).unwrap();
        assert_eq!(bits(&WireOutput::from(&output)), bits(&less));
    }
    WireOutput::default().fill(&plan, VOCAB, &mut output).unwrap();
    assert!(output.samples.is_empty());
}

#[test]
fn an_output_that_does_not_answer_its_plan_is_refused() {
    let unasked = |error: LimitError| assert!(matches!(error, LimitError::NotRequested { .. }), "{error}");
    unasked(output_refusal(|wire| wire.samples[0].session = 2));
    unasked(output_refusal(|wire| wire.samples[0].session = 99));
    unasked(output_refusal(|wire| wire.samples[0].position = 11));
    unasked(output_refusal(|wire| wire.samples[1].position = 14));
    unasked(output_refusal(|wire| wire.samples[1].position = u64::MAX));
    unasked(output_refusal(|wire| wire.samples.swap(0, 1)));
    unasked(output_refusal(|wire| wire.samples.extend_from_within(1..2)));
    unasked(output_refusal(|wire| wire.prompt_logprobs[0].position = 20));
    unasked(output_refusal(|wire| wire.prompt_logprobs[0].session = 1));
    unasked(output_refusal(|wire| wire.embeddings[0].session = 6));
    unasked(output_refusal(|wire| wire.logits[0].rows = 1));
    unasked(output_refusal(|wire| wire.logits[0].position = 30));

    let outside = LimitError::TokenOutOfRange { token: 50, vocab: VOCAB };
    let sampled = |change: fn(&mut ranks::protocol::output::WireSampled)| {
        output_refusal(|wire| match &mut wire.samples[0].outcome {
            WireOutcome::Ok(sampled) => change(sampled),
            _ => panic!("a token was sampled"),
        })
    };
    assert_eq!(sampled(|sampled| sampled.token = 50), outside);
    assert_eq!(sampled(|sampled| sampled.logprobs.as_mut().unwrap().top[2].0 = 50), outside);
    let many =
        sampled(|sampled| sampled.logprobs.as_mut().unwrap().top = vec![(0, Number(0.0)); TOP_LOGPROBS_MAX + 1].into());
    assert!(matches!(many, LimitError::TooLarge { found: 21, .. }), "{many}");

    let values = |values: Packed| output_refusal(|wire| wire.logits[0].values = values);
    let shape = LimitError::Shape { what: "a row of logits", found: 99, expected: 100 };
    assert_eq!(values(Packed::of_f32(&[0.0; 99])), shape);
    assert_eq!(values(Packed::of_arrays([[0; 3]])), LimitError::IncompleteValue { what: "logits", bytes: 3 });
    let fewer = output_refusal(|wire| wire.prompt_logprobs[0].outcome = WireOutcome::Ok(Vec::new()));
    assert_eq!(fewer, LimitError::Shape { what: "log probabilities", found: 0, expected: 3 });
}
