//! `Engine`: the one decode loop. Requests are added; each [`Engine::step`] advances all of them.
//!
//! A step runs one row of every sequence that decodes, and as much prefill as the chunk leaves, in one plan. When the
//! K/V cache is full, the youngest sequence gives its pages up and begins again later with the tokens it has: nobody
//! fails because others run. The same is done with all of them when the executor loses a part of itself: they wait until it is
//! whole again, if that does not take too long. The loop knows no text.

mod admission;
mod delivery;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::executor::{Capacity, Executor, ExecutorError, Health};
use crate::generation::Generation;
use crate::pace::Pace;
use crate::plan::{Role, StepOutput, StepPlan};
use crate::queue::Queue;
use crate::request::{Event, EventKind, Failure, FinishReason, Finished, Request, RequestId};
use crate::running::RunningSequences;
use crate::sampler::SamplingError;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::stats::Stats;

/// Requests that may wait to be run, when nothing else is asked for.
pub const WAITING_MAX: usize = 1024;

/// Rows of a step when nothing else is asked for.
pub const CHUNK_DEFAULT: usize = 512;

/// How long requests wait for an executor that rebuilds itself, when nothing else is asked for.
pub const REPLAY_DEFAULT: Duration = Duration::from_secs(60);

/// Times that a request begins again because the executor lost a part while it ran.
const REPLAYS_MAX: u32 = 3;

/// How long a step waits for such an executor, before others get a look at the loop.
const REBUILD_LOOK: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {tokens} tokens, with room for an answer at most {} fit", max.saturating_sub(1))]
    PromptTooLong { tokens: usize, max: usize },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    #[error("{waiting} requests are waiting, which is the limit; try again in {} s", retry_after.as_secs())]
    QueueFull { waiting: usize, retry_after: Duration },
    #[error("other requests are running")]
    Busy,
    #[error(transparent)]
    Executor(#[from] Arc<ExecutorError>),
}

/// How the loop works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Rows of a step, unless there are more sequences that decode.
    pub chunk: usize,
    /// Requests that may wait beside those that run.
    pub waiting_max: usize,
    /// Whether prompts are looked for among those that were run before.
    pub prefix_cache: bool,
    /// Tokens that may be guessed for a sequence in one step, from what it has said before; 0: none. Answers stay the
    /// same.
    pub speculate: usize,
    /// How long requests wait, and begin again unseen, when the executor loses a part and rebuilds it.
    pub replay: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            chunk: CHUNK_DEFAULT,
            waiting_max: WAITING_MAX,
            prefix_cache: true,
            speculate: 0,
            replay: REPLAY_DEFAULT,
        }
    }
}

pub struct Engine<E: Executor> {
    executor: E,
    options: EngineOptions,
    scheduler: Scheduler,
    waiting: Queue,
    /// In the order of admission: the last is the youngest.
    running: RunningSequences,
    /// The request that did not fit when so many pages were unclaimed: not worth another try before there are more.
    blocked: Option<(RequestId, usize)>,
    in_flight: usize,
    /// Since when the executor rebuilds itself, and why.
    lost: Option<(Instant, Arc<str>)>,
    next_id: u64,
    plan: StepPlan,
    output: StepOutput,
    stats: Stats,
    pace: Pace,
}

impl<E: Executor> Engine<E> {
    /// A step runs at most `chunk` rows, unless there are more sequences that decode.
    pub fn new(executor: E, chunk: usize) -> Self {
        Self::with_options(executor, EngineOptions { chunk, ..EngineOptions::default() })
    }

    pub fn with_options(executor: E, options: EngineOptions) -> Self {
        Self {
            executor,
            options,
            scheduler: Scheduler::new(options.chunk, options.speculate),
            waiting: Queue::default(),
            running: RunningSequences::default(),
            blocked: None,
            in_flight: 0,
            lost: None,
            next_id: 0,
            plan: StepPlan::new(),
            output: StepOutput::new(),
            stats: Stats::default(),
            pace: Pace::new(Instant::now()),
        }
    }

    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// For inspection and benchmarks: sessions that are opened on it are the caller's to close.
    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Ends every request and gives the executor back.
    pub fn into_executor(mut self) -> E {
        self.clear();
        self.executor
    }

    pub fn options(&self) -> EngineOptions {
        self.options
    }

    pub fn capacity(&self) -> Capacity {
        self.executor.capacity()
    }

    /// Nothing is running, nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.in_flight == 0
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that would be accepted now: those that may wait, and those that need not.
    pub fn room(&self) -> usize {
        let seats = self.executor.capacity().sequences_max.saturating_sub(self.running.len());
        self.options.waiting_max.saturating_add(seats).saturating_sub(self.waiting.len())
    }

    /// When a request that finds the queue full should come again: when half of those that wait will have begun, at the
    /// pace of late.
    pub fn retry_after(&self) -> Duration {
        self.pace.interval(Instant::now()).saturating_mul(self.waiting.len() as u32 / 2).max(Duration::from_secs(1))
    }

    pub fn stats(&self) -> Stats {
        let Capacity { pages_total, pages_free, pages_cached, .. } = self.executor.capacity();
        let (running, waiting) = (self.running.len(), self.waiting.len());
        Stats { running, waiting, pages_total, pages_free, pages_cached, ..self.stats }
    }

    /// Accepts a request that can run, now or later. What could never run is refused here.
    pub fn add(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let (capacity, now) = (self.executor.capacity(), Instant::now());
        request.check(&capacity)?;
        if self.is_lost_for_long() {
            // It may be whole again: nobody has looked since the last request ended.
            self.attend(Duration::ZERO, &mut Vec::new());
        }
        if let Some((_, why)) = self.lost.as_ref().filter(|_| self.is_lost_for_long()) {
            return Err(Arc::new(ExecutorError::Lost { why: why.clone() }).into());
        }
        if self.room() == 0 {
            return Err(EngineError::QueueFull { waiting: self.waiting.len(), retry_after: self.retry_after() });
        }
        if self.is_idle() {
            self.pace = Pace::new(now);
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push(Sequence::new(id, request, &capacity, self.options.prefix_cache, now));
        Ok(id)
    }

    /// Ends a request and frees its pages at once. `None` if it has ended already.
    pub fn cancel(&mut self, request: RequestId) -> Option<Finished> {
        let sequence = match self.running.iter().position(|sequence| sequence.id == request) {
            Some(index) => self.remove(index),
            None => self.waiting.remove(request)?,
        };
        Some(self.end(&sequence, FinishReason::Cancelled, Instant::now()))
    }

    /// Submits what can run, waits for the oldest step, and appends what it gave to `events`. Returns false when there
    /// was nothing to run. After an error of the executor no request is left: each was ended, with an event.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        let wait = if self.is_idle() { Duration::ZERO } else { REBUILD_LOOK };
        let result = match self.attend(wait, events) {
            Health::Ready => self.try_step(events),
            Health::Rebuilding { why } if self.is_lost_for_long() => Err(ExecutorError::Lost { why }),
            Health::Rebuilding { .. } => Ok(!self.is_idle()),
        };
        match result {
            Err(ExecutorError::Lost { why }) if !self.is_lost_for_long() => {
                self.retreat(&why, events);
                Ok(true)
            }
            Err(error) => {
                let error = Arc::new(error);
                self.fail_all(&error, events);
                Err(error.into())
            }
            Ok(ran) => Ok(ran),
        }
    }

    /// Whether the executor can run, as far as is known without asking it.
    pub fn health(&self) -> Health {
        self.lost.as_ref().map_or(Health::Ready, |(_, why)| Health::Rebuilding { why: why.clone() })
    }

    /// Adds a request to an idle engine, and runs it as its tokens are asked for. Dropping the stream cancels it.
    pub fn generate(&mut self, request: Request) -> Result<Generation<'_, E>, EngineError> {
        if !self.is_idle() {
            return Err(EngineError::Busy);
        }
        let request = self.add(request)?;
        Ok(Generation::new(self, request))
    }

    /// Lets the executor look after itself, and says whether it can run. While it can not, requests wait.
    fn attend(&mut self, wait: Duration, events: &mut Vec<Event>) -> Health {
        let health = self.executor.attend(wait);
        match &health {
            Health::Ready => self.lost = None,
            Health::Rebuilding { why } => self.retreat(why, events),
        }
        health
    }

    /// Whether requests have waited long enough for the executor.
    fn is_lost_for_long(&self) -> bool {
        self.lost.as_ref().is_some_and(|(since, _)| since.elapsed() > self.options.replay)
    }

    /// The executor lost its sessions: those that ran wait, with what they have, until it is whole again. One that was there each
    /// time may well be the cause, and ends.
    fn retreat(&mut self, why: &Arc<str>, events: &mut Vec<Event>) {
        let since = self.lost.take().map_or_else(Instant::now, |(since, _)| since);
        self.lost = Some((since, why.clone()));
        self.in_flight = 0;
        self.blocked = None;
        while let Some(mut sequence) = self.running.pop() {
            if sequence.replay() <= REPLAYS_MAX {
                self.stats.replays += 1;
                self.waiting.push_front(sequence);
            } else {
                self.waiting.leave(sequence.tenant);
                let error = Arc::new(ExecutorError::Lost { why: why.clone() });
                self.finish(sequence, FinishReason::Failed(Failure::Executor(error)), Instant::now(), events);
            }
        }
    }

    fn fail_all(&mut self, error: &Arc<ExecutorError>, events: &mut Vec<Event>) {
        let now = Instant::now();
        for sequence in self.running.iter().chain(self.waiting.iter()) {
            let reason = FinishReason::Failed(Failure::Executor(error.clone()));
            self.stats.finished.count(&reason);
            let kind = EventKind::Finished(sequence.finished(reason, now));
            events.push(Event { request: sequence.id, kind });
        }
        self.clear();
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        self.admit(events)?;
        self.constrain(events);
        while self.in_flight < self.executor.depth() && self.submit(events)? {}
        if self.in_flight == 0 {
            return Ok(false);
        }
        let mut output = std::mem::take(&mut self.output);
        let collected = self.executor.collect(&mut output);
        self.in_flight -= 1;
        self.stats.steps += 1;
        let delivered = collected.and_then(|()| self.deliver(&mut output, events));
        self.output = output;
        delivered.map(|()| true)
    }

    /// Asks constraints what may come next.
    fn constrain(&mut self, events: &mut Vec<Event>) {
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].constrain() {
                Ok(()) => index += 1,
                Err(error) => {
                    let sequence = self.remove(index);
                    self.finish(sequence, FinishReason::Failed(error.into()), Instant::now(), events);
                }
            }
        }
    }

    /// Plans and submits one step, making room for it if need be. False: there was nothing to plan.
    fn submit(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        loop {
            self.scheduler.plan(&mut self.plan, &mut self.running, &self.executor.capacity());
            if self.plan.is_empty() {
                return Ok(false);
            }
            match self.executor.submit(&self.plan) {
                Ok(()) => break,
                Err(ExecutorError::OutOfPages { .. }) => self.make_room(events),
                Err(error) => return Err(error),
            }
        }
        self.in_flight += 1;
        for entry in self.plan.entries() {
            let index = self.running.position_of(entry.session).expect("only running sequences are planned");
            let samples = if entry.is_sampled() { entry.logit_rows() } else { 0 };
            self.running[index].submitted(entry.end(), samples);
            match entry.role {
                Role::Prompt => self.stats.prefilled_tokens += entry.rows() as u64,
                Role::Generated => self.stats.guessed_tokens += samples.saturating_sub(1) as u64,
            }
        }
        Ok(true)
    }

    /// The cache is full: the youngest sequence goes back to the queue. If it is alone, then nobody will ever free a page
    /// for it, and it ends here.
    fn make_room(&mut self, events: &mut Vec<Event>) {
        if self.running.len() == 1 {
            let sequence = self.remove(0);
            self.finish(sequence, FinishReason::Context, Instant::now(), events);
        } else if let Some(mut sequence) = self.running.pop() {
            self.executor.close(sequence.session());
            sequence.retreat();
            self.stats.preemptions += 1;
            self.waiting.push_front(sequence);
        }
    }

    /// Takes a running sequence out of the loop and closes its session.
    fn remove(&mut self, index: usize) -> Sequence {
        let sequence = self.running.remove(index);
        self.executor.close(sequence.session());
        self.waiting.leave(sequence.tenant);
        sequence
    }

    fn finish(&mut self, sequence: Sequence, reason: FinishReason, now: Instant, events: &mut Vec<Event>) {
        let kind = EventKind::Finished(self.end(&sequence, reason, now));
        events.push(Event { request: sequence.id, kind });
    }

    fn end(&mut self, sequence: &Sequence, reason: FinishReason, now: Instant) -> Finished {
        self.stats.finished.count(&reason);
        self.pace.count(now);
        sequence.finished(reason, now)
    }

    /// Ends every request and forgets the steps in flight.
    fn clear(&mut self) {
        for sequence in self.running.iter() {
            self.executor.close(sequence.session());
        }
        self.running.clear();
        self.waiting.clear();
        while self.in_flight > 0 {
            let _ = self.executor.collect(&mut self.output);
            self.in_flight -= 1;
        }
    }
}
