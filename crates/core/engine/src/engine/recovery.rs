//! Recovery: what happens to requests when the executor loses a process, or fails.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Engine, WaitingForModel};
use crate::executor::{Executor, ExecutorError, Health, MissingLayers};
use crate::request::{Event, EventKind, Failure, FinishReason};

/// How often a request is requeued, without a new token between, because the executor lost a process while a step with its
/// rows was in flight.
const LOSSES_MAX: u32 = 3;

impl<E: Executor> Engine<E> {
    /// Polls the executor's health. While it cannot run steps, all sequences wait.
    pub(super) fn poll_health(&mut self, wait: Duration, events: &mut Vec<Event>) -> Health {
        let health = self.executor.poll_health(wait);
        match &health {
            Health::Ready => {
                self.rebuilding = None;
                // Otherwise the requests wait until a step has run.
                self.waiting_since = self.waiting_since.filter(|_| !self.is_idle());
            }
            Health::Rebuilding { why } => self.requeue_all(why, events),
        }
        health
    }

    /// Whether requests have waited for the executor for longer than `rebuild_timeout`.
    pub(super) fn rebuild_timed_out(&self) -> bool {
        let waited = |since: Instant| self.clock.now().saturating_duration_since(since);
        self.waiting_since.is_some_and(|since| waited(since) > self.options.rebuild_timeout)
    }

    /// Why requests end that have waited for too long.
    pub(super) fn timed_out(&self, why: &Arc<str>) -> ExecutorError {
        let seconds = self.options.rebuild_timeout.as_secs();
        let Some(MissingLayers { layers, .. }) = self.executor.missing() else {
            return ExecutorError::Lost { why: format!("it was not replaced within {seconds} s: {why}").into() };
        };
        ExecutorError::Lost { why: format!("nobody has run layers {layers} for {seconds} s: {why}").into() }
    }

    /// A step cannot begin, or cannot end, because the executor looks for a part of the model. An error after `rebuild_timeout`.
    pub(super) fn wait_for_model(&mut self) -> Result<(), ExecutorError> {
        self.begin_waiting();
        match self.waiting_for() {
            Some(WaitingForModel { why, .. }) if self.rebuild_timed_out() => Err(ExecutorError::Lost { why }),
            _ => Ok(()),
        }
    }

    /// The time counts from when the executor has known of the loss.
    fn begin_waiting(&mut self) {
        let now = self.clock.now();
        let since = self.executor.missing().map_or(now, |missing| missing.since.min(now));
        self.waiting_since.get_or_insert(since);
    }

    /// The executor lost its sessions: the running sequences are requeued with the tokens they have. A sequence whose rows
    /// were in flight at more than [`LOSSES_MAX`] losses in a row may be their cause, and fails. One that was only present goes on.
    pub(super) fn requeue_all(&mut self, why: &Arc<str>, events: &mut Vec<Event>) {
        let now = self.clock.now();
        self.begin_waiting();
        self.rebuilding = Some(why.clone());
        let oldest_step = self.in_flight.front().map(|step| step.number);
        self.in_flight.clear();
        self.blocked = None;
        while let Some(mut sequence) = self.running.pop() {
            if sequence.reset_after_loss(oldest_step) <= LOSSES_MAX {
                self.stats.replays += 1;
                self.waiting.requeue(sequence);
            } else {
                self.waiting.finished(sequence.tenant);
                let error = Arc::new(ExecutorError::Lost { why: why.clone() });
                self.finish(sequence, FinishReason::Failed(Failure::Executor(error)), now, events);
            }
        }
    }

    pub(super) fn fail_all(&mut self, error: &Arc<ExecutorError>, events: &mut Vec<Event>) {
        let now = self.clock.now();
        for sequence in self.running.iter().chain(self.waiting.iter()) {
            let reason = FinishReason::Failed(Failure::Executor(error.clone()));
            self.stats.finished.count(&reason);
            let kind = EventKind::Finished(sequence.finished(reason, now));
            events.push(Event { request: sequence.id, kind });
        }
        self.clear();
    }
}
