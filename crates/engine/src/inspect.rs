//! What a model computes, for tests and for `consort debug`: greedy continuations, and the logits of every position.

use types::TokenId;

use crate::engine::{Engine, EngineError};
use crate::executor::{Executor, ExecutorError};
use crate::plan::{Phase, RequestedOutput, StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::request::{EventKind, Failure, FinishReason, Finished, Request};

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
pub fn logits<E: Executor, X: From<ExecutorError>>(
    executor: &mut E,
    tokens: &[TokenId],
    chunk: usize,
    mut row: impl FnMut(&[f32]) -> Result<(), X>,
) -> Result<(), X> {
    let capacity = executor.capacity();
    let chunk = chunk.clamp(1, capacity.rows_max.min(capacity.logit_rows_max));
    let session = executor.open(tokens.len(), Prefix::NONE)?.session;
    let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
    let mut run = || {
        for (index, piece) in tokens.chunks(chunk).enumerate() {
            plan.clear();
            plan.push(session, Phase::Prefill, index * chunk, piece, RequestedOutput::Logits { rows: piece.len() });
            executor.submit(&plan)?;
            executor.collect(&mut output)?;
            for rows in &output.logits {
                output.values(rows).chunks_exact(capacity.vocab).try_for_each(&mut row)?;
            }
        }
        Ok(())
    };
    let result = run();
    executor.close(session);
    result
}
