//! Answers and log probabilities of chains equal those of one process.

use engine::{EngineOptions, Request};
use model::Checkpoint;

use crate::loopback::{chain, oracle_models, whole};
use testing::cluster_chain::answers::{answers, options, requests};
use testing::cluster_chain::prompt;

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
