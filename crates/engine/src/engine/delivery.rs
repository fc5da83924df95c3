//! What a step gave goes to its sequences, and as events to whoever asked.

use std::time::Instant;

use super::Engine;
use crate::executor::{Executor, ExecutorError};
use crate::plan::{Embedding, Sample, Scores, StepOutput};
use crate::request::{Event, EventKind, FinishReason};
use crate::sequence::Guessed;

impl<E: Executor> Engine<E> {
    /// Hands what a step gave to its sequences. Those that were cancelled, or sent back to the queue, while it was in
    /// flight get nothing.
    pub(super) fn deliver(&mut self, output: &mut StepOutput, events: &mut Vec<Event>) -> Result<(), ExecutorError> {
        let now = Instant::now();
        for scores in output.scores.drain(..) {
            self.deliver_scores(scores, now, events);
        }
        for embedding in output.embeddings.drain(..) {
            self.deliver_embedding(embedding, now, events);
        }
        for sample in output.samples.drain(..) {
            self.deliver_sample(sample, now, events)?;
        }
        Ok(())
    }

    fn deliver_sample(
        &mut self,
        Sample { session, position, outcome }: Sample,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<(), ExecutorError> {
        let Some(index) = self.running.position_of(session).filter(|&index| self.running[index].awaits_sample()) else {
            return Ok(());
        };
        let sequence = &mut self.running[index];
        debug_assert_eq!(position, sequence.tokens.len());
        sequence.prefilled(events);
        let ended = match outcome {
            Err(error) => Some(FinishReason::Failed(error.into())),
            Ok(sampled) => {
                let ended = sequence.extend(&sampled, now);
                if !matches!(ended, Some(FinishReason::Eos(_) | FinishReason::Failed(_))) {
                    self.stats.decoded_tokens += 1;
                    self.waiting.charge(sequence.tenant, 1);
                    events.push(Event { request: sequence.id, kind: EventKind::Token(sampled) });
                }
                ended
            }
        };
        if let Some(reason) = ended {
            let sequence = self.remove(index);
            self.finish(sequence, reason, now, events);
            return Ok(());
        }
        match sequence.check_guess() {
            Guessed::Nothing => {}
            Guessed::Right => self.stats.guesses_right += 1,
            Guessed::Wrong { keep } => sequence.planned = self.executor.truncate(session, keep)?,
        }
        Ok(())
    }

    fn deliver_scores(&mut self, scores: Scores, now: Instant, events: &mut Vec<Event>) {
        let Some(index) = self.running.position_of(scores.session) else { return };
        let sequence = &mut self.running[index];
        let reason = match scores.outcome {
            Err(error) => FinishReason::Failed(error.into()),
            Ok(scores) => {
                if !sequence.score(scores) {
                    return;
                }
                sequence.prefilled(events);
                FinishReason::Length
            }
        };
        let sequence = self.remove(index);
        self.finish(sequence, reason, now, events);
    }

    fn deliver_embedding(&mut self, embedding: Embedding, now: Instant, events: &mut Vec<Event>) {
        let Some(index) = self.running.position_of(embedding.session) else { return };
        let mut sequence = self.remove(index);
        sequence.prefilled(events);
        events.push(Event { request: sequence.id, kind: EventKind::Embedding(embedding.values) });
        self.finish(sequence, FinishReason::Complete, now, events);
    }
}
