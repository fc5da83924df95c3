//! `Engine`: the one decode loop. Requests are added; each [`Engine::step`] advances all of them.
//!
//! A step runs one row of every sequence in decode (of every `depth`-th, if an executor has `depth` steps in flight), and as many
//! prefill rows as the chunk and the step's time allow, in one plan. When the KV cache is full, the youngest sequence is preempted: its pages are freed, and it is requeued with the
//! tokens it has, so no request fails because others run. When the executor loses a process, all sequences are requeued,
//! until a step has run again or [`EngineOptions::rebuild_timeout`] has passed. The engine knows tokens, not text.

mod admission;
mod delivery;
mod recovery;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::completion_rate::CompletionRate;
use crate::executor::{Capacity, Executor, ExecutorError, Health, MissingLayers};
use crate::generation::Generation;
use crate::plan::{Phase, StepOutput, StepPlan};
use crate::prefill_cost::PrefillRows;
use crate::queue::WaitingQueue;
use crate::request::{Event, EventKind, FinishReason, Finished, Request, RequestId};
use crate::running::RunningSequences;
use crate::sampler::SamplingParamsError;
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::stats::EngineStats;
use types::LayerRange;

/// The default of [`EngineOptions::waiting_max`].
pub const WAITING_MAX: usize = 1024;

/// The default of [`EngineOptions::chunk`].
pub const CHUNK_DEFAULT: usize = 512;

/// The default of [`EngineOptions::prefill_step`].
pub const PREFILL_STEP_DEFAULT: Duration = Duration::from_millis(200);

/// The default of [`EngineOptions::rebuild_timeout`].
pub const REBUILD_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// How long a step waits for an executor that is not ready before it returns to the caller.
const REBUILD_POLL: Duration = Duration::from_millis(20);

/// How long a step waits for an executor that looks for a part of its model before it returns to the caller.
const COLLECT_POLL: Duration = Duration::from_millis(100);

/// The reason where an executor tells none.
const NOT_READY: &str = "it is not ready";

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("the prompt is empty")]
    EmptyPrompt,
    #[error("the prompt has {tokens} tokens, at most {} fit beside an answer", max.saturating_sub(1))]
    PromptTooLong { tokens: usize, max: usize },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error(transparent)]
    Sampling(#[from] SamplingParamsError),
    #[error("{waiting} requests are waiting, which is the limit; try again in {} s", retry_after.as_secs())]
    QueueFull { waiting: usize, retry_after: Duration },
    #[error("other requests are running")]
    Busy,
    #[error(transparent)]
    Executor(#[from] Arc<ExecutorError>),
}

/// The engine's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Rows of a step, unless more sequences are in decode.
    pub chunk: usize,
    /// About how long a step with prefill may take while sequences generate, which wait for it: it gets fewer rows than
    /// `chunk`, but at least 16. `None`: it gets the whole chunk.
    pub prefill_step: Option<Duration>,
    /// Requests that may wait, in addition to those that run.
    pub waiting_max: usize,
    /// Whether pages of prompts that were computed before are reused.
    pub prefix_cache: bool,
    /// Draft tokens of a sequence in one step, found by prompt lookup; 0 turns speculative decoding off. Answers stay the
    /// same.
    pub draft_tokens_max: usize,
    /// How long requests wait for an executor that has lost a part of the model and replaces it, from the loss until a step has
    /// run.
    pub rebuild_timeout: Duration,
}

/// Requests wait, because a part of the model is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingForModel {
    /// The layers that nobody runs, if the executor knows them.
    pub layers: Option<LayerRange>,
    pub since: Instant,
    pub why: Arc<str>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            chunk: CHUNK_DEFAULT,
            prefill_step: Some(PREFILL_STEP_DEFAULT),
            waiting_max: WAITING_MAX,
            prefix_cache: true,
            draft_tokens_max: 0,
            rebuild_timeout: REBUILD_TIMEOUT_DEFAULT,
        }
    }
}

/// A step that was submitted and not collected.
struct StepInFlight {
    /// Steps are numbered in the order of submission.
    number: u64,
    submitted: Instant,
    prefill: PrefillRows,
}

pub struct Engine<E: Executor> {
    executor: E,
    options: EngineOptions,
    scheduler: Scheduler,
    waiting: WaitingQueue,
    running: RunningSequences,
    /// A request that did not fit, and how many pages were unclaimed then: it is tried again when more are.
    blocked: Option<(RequestId, usize)>,
    /// Steps that were submitted and not collected, oldest first.
    in_flight: VecDeque<StepInFlight>,
    next_step: u64,
    /// When the last step was collected.
    collected: Option<Instant>,
    /// Why the executor cannot run steps now.
    rebuilding: Option<Arc<str>>,
    /// Since when no step has run because a part of the model was lost. The executor may be ready meanwhile, and lose it again.
    waiting_since: Option<Instant>,
    next_id: u64,
    plan: StepPlan,
    output: StepOutput,
    stats: EngineStats,
    completion_rate: CompletionRate,
    clock: Clock,
}

impl<E: Executor> Engine<E> {
    /// A step runs at most `chunk` rows, unless more sequences are in decode.
    pub fn new(executor: E, chunk: usize) -> Self {
        Self::with_options(executor, EngineOptions { chunk, ..EngineOptions::default() })
    }

    pub fn with_options(executor: E, options: EngineOptions) -> Self {
        Self::with_clock(executor, options, Instant::now)
    }

    /// `now` returns the time; it never goes back.
    pub fn with_clock(executor: E, options: EngineOptions, now: impl Fn() -> Instant + Send + 'static) -> Self {
        let clock = Clock::new(now);
        Self {
            executor,
            options,
            scheduler: Scheduler::new(options.chunk, options.draft_tokens_max, options.prefill_step),
            waiting: WaitingQueue::default(),
            running: RunningSequences::default(),
            blocked: None,
            in_flight: VecDeque::new(),
            next_step: 0,
            collected: None,
            rebuilding: None,
            waiting_since: None,
            next_id: 0,
            plan: StepPlan::new(),
            output: StepOutput::new(),
            stats: EngineStats::default(),
            completion_rate: CompletionRate::new(clock.now()),
            clock,
        }
    }

    pub fn executor(&self) -> &E {
        &self.executor
    }

    /// For inspection and benchmarks. The caller closes the sessions that it opens.
    pub fn executor_mut(&mut self) -> &mut E {
        &mut self.executor
    }

    /// Ends every request and returns the executor.
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

    /// No request runs or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.in_flight.is_empty()
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Requests that would be accepted now: those that may wait, and those that can run at once.
    pub fn headroom(&self) -> usize {
        let can_run = self.executor.capacity().sequences_max.saturating_sub(self.running.len());
        self.options.waiting_max.saturating_add(can_run).saturating_sub(self.waiting.len())
    }

    /// After what time a client should retry a request that found the queue full: when half of the waiting requests
    /// will have started, at the current rate.
    pub fn retry_after(&self) -> Duration {
        self.completion_rate
            .interval(self.clock.now())
            .saturating_mul(self.waiting.len() as u32 / 2)
            .max(Duration::from_secs(1))
    }

    pub fn stats(&self) -> EngineStats {
        let Capacity { pages_total, pages_free, pages_cached, .. } = self.executor.capacity();
        let (running, waiting) = (self.running.len(), self.waiting.len());
        EngineStats { running, waiting, pages_total, pages_free, pages_cached, ..self.stats }
    }

    /// Accepts a request, to run now or later. A request that could never run is refused.
    pub fn add(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let (capacity, now) = (self.executor.capacity(), self.clock.now());
        request.check(&capacity)?;
        if self.rebuild_timed_out() {
            // The executor may be ready again: it is not polled while no request runs or waits.
            self.poll_health(Duration::ZERO, &mut Vec::new());
        }
        if let Some(why) = self.rebuilding.as_ref().filter(|_| self.rebuild_timed_out()) {
            return Err(Arc::new(self.timed_out(why)).into());
        }
        if self.headroom() == 0 {
            return Err(EngineError::QueueFull { waiting: self.waiting.len(), retry_after: self.retry_after() });
        }
        if self.is_idle() {
            self.completion_rate = CompletionRate::new(now);
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
        let now = self.clock.now();
        Some(self.end(&sequence, FinishReason::Cancelled, now))
    }

    /// Submits what can run, waits for the oldest step, and appends its events to `events`. Returns false if there was nothing
    /// to run. After an error of the executor no request is left: each has ended, with an event.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        let wait = if self.is_idle() { Duration::ZERO } else { REBUILD_POLL };
        let result = match self.poll_health(wait, events) {
            Health::Ready => self.try_step(events),
            Health::Rebuilding { why } if self.rebuild_timed_out() => Err(ExecutorError::Lost { why }),
            Health::Rebuilding { .. } => Ok(!self.is_idle()),
        };
        match result {
            Err(ExecutorError::Lost { why }) if self.rebuild_timed_out() => {
                let error = Arc::new(self.timed_out(&why));
                self.fail_all(&error, events);
                Err(error.into())
            }
            Err(ExecutorError::Lost { why }) => {
                self.requeue_all(&why, events);
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

    /// Whether the executor can run steps, as of the last poll.
    pub fn health(&self) -> Health {
        self.rebuilding.as_ref().map_or(Health::Ready, |why| Health::Rebuilding { why: why.clone() })
    }

    /// What requests wait for while no step can run.
    pub fn waiting_for(&self) -> Option<WaitingForModel> {
        let since = self.waiting_since.filter(|_| !self.is_idle() || self.rebuilding.is_some())?;
        let (layers, found) = self.executor.missing().map_or((None, None), |missing| {
            let MissingLayers { layers, why, .. } = missing;
            (Some(layers), Some(why))
        });
        let why = found.or_else(|| self.rebuilding.clone()).unwrap_or_else(|| NOT_READY.into());
        Some(WaitingForModel { layers, since, why })
    }

    /// Adds a request to an idle engine. The iterator runs it, and cancels it when dropped.
    pub fn generate(&mut self, request: Request) -> Result<Generation<'_, E>, EngineError> {
        if !self.is_idle() {
            return Err(EngineError::Busy);
        }
        let request = self.add(request)?;
        Ok(Generation::new(self, request))
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        let is_opening = self.admit(events)?;
        self.update_masks(events);
        while self.in_flight.len() < self.executor.depth() && self.submit(events)? {}
        if self.in_flight.is_empty() {
            return if is_opening { self.wait_for_model().map(|()| true) } else { Ok(false) };
        }
        let mut output = std::mem::take(&mut self.output);
        let collected = match self.executor.poll_collect(&mut output, COLLECT_POLL) {
            Ok(true) => {
                self.waiting_since = None;
                Ok(())
            }
            Ok(false) => {
                self.output = output;
                return self.wait_for_model().map(|()| true);
            }
            Err(error) => Err(error),
        };
        // After a loss the step counts as in flight until its sequences are requeued.
        if !matches!(&collected, Err(error) if error.is_lost())
            && let Some(step) = self.in_flight.remove(output.overtaken)
        {
            self.record_time(&step);
        }
        self.stats.steps += 1;
        let delivered = collected.and_then(|()| self.deliver(&mut output, events));
        self.output = output;
        delivered.map(|()| true)
    }

    /// Records how long the step that was just collected took. With several in flight, its time begins when the step before
    /// it was collected.
    fn record_time(&mut self, step: &StepInFlight) {
        let now = self.clock.now();
        let begun = self.collected.map_or(step.submitted, |collected| collected.max(step.submitted));
        self.scheduler.record(step.prefill, now.saturating_duration_since(begun));
        self.collected = Some(now);
    }

    /// Updates the masks of constrained sequences.
    fn update_masks(&mut self, events: &mut Vec<Event>) {
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].update_mask() {
                Ok(()) => index += 1,
                Err(error) => {
                    let sequence = self.remove(index);
                    self.finish(sequence, FinishReason::Failed(error.into()), self.clock.now(), events);
                }
            }
        }
    }

    /// Plans and submits one step, and preempts sequences while its pages do not fit. False if there was nothing to plan.
    fn submit(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        let (submitted, prefill) = loop {
            let (capacity, depth) = (self.executor.capacity(), self.executor.depth());
            let prefill = self.scheduler.plan(&mut self.plan, &mut self.running, &capacity, depth);
            if self.plan.is_empty() {
                return Ok(false);
            }
            // An executor may do the work in `submit` or in `collect`.
            let submitted = self.clock.now();
            match self.executor.submit(&self.plan) {
                Ok(()) => break (submitted, prefill),
                Err(ExecutorError::OutOfPages { .. }) => self.preempt(events),
                Err(error) => return Err(error),
            }
        };
        let number = self.next_step;
        self.next_step += 1;
        self.in_flight.push_back(StepInFlight { number, submitted, prefill });
        for entry in self.plan.entries() {
            let index = self.running.position_of(entry.session).expect("only running sequences are planned");
            let samples = if entry.is_sampled() { entry.logit_rows() } else { 0 };
            self.running[index].submitted(number, entry.end(), samples);
            match entry.phase {
                Phase::Prefill => self.stats.prefilled_tokens += entry.rows() as u64,
                Phase::Decode => self.stats.draft_tokens += samples.saturating_sub(1) as u64,
            }
        }
        Ok(true)
    }

    /// The cache is full: requeues the youngest sequence. A sequence that is alone ends, because no other will free a page for
    /// it.
    fn preempt(&mut self, events: &mut Vec<Event>) {
        if self.running.len() == 1 {
            let sequence = self.remove(0);
            self.finish(sequence, FinishReason::Context, self.clock.now(), events);
        } else if let Some(sequence) = self.running.pop() {
            self.requeue(sequence);
        }
    }

    /// Closes the session of a sequence that ran, and has it wait for another one.
    fn requeue(&mut self, mut sequence: Sequence) {
        self.executor.close(sequence.session());
        sequence.reset();
        self.stats.preemptions += 1;
        self.waiting.requeue(sequence);
    }

    /// Removes a running sequence and closes its session.
    fn remove(&mut self, index: usize) -> Sequence {
        let sequence = self.running.remove(index);
        self.executor.close(sequence.session());
        self.waiting.finished(sequence.tenant);
        sequence
    }

    fn finish(&mut self, sequence: Sequence, reason: FinishReason, now: Instant, events: &mut Vec<Event>) {
        let kind = EventKind::Finished(self.end(&sequence, reason, now));
        events.push(Event { request: sequence.id, kind });
    }

    fn end(&mut self, sequence: &Sequence, reason: FinishReason, now: Instant) -> Finished {
        self.stats.finished.count(&reason);
        self.completion_rate.count(now);
        sequence.finished(reason, now)
    }

    /// Ends every request and discards the steps in flight.
    fn clear(&mut self) {
        for sequence in self.running.iter() {
            self.executor.close(sequence.session());
        }
        self.running.clear();
        self.waiting.clear();
        while self.in_flight.pop_front().is_some() {
            let _ = self.executor.collect(&mut self.output);
        }
    }
}
