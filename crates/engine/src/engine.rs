//! `Engine`: the one decode loop. Requests are added; each [`Engine::step`] advances all of them.
//!
//! A step runs one row of every sequence that decodes, and as much prefill as the chunk leaves, in one plan. When the
//! K/V cache is full, the youngest sequence gives its pages up and begins again later with the tokens it has: nobody
//! fails because others run. The loop knows no clock but the one that it stamps timings with, and no text.

use std::collections::VecDeque;
use std::time::Instant;

use types::{SessionId, TokenId};

use crate::executor::{Capacity, Executor, ExecutorError};
use crate::plan::{Sample, StepOutput, StepPlan};
use crate::request::{Event, EventKind, FinishReason, Finished, Request, RequestId};
use crate::sampler::SamplingError;
use crate::sequence::Sequence;

/// Requests that may wait to be run.
pub const WAITING_MAX: usize = 1024;

/// Rows of a step when nothing else is asked for.
pub const CHUNK_DEFAULT: usize = 512;

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
    #[error("{max} requests are waiting, which is the limit")]
    QueueFull { max: usize },
    #[error("other requests are running")]
    Busy,
    #[error(transparent)]
    Executor(#[from] ExecutorError),
}

pub struct Engine<E: Executor> {
    executor: E,
    chunk: usize,
    waiting: VecDeque<Sequence>,
    /// In the order of admission: the last is the youngest.
    running: Vec<Sequence>,
    in_flight: usize,
    next_id: u64,
    plan: StepPlan,
    output: StepOutput,
}

impl<E: Executor> Engine<E> {
    /// A step runs at most `chunk` rows, unless there are more sequences that decode.
    pub fn new(executor: E, chunk: usize) -> Self {
        Self {
            executor,
            chunk: chunk.max(1),
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_flight: 0,
            next_id: 0,
            plan: StepPlan::new(),
            output: StepOutput::new(),
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

    pub fn chunk(&self) -> usize {
        self.chunk
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

    /// Accepts a request that can run, now or later. What could never run is refused here.
    pub fn add(&mut self, request: Request) -> Result<RequestId, EngineError> {
        let capacity = self.executor.capacity();
        let (tokens, max, vocab) = (request.prompt.len(), capacity.tokens_max(), capacity.vocab);
        if tokens == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens >= max {
            return Err(EngineError::PromptTooLong { tokens, max });
        }
        if let Some(&TokenId(token)) = request.prompt.iter().find(|token| token.0 as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { token, vocab });
        }
        request.sampling.check(vocab)?;
        if self.waiting.len() >= WAITING_MAX {
            return Err(EngineError::QueueFull { max: WAITING_MAX });
        }
        let id = RequestId(self.next_id);
        self.next_id += 1;
        self.waiting.push_back(Sequence::new(id, request, max, Instant::now()));
        Ok(id)
    }

    /// Ends a request and frees its pages at once. `None` if it has ended already.
    pub fn cancel(&mut self, request: RequestId) -> Option<Finished> {
        let sequence = if let Some(index) = self.running.iter().position(|sequence| sequence.id == request) {
            self.remove(index)
        } else {
            let index = self.waiting.iter().position(|sequence| sequence.id == request)?;
            self.waiting.remove(index)?
        };
        Some(sequence.finished(FinishReason::Cancelled, Instant::now()))
    }

    /// Submits what can run, waits for the oldest step, and appends what it gave to `events`. Returns false when there
    /// was nothing to run. After an error of the executor no request is left: all were ended.
    pub fn step(&mut self, events: &mut Vec<Event>) -> Result<bool, EngineError> {
        let result = self.try_step(events);
        if result.is_err() {
            self.clear();
        }
        Ok(result?)
    }

    /// Adds a request to an idle engine, and runs it as its tokens are asked for. Dropping the stream cancels it.
    pub fn generate(&mut self, request: Request) -> Result<Generation<'_, E>, EngineError> {
        if !self.is_idle() {
            return Err(EngineError::Busy);
        }
        let request = self.add(request)?;
        Ok(Generation { engine: self, request, events: Vec::new(), next: 0, ended: false })
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        self.admit(events)?;
        while self.in_flight < self.executor.depth() && self.submit(events)? {}
        if self.in_flight == 0 {
            return Ok(false);
        }
        let mut output = std::mem::take(&mut self.output);
        let collected = self.executor.collect(&mut output);
        self.in_flight -= 1;
        if collected.is_ok() {
            let now = Instant::now();
            for sample in output.samples.drain(..) {
                self.deliver(sample, now, events);
            }
        }
        self.output = output;
        collected.map(|()| true)
    }

    /// Opens sessions, first come first served, while their known tokens fit beside those of the running ones.
    fn admit(&mut self, events: &mut Vec<Event>) -> Result<(), ExecutorError> {
        while let Some(next) = self.waiting.front() {
            let capacity = self.executor.capacity();
            if let Some(reason) = next.is_complete() {
                let sequence = self.waiting.pop_front().expect("there is a front");
                finish(&sequence, reason, Instant::now(), events);
                continue;
            }
            let claimed =
                |sequence: &Sequence| capacity.pages(sequence.tokens.len()) - capacity.pages(sequence.planned);
            let claims: usize = self.running.iter().map(claimed).sum();
            let fits = claims + capacity.pages(next.tokens.len() + 1) <= capacity.pages_free;
            if self.running.len() >= capacity.sequences_max || !(fits || self.running.is_empty()) {
                break;
            }
            let session = match self.executor.open(next.length_max) {
                Ok(session) => session,
                Err(error) if error.is_retryable() && !self.running.is_empty() => break,
                Err(error) => return Err(error),
            };
            let mut sequence = self.waiting.pop_front().expect("there is a front");
            sequence.admit(session, Instant::now());
            self.running.push(sequence);
        }
        Ok(())
    }

    /// Plans and submits one step, making room for it if need be. False: there was nothing to plan.
    fn submit(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        loop {
            self.plan_step();
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
            let sequence = self.running.iter_mut().find(|sequence| sequence.session == Some(entry.session));
            sequence.expect("only running sequences are planned").planned = entry.end();
        }
        Ok(true)
    }

    /// One row of each sequence that has one token to run, then prefill with what the chunk leaves: at least one row,
    /// so that many decoding sequences do not keep a prompt waiting for ever.
    fn plan_step(&mut self) {
        let capacity = self.executor.capacity();
        let (mut rows, mut pages) = (0, 0);
        self.plan.clear();
        for decodes in [true, false] {
            let limit = if decodes { capacity.rows_max } else { self.chunk.max(rows + 1).min(capacity.rows_max) };
            for sequence in self.running.iter().filter(|sequence| sequence.ready() > 0) {
                let take = sequence.ready().min(limit.saturating_sub(rows));
                let table = capacity.pages(sequence.planned + take);
                let step_is_full = take == 0 || self.plan.entries().len() == capacity.sequences_max;
                if (sequence.ready() == 1) != decodes || step_is_full || pages + table > capacity.step_pages_max {
                    continue;
                }
                let session = sequence.session.expect("a running sequence has a session");
                let tokens = &sequence.tokens[sequence.planned..sequence.planned + take];
                self.plan.push(session, sequence.planned, tokens, sequence.want(take));
                rows += take;
                pages += table;
            }
        }
    }

    /// The cache is full: the youngest sequence goes back to the queue. If it is alone, then nobody will ever free a page
    /// for it, and it ends here.
    fn make_room(&mut self, events: &mut Vec<Event>) {
        let youngest = self.running.len() - 1;
        let mut sequence = self.remove(youngest);
        if self.running.is_empty() {
            finish(&sequence, FinishReason::Context, Instant::now(), events);
        } else {
            sequence.retreat();
            self.waiting.push_front(sequence);
        }
    }

    fn deliver(&mut self, sample: Sample, now: Instant, events: &mut Vec<Event>) {
        let Some(index) = self.position_of(sample.session) else {
            return; // cancelled, or sent back to the queue, while its step was in flight
        };
        let sequence = &mut self.running[index];
        debug_assert_eq!(sample.position, sequence.tokens.len());
        let ended = match sample.outcome {
            Err(error) => Some(FinishReason::Failed(error)),
            Ok(sampled) => {
                let ended = sequence.extend(sampled.token, now);
                if !matches!(ended, Some(FinishReason::Eos(_))) {
                    events.push(Event { request: sequence.id, kind: EventKind::Token(sampled) });
                }
                ended
            }
        };
        if let Some(reason) = ended {
            let sequence = self.remove(index);
            finish(&sequence, reason, now, events);
        }
    }

    fn position_of(&self, session: SessionId) -> Option<usize> {
        self.running.iter().position(|sequence| sequence.session == Some(session))
    }

    /// Takes a running sequence out of the loop and closes its session.
    fn remove(&mut self, index: usize) -> Sequence {
        let sequence = self.running.remove(index);
        self.executor.close(sequence.session.expect("a running sequence has a session"));
        sequence
    }

    /// Ends every request and forgets the steps in flight.
    fn clear(&mut self) {
        while !self.running.is_empty() {
            self.remove(self.running.len() - 1);
        }
        self.waiting.clear();
        while self.in_flight > 0 {
            let _ = self.executor.collect(&mut self.output);
            self.in_flight -= 1;
        }
    }
}

fn finish(sequence: &Sequence, reason: FinishReason, now: Instant, events: &mut Vec<Event>) {
    let kind = EventKind::Finished(sequence.finished(reason, now));
    events.push(Event { request: sequence.id, kind });
}

/// The events of one request, made as they are asked for. The last one is [`EventKind::Finished`].
pub struct Generation<'a, E: Executor> {
    engine: &'a mut Engine<E>,
    request: RequestId,
    events: Vec<Event>,
    next: usize,
    ended: bool,
}

impl<E: Executor> Generation<'_, E> {
    /// Stops here. `None` if the request has ended already.
    pub fn cancel(&mut self) -> Option<Finished> {
        self.ended = true;
        self.engine.cancel(self.request)
    }
}

impl<E: Executor> Iterator for Generation<'_, E> {
    type Item = Result<EventKind, EngineError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            if let Some(event) = self.events.get(self.next) {
                self.next += 1;
                self.ended = matches!(event.kind, EventKind::Finished(_));
                return Some(Ok(event.kind.clone()));
            }
            self.events.clear();
            self.next = 0;
            match self.engine.step(&mut self.events) {
                Ok(ran) => self.ended = !ran && self.events.is_empty(),
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

impl<E: Executor> Drop for Generation<'_, E> {
    fn drop(&mut self) {
        self.engine.cancel(self.request);
    }
}
