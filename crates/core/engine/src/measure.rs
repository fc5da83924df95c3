//! The speed of an executor, for `consort bench`: prefill and decode of given tokens, with greedy sampling. Sampled tokens are
//! discarded, so that every round does the same work. As many steps are in flight as the executor takes.

use std::time::{Duration, Instant};

use types::{SessionId, TokenId};

use crate::executor::{Executor, ExecutorError};
use crate::inspect::open_patiently;
use crate::plan::{Phase, RequestedOutput, StepOutput, StepPlan};
use crate::request::rate;
use crate::sampler::SamplingParams;
use crate::scheduler::pipelined_rows;

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

/// Runs `prompt` as one sequence in chunks of at most `chunk`, up to the first token of an answer. With several steps in flight
/// chunks are smaller, as the engine's are.
pub fn prefill<E: Executor + ?Sized>(
    executor: &mut E,
    prompt: &[TokenId],
    chunk: usize,
) -> Result<Throughput, ExecutorError> {
    let depth = executor.depth();
    let chunk = chunk.clamp(1, executor.capacity().rows_max);
    with_sessions(executor, 1, prompt.len(), |executor, sessions| {
        let (mut steps, mut position) = (Pipeline::new(executor, depth), 0);
        let start = Instant::now();
        while position < prompt.len() {
            let rest = &prompt[position..];
            let piece = &rest[..chunk.min(pipelined_rows(rest.len(), depth)).min(rest.len())];
            let requested = if piece.len() == rest.len() { greedy_token() } else { RequestedOutput::Nothing };
            steps.submit(|plan| plan.push(sessions[0], Phase::Prefill, position, piece, requested))?;
            position += piece.len();
        }
        steps.finish()?;
        Ok(Throughput { tokens: prompt.len(), elapsed: start.elapsed() })
    })
}

/// Runs `tokens`, one in each step, as `batch` sequences side by side; each of them after `context` tokens that are not
/// timed. With several steps in flight, each has an equal part of the sequences.
pub fn decode<E: Executor + ?Sized>(
    executor: &mut E,
    context: &[TokenId],
    tokens: &[TokenId],
    batch: usize,
) -> Result<Throughput, ExecutorError> {
    let (chunk, depth) = (executor.capacity().rows_max.max(1), executor.depth());
    with_sessions(executor, batch, context.len() + tokens.len(), |executor, sessions| {
        let share = sessions.len().div_ceil(depth).max(1);
        // A sequence's next token is known when the step before it has been collected.
        let mut steps = Pipeline::new(executor, sessions.len().div_ceil(share));
        for &session in sessions {
            for (index, piece) in context.chunks(chunk).enumerate() {
                let position = index * chunk;
                steps.submit(|plan| plan.push(session, Phase::Prefill, position, piece, RequestedOutput::Nothing))?;
            }
        }
        steps.finish()?;
        let start = Instant::now();
        for (index, token) in tokens.iter().enumerate() {
            let (position, token) = (context.len() + index, std::slice::from_ref(token));
            for part in sessions.chunks(share) {
                steps.submit(|plan| {
                    let mut push = |&session| plan.push(session, Phase::Decode, position, token, greedy_token());
                    part.iter().for_each(&mut push);
                })?;
            }
        }
        steps.finish()?;
        Ok(Throughput { tokens: tokens.len() * batch, elapsed: start.elapsed() })
    })
}

/// Keeps up to `depth` steps of an executor in flight. Their output is discarded.
struct Pipeline<'a, E: Executor + ?Sized> {
    executor: &'a mut E,
    depth: usize,
    in_flight: usize,
    plan: StepPlan,
    output: StepOutput,
}

impl<'a, E: Executor + ?Sized> Pipeline<'a, E> {
    fn new(executor: &'a mut E, depth: usize) -> Self {
        Self { executor, depth: depth.max(1), in_flight: 0, plan: StepPlan::new(), output: StepOutput::new() }
    }

    /// Submits the step that `fill` plans. Waits for the oldest one if there are too many.
    fn submit(&mut self, fill: impl FnOnce(&mut StepPlan)) -> Result<(), ExecutorError> {
        if self.in_flight == self.depth {
            self.collect()?;
        }
        self.plan.clear();
        fill(&mut self.plan);
        self.executor.submit(&self.plan)?;
        self.in_flight += 1;
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ExecutorError> {
        while self.in_flight > 0 {
            self.collect()?;
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<(), ExecutorError> {
        self.in_flight -= 1;
        self.executor.collect(&mut self.output)
    }
}

/// After an error no step stays in flight.
impl<E: Executor + ?Sized> Drop for Pipeline<'_, E> {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            let _ = self.collect();
        }
    }
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
        result = open_patiently(executor, tokens_max).map(|opened| sessions.push(opened.session));
    }
    let result = result.and_then(|()| work(executor, &sessions));
    for session in sessions {
        executor.close(session);
    }
    result
}
