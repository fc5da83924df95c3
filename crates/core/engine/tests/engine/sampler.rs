//! The sampler against a naive one that sorts everything.

use std::collections::BTreeMap;

use engine::{AllowedTokens, History, SampleError, Sampler, SamplingParams, SamplingParamsError};
use proptest::prelude::*;
use types::TokenId;

/// The expected probability of each token, by full sorting, in the order of the filters.
fn reference(logits: &[f32], sampling: &SamplingParams) -> BTreeMap<u32, f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let weight = |id: usize| (f64::from(logits[id] - logits[order[0]]) / f64::from(sampling.temperature)).exp();
    let mut kept = order.clone();
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k);
    }
    if sampling.top_p < 1.0 {
        let wanted = f64::from(sampling.top_p) * kept.iter().map(|&id| weight(id)).sum::<f64>();
        let mut sum = 0.0;
        let enough = kept.iter().position(|&id| {
            sum += weight(id);
            sum >= wanted
        });
        kept.truncate(enough.map_or(kept.len(), |index| index + 1));
    }
    kept.retain(|&id| weight(id) >= f64::from(sampling.min_p));
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    kept.into_iter().map(|id| (id as u32, weight(id) / total)).collect()
}

/// Logits of which no two are equal, spread like a model's.
fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as f32 / (1u64 << 31) as f32
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() - 1.5) * 6.0).collect()
}

fn draw(logits: &[f32], sampling: &SamplingParams, position: usize, sampler: &mut Sampler) -> u32 {
    let history = vec![TokenId(0); position];
    let history = History { tokens: &history, prompt_tokens: position };
    sampler.sample(&mut logits.to_vec(), sampling, history, AllowedTokens::default()).unwrap().token.0
}

fn choose(logits: &[f32], sampling: &SamplingParams) -> Result<u32, SampleError> {
    let history = History { tokens: &[], prompt_tokens: 0 };
    Sampler::new()
        .sample(&mut logits.to_vec(), sampling, history, AllowedTokens::default())
        .map(|sampled| sampled.token.0)
}

fn warm() -> SamplingParams {
    SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::default() }
}

#[test]
fn frequencies_agree_with_the_reference_distribution() {
    const DRAWS: usize = 6000;
    let filters = [
        warm(),
        SamplingParams { temperature: 0.6, ..warm() },
        SamplingParams { temperature: 2.5, ..warm() },
        SamplingParams { top_k: 5, ..warm() },
        SamplingParams { top_p: 0.7, ..warm() },
        SamplingParams { min_p: 0.2, ..warm() },
        SamplingParams { temperature: 1.4, top_k: 20, top_p: 0.9, min_p: 0.05, ..warm() },
        SamplingParams { temperature: 0.7, top_k: 3, top_p: 0.5, ..warm() },
        SamplingParams { top_k: 1, ..warm() },
        SamplingParams { top_p: 1e-6, ..warm() },
    ];
    let mut sampler = Sampler::new();
    for size in [1, 5, 33, 700] {
        let logits = noise(size, size as u64);
        for sampling in &filters {
            let want = reference(&logits, sampling);
            let mut found = BTreeMap::<u32, usize>::new();
            for position in 0..DRAWS {
                *found.entry(draw(&logits, sampling, position, &mut sampler)).or_default() += 1;
            }
            for id in found.keys() {
                assert!(want.contains_key(id), "token {id} of {size} should be filtered by {sampling:?}");
            }
            for (id, probability) in want {
                let expected = probability * DRAWS as f64;
                let deviation = (expected * (1.0 - probability)).sqrt();
                let count = found.get(&id).copied().unwrap_or(0) as f64;
                let bound = 5.0 * deviation + 1.5; // rare tokens are not normally distributed
                assert!(
                    (count - expected).abs() < bound,
                    "token {id} of {size}: {count}, not {expected}: {sampling:?}"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn no_draw_leaves_the_reference_set(
        size in 1usize..400, seed in any::<u64>(), temperature in 0.05f32..4.0,
        top_k in 0usize..60, top_p in 0.01f32..=1.0, min_p in 0.0f32..0.9,
    ) {
        let logits = noise(size, seed);
        let sampling = SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() };
        let want = reference(&logits, &sampling);
        let mut sampler = Sampler::new();
        for position in 0..50 {
            let id = draw(&logits, &sampling, position, &mut sampler);
            // A token exactly at a limit may fall to either side of it by rounding.
            let edge = reference(&logits, &SamplingParams {
                top_p: (top_p + 1e-5).min(1.0), min_p: (min_p - 1e-5).max(0.0), ..sampling.clone()
            });
            prop_assert!(want.contains_key(&id) || edge.contains_key(&id));
        }
    }

    #[test]
    fn greedy_takes_the_largest_logit_with_the_lowest_id(
        logits in prop::collection::vec(prop_oneof![Just(-0.0f32), Just(0.0), (-3i8..3).prop_map(f32::from)], 1..100)
    ) {
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        let want = logits.iter().position(|&logit| logit == best).unwrap() as u32;
        prop_assert_eq!(choose(&logits, &SamplingParams::default()), Ok(want));
        let one = SamplingParams { top_k: 1, ..warm() };
        prop_assert_eq!(choose(&logits, &one), Ok(want));
    }
}

#[test]
fn equal_logits_are_cut_by_id() {
    let sampling = SamplingParams { top_k: 3, ..warm() };
    let mut sampler = Sampler::new();
    for size in [8, 1000] {
        let mut seen = [0; 3];
        for position in 0..200 {
            seen[draw(&vec![0.5; size], &sampling, position, &mut sampler) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 40), "{seen:?}");
    }
}

#[test]
fn the_same_seed_and_position_give_the_same_token_whatever_came_before() {
    let (logits, other) = (noise(500, 1), noise(900, 2));
    let penalised = SamplingParams { repetition_penalty: 1.3, top_p: 0.8, ..warm() };
    let mut used = Sampler::new();
    for position in 0..100 {
        draw(&other, &penalised, position * 7 % 50, &mut used);
        assert_eq!(draw(&logits, &warm(), position, &mut used), draw(&logits, &warm(), position, &mut Sampler::new()));
    }
    let another = SamplingParams { seed: 12, ..warm() };
    assert!((0..100).any(|at| draw(&logits, &warm(), at, &mut used) != draw(&logits, &another, at, &mut used)));
}

#[test]
fn penalties_count_the_prompt_only_for_repetition() {
    // Tokens 0 and 1 in the prompt, 1 twice and 2 once in the answer.
    let tokens = [0, 1, 1, 1, 2].map(TokenId);
    let history = History { tokens: &tokens, prompt_tokens: 2 };
    let check = |sampling: SamplingParams, want: [f32; 4]| {
        let mut logits = [2.0, 2.0, -2.0, 2.0];
        let mut sampler = Sampler::new();
        sampler.sample(&mut logits, &sampling, history, AllowedTokens::default()).unwrap();
        assert_eq!(logits, want);
        let mut again = [2.0, 2.0, -2.0, 2.0];
        sampler.sample(&mut again, &sampling, history, AllowedTokens::default()).unwrap();
        assert_eq!(again, want, "counts are left over from the first call");
    };
    let off = SamplingParams::default();
    check(off.clone(), [2.0, 2.0, -2.0, 2.0]);
    check(SamplingParams { repetition_penalty: 2.0, ..off.clone() }, [1.0, 1.0, -4.0, 2.0]);
    check(SamplingParams { presence_penalty: 0.5, ..off.clone() }, [2.0, 1.5, -2.5, 2.0]);
    check(SamplingParams { frequency_penalty: 0.5, ..off.clone() }, [2.0, 1.0, -2.5, 2.0]);
    let bias = Some([(TokenId(3), -100.0), (TokenId(0), 1.0)].into());
    check(SamplingParams { logit_bias: bias, ..off }, [3.0, 2.0, -2.0, -98.0]);
}

#[test]
fn log_probabilities_are_the_models_own() {
    let logits = [1.0f32, 3.0, 2.0, -1.0];
    let sum: f32 = logits.iter().map(|logit| logit.exp()).sum();
    let sampling =
        SamplingParams { temperature: 0.3, logit_bias: Some([(TokenId(0), 50.0)].into()), logprobs: Some(2), ..warm() };
    let history = History { tokens: &[], prompt_tokens: 0 };
    let sampled = Sampler::new().sample(&mut logits.clone(), &sampling, history, AllowedTokens::default()).unwrap();
    let logprobs = sampled.logprobs.unwrap();
    assert_eq!(sampled.token, TokenId(0));
    assert!((logprobs.chosen - (1.0 - sum.ln())).abs() < 1e-6);
    assert_eq!(logprobs.top.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [1, 2]);
    assert!((logprobs.top[0].1 - (3.0 - sum.ln())).abs() < 1e-6);
}

#[test]
fn unusable_logits_are_an_error() {
    for size in [3, 40] {
        for at in [0, size - 1] {
            for (bad, error) in [(f32::NAN, SampleError::NotFinite), (f32::INFINITY, SampleError::NotFinite)] {
                let mut logits = noise(size, 1);
                logits[at] = bad;
                assert_eq!(choose(&logits, &warm()), Err(error));
                assert_eq!(choose(&logits, &SamplingParams::default()), Err(error));
            }
        }
        assert_eq!(choose(&vec![f32::NEG_INFINITY; size], &warm()), Err(SampleError::NothingAllowed));
    }
}

#[test]
fn a_forbidden_token_is_never_drawn_however_hot() {
    let mut logits = vec![f32::NEG_INFINITY; 64];
    logits[40] = -5.0;
    let hot = SamplingParams { temperature: f32::MAX, ..warm() };
    for sampling in [hot.clone(), SamplingParams { top_k: 10, ..hot.clone() }, SamplingParams { top_p: 0.9, ..hot }] {
        assert_eq!(choose(&logits, &sampling), Ok(40));
    }
    let cold = SamplingParams { temperature: f32::MIN_POSITIVE, ..warm() };
    assert_eq!(choose(&[1.0, 1.5, 1.25], &cold), Ok(1));
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let refused = |sampling: SamplingParams| match sampling.check(10) {
        Err(SamplingParamsError::OutOfRange { name, .. }) => name,
        other => panic!("{other:?}"),
    };
    let off = SamplingParams::default;
    assert_eq!(off().check(10), Ok(()));
    assert_eq!(refused(SamplingParams { temperature: -1.0, ..off() }), "temperature");
    assert_eq!(refused(SamplingParams { temperature: f32::INFINITY, ..off() }), "temperature");
    assert_eq!(refused(SamplingParams { top_p: 0.0, ..off() }), "top_p");
    assert_eq!(refused(SamplingParams { top_p: 1.1, ..off() }), "top_p");
    assert_eq!(refused(SamplingParams { min_p: f32::NAN, ..off() }), "min_p");
    assert_eq!(refused(SamplingParams { repetition_penalty: 0.0, ..off() }), "repetition_penalty");
    let bias = |token, value| SamplingParams { logit_bias: Some([(TokenId(token), value)].into()), ..off() };
    assert_eq!(refused(bias(1, f32::NAN)), "logit_bias");
    assert!(matches!(bias(10, 0.0).check(10), Err(SamplingParamsError::BiasOutOfVocabulary { token: 10, vocab: 10 })));
    let many = SamplingParams { logprobs: Some(21), ..off() };
    assert!(matches!(many.check(10), Err(SamplingParamsError::TooManyLogprobs { asked: 21 })));
}

#[test]
fn only_allowed_tokens_are_sampled_and_log_probabilities_stay_the_models() {
    let logits = noise(100, 3);
    let (history, sampling) =
        (History { tokens: &[], prompt_tokens: 0 }, SamplingParams { logprobs: Some(3), ..warm() });
    let free = Sampler::new().sample(&mut logits.clone(), &sampling, history, AllowedTokens::default()).unwrap();
    let top = free.logprobs.unwrap().top;
    // Bits of tokens 40, 70 and 99; the suppressed one leaves two.
    let (words, suppressed) = ([0, 1 << 8, 1 << 6, 1 << 3], [TokenId(70), TokenId(1000)]);
    let mut seen = BTreeMap::new();
    for seed in 0..200 {
        let sampling = SamplingParams { seed, temperature: 50.0, top_p: 1.0, top_k: 0, min_p: 0.0, ..sampling.clone() };
        let allowed = AllowedTokens { mask: Some(&words), suppressed: &suppressed };
        let sampled = Sampler::new().sample(&mut logits.clone(), &sampling, history, allowed).unwrap();
        let logprobs = sampled.logprobs.unwrap();
        let given = Sampler::new().logprobs_of(&logits, sampled.token, 3).unwrap();
        assert_eq!((&logprobs.top, &logprobs), (&top, &given));
        *seen.entry(sampled.token.0).or_insert(0) += 1;
    }
    assert_eq!(seen.keys().copied().collect::<Vec<_>>(), [40, 99]);
    let nothing = AllowedTokens { mask: Some(&[0, 0, 1 << 6, 0]), suppressed: &suppressed };
    let outcome = Sampler::new().sample(&mut logits.clone(), &sampling, history, nothing);
    assert_eq!(outcome.unwrap_err(), SampleError::NothingAllowed);
    // Tokens beyond a short mask are not allowed either.
    let short = AllowedTokens { mask: Some(&[1 << 5]), suppressed: &[] };
    let sampled = Sampler::new().sample(&mut logits.clone(), &SamplingParams::default(), history, short).unwrap();
    assert_eq!(sampled.token, TokenId(5));
}

#[test]
fn given_tokens_have_log_probabilities_that_sum_to_one() {
    let logits = noise(70, 5);
    let logprobs: Vec<f32> =
        (0..70).map(|id| Sampler::new().logprobs_of(&logits, TokenId(id), 0).unwrap().chosen).collect();
    let total: f64 = logprobs.iter().map(|&logprob| f64::from(logprob).exp()).sum();
    assert!((total - 1.0).abs() < 1e-5, "{total}");
    let best = Sampler::new().logprobs_of(&logits, TokenId(0), 1).unwrap().top[0];
    assert_eq!(best.1, logprobs.iter().copied().fold(f32::MIN, f32::max));
    assert_eq!(Sampler::new().logprobs_of(&logits, TokenId(70), 1).unwrap().chosen, f32::NEG_INFINITY);
}
