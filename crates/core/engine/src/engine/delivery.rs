//! Delivery: the results of a step update its sequences and become events.

use std::time::Instant;

use super::Engine;
use crate::executor::{Executor, ExecutorError};
use crate::plan::{PooledEmbedding, PromptLogprobs, Sample, StepOutput};
use crate::request::{Event, EventKind, Failure, FinishReason};
use crate::sequence::DraftVerdict;

impl<E: Executor> Engine<E> {
    /// Hands the results of a step to its sequences. Results of sequences that were cancelled or requeued while the step was in
    /// flight are dropped.
    pub(super) fn deliver(&mut self, output: &mut StepOutput, events: &mut Vec<Event>) -> Result<(), ExecutorError> {
        let now = self.clock.now();
        for session in output.unserved.drain(..) {
            if let Some(index) = self.running.position_of(session) {
                let sequence = self.remove(index);
                self.finish(sequence, FinishReason::Failed(Failure::NoStates), now, events);
            }
        }
        for session in output.preempted.drain(..) {
            if let Some(index) = self.running.position_of(session) {
                let sequence = self.running.remove(index);
                self.requeue(sequence);
            }
        }
        for logprobs in output.prompt_logprobs.drain(..) {
            self.deliver_prompt_logprobs(logprobs, now, events);
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
        sequence.send_prefilled(events);
        let ended = match outcome {
            Err(error) => Some(FinishReason::Failed(error.into())),
            Ok(sampled) => {
                let ended = sequence.push_sampled(&sampled, now);
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
        match sequence.verify_draft() {
            DraftVerdict::NoDraft => {}
            DraftVerdict::Accepted => self.stats.draft_tokens_accepted += 1,
            DraftVerdict::Rejected { keep } => sequence.planned = self.executor.truncate(session, keep)?,
        }
        Ok(())
    }

    fn deliver_prompt_logprobs(&mut self, logprobs: PromptLogprobs, now: Instant, events: &mut Vec<Event>) {
        let Some(index) = self.running.position_of(logprobs.session) else { return };
        let sequence = &mut self.running[index];
        let reason = match logprobs.outcome {
            Err(error) => FinishReason::Failed(error.into()),
            Ok(logprobs) => {
                if !sequence.push_prompt_logprobs(logprobs) {
                    return;
                }
                sequence.send_prefilled(events);
                FinishReason::Length
            }
        };
        let sequence = self.remove(index);
        self.finish(sequence, reason, now, events);
    }

    fn deliver_embedding(&mut self, embedding: PooledEmbedding, now: Instant, events: &mut Vec<Event>) {
        let Some(index) = self.running.position_of(embedding.session) else { return };
        let mut sequence = self.remove(index);
        sequence.send_prefilled(events);
        events.push(Event { request: sequence.id, kind: EventKind::Embedding(embedding.values) });
        self.finish(sequence, FinishReason::Complete, now, events);
    }
}
