//! Admission: which waiting sequences begin to run.
//!
//! A sequence is admitted when the pages of its known tokens fit beside those that the running ones are about to allocate. A
//! sequence that could share pages which a running one is about to compute waits for them, so that they are computed once:
//! the choices of one request share the whole pages of their prompt even if all were added at the same time.

use super::Engine;
use crate::executor::{Capacity, Executor, ExecutorError};
use crate::request::Event;
use crate::sequence::Sequence;

impl<E: Executor> Engine<E> {
    /// Opens sessions for waiting sequences, in the order of the queue, while they fit. True if nothing runs because the first
    /// session is still being opened.
    pub(super) fn admit(&mut self, events: &mut Vec<Event>) -> Result<bool, ExecutorError> {
        loop {
            let capacity = self.executor.capacity();
            let running = &self.running;
            let may_run = |next: &Sequence| !running.iter().any(|other| computes_pages_of(other, next, &capacity));
            let Some(position) = self.waiting.next(may_run) else { return Ok(false) };
            let next = self.waiting.get(position);
            if let Some(reason) = next.end_reason() {
                let mut sequence = self.waiting.take(position);
                self.waiting.finished(sequence.tenant);
                sequence.send_prefilled(events);
                self.finish(sequence, reason, self.clock.now(), events);
                continue;
            }
            let claimed: usize = self.running.iter().map(|sequence| pages_claimed(sequence, &capacity)).sum();
            let unclaimed = capacity.pages_free.saturating_sub(claimed);
            let is_blocked = self.blocked.is_some_and(|(id, pages)| id == next.id && unclaimed <= pages);
            if self.running.len() >= capacity.sequences_max || is_blocked && !self.running.is_empty() {
                return Ok(false);
            }
            let opened = match self.executor.open(next.length_max, next.prefix()) {
                Ok(opened) => opened,
                Err(error) if error.is_retryable() && !self.running.is_empty() => return Ok(false),
                Err(ExecutorError::Opening) => return Ok(true),
                Err(error) => return Err(error),
            };
            // The cached pages that it found were counted as free until it opened its session.
            let missing = capacity.pages(next.tokens.len() + 1) - capacity.pages(opened.computed);
            if claimed + missing > self.executor.capacity().pages_free && !self.running.is_empty() {
                self.blocked = Some((next.id, unclaimed));
                self.executor.close(opened.session);
                return Ok(false);
            }
            let mut sequence = self.waiting.take(position);
            if sequence.admit(opened, self.clock.now()) {
                self.waiting.charge(sequence.tenant, sequence.prompt_tokens - opened.computed);
                let lookups = if self.options.prefix_cache { sequence.prefix().reuse_max } else { 0 };
                self.stats.prefix_lookup_tokens += lookups as u64;
                self.stats.prefix_hit_tokens += opened.computed as u64;
            }
            self.running.push(sequence);
        }
    }
}

/// Pages that a running sequence is about to allocate: for its known tokens, and one for tokens to come.
fn pages_claimed(sequence: &Sequence, capacity: &Capacity) -> usize {
    let (known, held) = (capacity.pages(sequence.tokens.len()), capacity.pages(sequence.planned));
    known.saturating_sub(held) + usize::from(capacity.pages(sequence.length_max) > known)
}

/// Whether `running` is about to compute pages that `next` could share.
fn computes_pages_of(running: &Sequence, next: &Sequence, capacity: &Capacity) -> bool {
    let reusable = next.prefix().reuse_max / capacity.page_tokens;
    let common = running.page_hashes.iter().zip(&next.page_hashes).take(reusable).take_while(|(a, b)| a == b).count();
    running.planned < running.prompt_tokens && common > running.planned / capacity.page_tokens
}
