//! The answers of an engine, by request. The order of events is checked as they arrive.

use std::collections::BTreeMap;

use engine::{Engine, Event, EventKind, Executor, FinishReason, Finished, Logprobs, RequestId};
use types::TokenId;

#[derive(Default, Debug)]
pub struct Answer {
    pub tokens: Vec<TokenId>,
    pub logprobs: Vec<Option<Logprobs>>,
    /// Cached tokens and the prompt's log probabilities.
    pub prefilled: Option<(usize, Vec<Option<Logprobs>>)>,
    pub embedding: Option<Vec<f32>>,
    pub ends: Vec<Finished>,
}

impl Answer {
    /// The reason of its end, as text.
    pub fn reason(&self) -> String {
        assert_eq!(self.ends.len(), 1, "a request ends once");
        format!("{:?}", self.ends[0].reason)
    }
}

#[derive(Default, Debug)]
pub struct Answers(pub BTreeMap<RequestId, Answer>);

impl Answers {
    pub fn take(&mut self, events: &mut Vec<Event>) {
        for event in events.drain(..) {
            let answer = self.0.entry(event.request).or_default();
            assert!(answer.ends.is_empty(), "an event after the end");
            match event.kind {
                EventKind::Prefilled { cached_tokens, prompt_logprobs } => {
                    assert!(answer.tokens.is_empty() && answer.prefilled.is_none());
                    answer.prefilled = Some((cached_tokens, prompt_logprobs));
                }
                EventKind::Token(sampled) => {
                    assert!(answer.prefilled.is_some());
                    answer.tokens.push(sampled.token);
                    answer.logprobs.push(sampled.logprobs);
                }
                EventKind::Embedding(values) => answer.embedding = Some(values),
                EventKind::Finished(finished) => answer.ends.push(finished),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn check(&self, id: RequestId, tokens: &[TokenId], reason: FinishReason) {
        let answer = &self.0[&id];
        assert_eq!(answer.tokens, tokens);
        assert_eq!(answer.reason(), format!("{reason:?}"));
        assert_eq!(answer.ends[0].timings.generated_tokens, tokens.len());
    }
}

/// Runs until no request is left, and checks that no page is in use.
pub fn run<E: Executor>(engine: &mut Engine<E>) -> Answers {
    let (mut answers, mut events) = (Answers::default(), Vec::new());
    while engine.step(&mut events).unwrap() || !events.is_empty() {
        answers.take(&mut events);
    }
    assert!(engine.is_idle());
    assert_eq!(engine.capacity().pages_free, engine.capacity().pages_total, "pages are left behind");
    answers
}
