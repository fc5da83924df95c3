//! What a model computes, for tests, for `consort debug` and for `consort bench --accuracy`: greedy continuations, and the logits
//! of every position.

use std::thread;
use std::time::Duration;

use types::{SessionId, TokenId};

use crate::engine::{Engine, EngineError};
use crate::executor::{Executor, ExecutorError, OpenedSession};
use crate::plan::{Phase, RequestedOutput, StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::request::{EventKind, Failure, FinishReason, Finished, Request};

/// After that an executor is asked again for a session that is being opened.
const OPEN_RETRY: Duration = Duration::from_millis(20);

/// The greedy continuation of `prompt`: exactly `tokens` tokens, unless the context ends before.
pub fn greedy<E: Executor>(
    engine: &mut Engine<E>,
    prompt: &[TokenId],
    tokens: usize,
) -> Result<Vec<TokenId>, GreedyError> {
    let mut answer = Vec::new();
    for event in engine.generate(Request::greedy(prompt.to_vec(), tokens))? {
        match event? {
            EventKind::Token(sampled) => answer.push(sampled.token),
            EventKind::Finished(Finished { reason: FinishReason::Failed(failure), .. }) => return Err(failure.into()),
            _ => {}
        }
    }
    Ok(answer)
}

#[derive(Debug, thiserror::Error)]
pub enum GreedyError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// Runs `tokens` as a prompt in chunks of at most `chunk`, and calls `row` with the logits of every position, in order.
pub fn logits<E: Executor + ?Sized, X: From<ExecutorError>>(
    executor: &mut E,
    tokens: &[TokenId],
    chunk: usize,
    mut row: impl FnMut(&[f32]) -> Result<(), X>,
) -> Result<(), X> {
    let chunk = chunk.clamp(1, rows_max(executor));
    let mut sequence = InspectedSequence::open(executor, tokens.len())?;
    for piece in tokens.chunks(chunk) {
        sequence.run(Phase::Prefill, piece)?.try_for_each(&mut row)?;
    }
    Ok(())
}

/// Runs `tokens` on two executors of one model in one phase, in chunks of at most `chunk`, and calls `rows` with both logits of
/// every position, in order.
pub fn compare<E: Executor + ?Sized, R: Executor + ?Sized, X: From<ExecutorError>>(
    (executor, reference): (&mut E, &mut R),
    tokens: &[TokenId],
    phase: Phase,
    chunk: usize,
    mut rows: impl FnMut(&[f32], &[f32]) -> Result<(), X>,
) -> Result<(), X> {
    let chunk = chunk.clamp(1, rows_max(executor).min(rows_max(reference)));
    let mut sequence = InspectedSequence::open(executor, tokens.len())?;
    let mut reference = InspectedSequence::open(reference, tokens.len())?;
    for piece in tokens.chunks(chunk) {
        let expected = reference.run(phase, piece)?;
        sequence.run(phase, piece)?.zip(expected).try_for_each(|(found, expected)| rows(found, expected))?;
    }
    Ok(())
}

/// The most rows of a step whose logits are all computed.
fn rows_max<E: Executor + ?Sized>(executor: &E) -> usize {
    let capacity = executor.capacity();
    capacity.rows_max.min(capacity.logit_rows_max).max(1)
}

/// A sequence whose logits are all read. It is closed when this is dropped.
struct InspectedSequence<'a, E: Executor + ?Sized> {
    executor: &'a mut E,
    session: SessionId,
    position: usize,
    plan: StepPlan,
    output: StepOutput,
}

impl<'a, E: Executor + ?Sized> InspectedSequence<'a, E> {
    fn open(executor: &'a mut E, tokens_max: usize) -> Result<Self, ExecutorError> {
        let session = open_patiently(executor, tokens_max)?.session;
        Ok(Self { executor, session, position: 0, plan: StepPlan::new(), output: StepOutput::new() })
    }

    /// Runs the next tokens and returns the logits of each.
    fn run(&mut self, phase: Phase, tokens: &[TokenId]) -> Result<impl Iterator<Item = &[f32]>, ExecutorError> {
        self.plan.clear();
        self.plan.push(self.session, phase, self.position, tokens, RequestedOutput::Logits { rows: tokens.len() });
        self.executor.submit(&self.plan)?;
        self.executor.collect(&mut self.output)?;
        if !self.output.unserved.is_empty() {
            return Err(ExecutorError::Output { what: "logits of several positions" });
        }
        self.position += tokens.len();
        let (output, vocab) = (&self.output, self.executor.capacity().vocab);
        Ok(output.logits.iter().flat_map(move |rows| output.values(rows).chunks_exact(vocab)))
    }
}

/// Opens a session, however often the executor says that this takes a while: it ends that itself.
pub(crate) fn open_patiently<E: Executor + ?Sized>(
    executor: &mut E,
    tokens_max: usize,
) -> Result<OpenedSession, ExecutorError> {
    loop {
        match executor.open(tokens_max, Prefix::NONE) {
            Err(ExecutorError::Opening) => thread::sleep(OPEN_RETRY),
            opened => return opened,
        }
    }
}

impl<E: Executor + ?Sized> Drop for InspectedSequence<'_, E> {
    fn drop(&mut self) {
        self.executor.close(self.session);
    }
}
