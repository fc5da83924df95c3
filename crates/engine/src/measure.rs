//! The speed of an executor, for `consort bench`: prefill and decode of given tokens, with greedy sampling. Sampled tokens are
//! discarded, so that every round does the same work.

use std::time::{Duration, Instant};

use types::{SessionId, TokenId};

use crate::executor::{Executor, ExecutorError};
use crate::plan::{Phase, RequestedOutput, StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::request::rate;
use crate::sampler::SamplingParams;

/// Tokens that were run, and how long that took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Throughput {
    pub tokens: usize,
    pub elapsed: Duration,
}

impl Throughput {
    pub fn tokens_per_s(&self) -> f64 {
        rate(self.tokens, self.elapsed)
    }
}

/// Runs `prompt` as one sequence in chunks of at most `chunk`, up to the first token of an answer.
pub fn prefill<E: Executor + ?Sized>(
    executor: &mut E,
    prompt: &[TokenId],
    chunk: usize,
) -> Result<Throughput, ExecutorError> {
    let capacity = executor.capacity();
    let chunk = chunk.clamp(1, capacity.rows_max);
    with_sessions(executor, 1, prompt.len(), |executor, sessions| {
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        let start = Instant::now();
        for (index, piece) in prompt.chunks(chunk).enumerate() {
            let is_last = (index + 1) * chunk >= prompt.len();
            plan.clear();
            let requested = if is_last { greedy_token() } else { RequestedOutput::Nothing };
            plan.push(sessions[0], Phase::Prefill, index * chunk, piece, requested);
            executor.submit(&plan)?;
            executor.collect(&mut output)?;
        }
        Ok(Throughput { tokens: prompt.len(), elapsed: start.elapsed() })
    })
}

/// Runs `tokens`, one in each step, as `batch` sequences side by side; each of them after `context` tokens that are not
/// timed.
pub fn decode<E: Executor + ?Sized>(
    executor: &mut E,
    context: &[TokenId],
    tokens: &[TokenId],
    batch: usize,
) -> Result<Throughput, ExecutorError> {
    let chunk = executor.capacity().rows_max.max(1);
    with_sessions(executor, batch, context.len() + tokens.len(), |executor, sessions| {
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        for &session in sessions {
            for (index, piece) in context.chunks(chunk).enumerate() {
                plan.clear();
                plan.push(session, Phase::Prefill, index * chunk, piece, RequestedOutput::Nothing);
                executor.submit(&plan)?;
                executor.collect(&mut output)?;
            }
        }
        let start = Instant::now();
        for (index, token) in tokens.iter().enumerate() {
            plan.clear();
            for &session in sessions {
                let (position, token) = (context.len() + index, std::slice::from_ref(token));
                plan.push(session, Phase::Decode, position, token, greedy_token());
            }
            executor.submit(&plan)?;
            executor.collect(&mut output)?;
        }
        Ok(Throughput { tokens: tokens.len() * batch, elapsed: start.elapsed() })
    })
}

fn greedy_token() -> RequestedOutput {
    RequestedOutput::sample(0, SamplingParams::default())
}

/// Opens sessions, runs `work`, and closes them, also after an error.
fn with_sessions<E: Executor + ?Sized>(
    executor: &mut E,
    count: usize,
    tokens_max: usize,
    work: impl FnOnce(&mut E, &[SessionId]) -> Result<Throughput, ExecutorError>,
) -> Result<Throughput, ExecutorError> {
    let mut sessions = Vec::with_capacity(count);
    let mut result = Ok(());
    while sessions.len() < count && result.is_ok() {
        result = executor.open(tokens_max, Prefix::NONE).map(|opened| sessions.push(opened.session));
    }
    let result = result.and_then(|()| work(executor, &sessions));
    for session in sessions {
        executor.close(session);
    }
    result
}
