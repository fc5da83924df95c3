//! Who of those that wait may run now.
//!
//! A sequence is admitted when the pages of its known tokens fit beside what the running ones are about to take. One that
//! could share pages which another is about to compute waits for them: they need not be computed twice.

use std::time::Instant;

use super::Engine;
use crate::executor::{Capacity, Executor, ExecutorError};
use crate::request::Event;
use crate::sequence::Sequence;

impl<E: Executor> Engine<E> {
    /// Opens sessions for those whose turn it is, while their known tokens fit beside those of the running ones.
    pub(super) fn admit(&mut self, events: &mut Vec<Event>) -> Result<(), ExecutorError> {
        loop {
            let capacity = self.executor.capacity();
            let running = &self.running;
            let may_go = |next: &Sequence| !running.iter().any(|other| computes_for(other, next, &capacity));
            let Some(place) = self.waiting.next(may_go) else { return Ok(()) };
            let next = self.waiting.get(place);
            if let Some(reason) = next.is_complete() {
                let mut sequence = self.waiting.take(place);
                self.waiting.leave(sequence.tenant);
                sequence.prefilled(events);
                self.finish(sequence, reason, Instant::now(), events);
                continue;
            }
            let claimed: usize = self.running.iter().map(|sequence| claim(sequence, &capacity)).sum();
            let unclaimed = capacity.pages_free.saturating_sub(claimed);
            let is_hopeless = self.blocked.is_some_and(|(id, pages)| id == next.id && unclaimed <= pages);
            if self.running.len() >= capacity.sequences_max || is_hopeless && !self.running.is_empty() {
                return Ok(());
            }
            let opened = match self.executor.open(next.length_max, next.prefix()) {
                Ok(opened) => opened,
                Err(error) if error.is_retryable() && !self.running.is_empty() => return Ok(()),
                Err(error) => return Err(error),
            };
            // What it found of its prefix need not be free, nor stay free.
            let missing = capacity.pages(next.tokens.len() + 1) - capacity.pages(opened.computed);
            if claimed + missing > self.executor.capacity().pages_free && !self.running.is_empty() {
                self.blocked = Some((next.id, unclaimed));
                self.executor.close(opened.session);
                return Ok(());
            }
            let mut sequence = self.waiting.take(place);
            if sequence.admit(opened, Instant::now()) {
                self.waiting.charge(sequence.tenant, sequence.prompt - opened.computed);
                let lookups = if self.options.prefix_cache { sequence.prefix().reuse_max } else { 0 };
                self.stats.prefix_lookup_tokens += lookups as u64;
                self.stats.prefix_hit_tokens += opened.computed as u64;
            }
            self.running.push(sequence);
        }
    }
}

/// Pages that a running sequence is about to take: for tokens that it knows, and one for tokens to come.
fn claim(sequence: &Sequence, capacity: &Capacity) -> usize {
    let (known, held) = (capacity.pages(sequence.tokens.len()), capacity.pages(sequence.planned));
    known.saturating_sub(held) + usize::from(capacity.pages(sequence.length_max) > known)
}

/// Whether `running` is about to compute pages that `next` could share: worth waiting for.
fn computes_for(running: &Sequence, next: &Sequence, capacity: &Capacity) -> bool {
    let reusable = next.prefix().reuse_max / capacity.page_tokens;
    let common = running.pages.iter().zip(&next.pages).take(reusable).take_while(|(a, b)| a == b).count();
    running.planned < running.prompt && common > running.planned / capacity.page_tokens
}
